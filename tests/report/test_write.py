"""Files of a report: the same numbers in each, one page that needs no other file."""

import base64
import csv
import re
from html.parser import HTMLParser

import pytest

from smat_fn.report import Section, Table, write_full_report, write_report

PNG = b"\x89PNG\r\n\x1a\nnot much of one"
VOID = {"meta", "img", "br", "hr", "link"}


class Reader(HTMLParser):
    """Tags that are open, and every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.usefixtures("_undrawn")
def test_one_page_markdown_csv_and_png(make, tmp_path):
    rows, runs = make("FT", [50.0, 51.0])
    more, others = make("SMAT", [52.5, 52.0], "smat")
    page = write_full_report(
        tmp_path / "new" / "out", rows + more, runs + others, title="A <title>",
        extra=[("Own part", "Words *here*.", Table(["K", "Score"], [[2, 93.25], [3, None]]), PNG)],
    )  # fmt: skip
    out = page.parent
    names = {file.name for file in out.iterdir()}
    assert names == {
        "report.html", "report.md", "summary.csv", "main-results.csv", "main-results.png", "paired-differences.csv",
        "paired-differences.png", "own-part.csv", "own-part.png", "scores-by-task.csv", "coefficients.csv",
        "settings.csv", "scores.csv",
    }  # fmt: skip
    text = (out / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# A \\<title>\n\n## Summary\n")
    assert "| 2 | 93.25 |\n| 3 | – |\n\n![Own part](own-part.png)" in text  # noqa: RUF001
    assert (out / "own-part.png").read_bytes() == PNG
    with open(out / "scores.csv", newline="", encoding="utf-8") as file:
        scores = list(csv.DictReader(file))
    assert scores[0].keys() >= {"label", "seed", "model", "task", "split", "score", "coef", "hyperparameters"}
    assert [float(line["score"]) for line in scores] == [row.score for row in rows + more]
    assert {name for _, name in re.findall(r"(!\[.*?\])\((.*?)\)", text)} <= names


def test_the_page_is_whole_without_scripts_or_other_files(make, tmp_path):
    rows, runs = make("FT", [50.0, 51.0])
    more, others = make("SMAT <b> | *x* __y__ a_b [z](u) `", [52.5, 52.0], "smat")
    page = write_full_report(tmp_path, rows + more, runs + others, extra=[Section("Ä b", "text", None, PNG)])
    reader = Reader(page.read_text(encoding="utf-8"))
    assert reader.open == []
    assert not {"script", "link", "b"} & {tag for tag, _ in reader.tags}
    images = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    assert len(images) == 3
    stored = [base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in images]
    assert stored[0] == (tmp_path / "main-results.png").read_bytes()
    assert stored[2] == PNG
    # 1800 dots at 200 an inch: words of 9 points are as large as the page's 15 pixels; the last is no real PNG
    assert [attributes.get("width") for tag, attributes in reader.tags if tag == "img"] == [
        "1080", str(round(0.6 * int.from_bytes(stored[1][16:20], "big"))), None
    ]  # fmt: skip
    anchors = {attributes["id"] for tag, attributes in reader.tags if tag == "h2"}
    links = [attributes["href"] for tag, attributes in reader.tags if tag == "a"]
    assert {link[1:] for link in links} == anchors
    assert "width=device-width" in page.read_text(encoding="utf-8")
    cells = [words for words in reader.words if "<b>" in words]
    assert "SMAT <b> | *x* __y__ a_b [z](u) `" in cells
    assert "em" not in {tag for tag, _ in reader.tags}
    assert "52.25 ± 0.35" in reader.words


def test_an_image_that_a_page_would_lack_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"image 'own\.png', which the page would lack: give it as a Section's png"):
        write_report(tmp_path / "out", "T", [Section("S", "![mine](own.png)", Table(["a"], [[1]]))])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["s.csv", "s.png", "report.md", "report.html"])
def test_files_that_no_report_wrote_are_not_replaced(name, tmp_path):
    (tmp_path / name).write_text("mine")
    sections = [Section("S", "words", Table(["a"], [[1]]), PNG)]
    with pytest.raises(ValueError, match=rf"{name} holds something else than is written there: move it"):
        write_report(tmp_path, "T", sections)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    write_report(tmp_path, "T", sections)
    write_report(tmp_path, "T", [Section("S", "more words", Table(["b"], [[1]]), PNG)])  # its own are replaced
    assert (tmp_path / "s.csv").read_text() == "b\n1\n"


def test_sections_of_one_title_have_files_of_their_own(tmp_path):
    several = [Section("Same", "one", None, PNG), Section("same!", "two", None, PNG + b"2"), Section("Same 2", "three")]
    write_report(tmp_path, "T", several)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("##")] == ["## Same", "## same! 2", "## Same 2 2"]
    assert (tmp_path / "same-2.png").read_bytes() == PNG + b"2"
    assert Section("\u56fe").slug == "section"
    own = {"own.csv", "same-2-2.png"}  # the third section has no figure
    for name in own:
        (tmp_path / name).touch()
    write_report(tmp_path, "T", [Section("Same", "one", Table(["a"], [[1]]))])
    assert {path.name for path in tmp_path.iterdir()} == {*own, "report.html", "report.md", "same.csv"}


@pytest.mark.usefixtures("_undrawn")
def test_reports_of_the_same_results_are_the_same(make, tmp_path):
    for name in ("one", "two"):
        write_full_report(str(tmp_path / name), *make("FT", [50.0, 51.0]))
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_columns_of_numbers_stand_to_the_right_and_a_figure_may_be_a_file(tmp_path):
    (tmp_path / "x.png").write_bytes(PNG)
    table = Table(["Name", "n", "Words"], [["a|b", "-1.5 ± 0.1", "x"], ["c", None, "2 x"]])
    write_report(tmp_path / "out", "T", [Section("S", "", table, tmp_path / "x.png")])
    assert (tmp_path / "out" / "report.md").read_text(encoding="utf-8") == (
        "# T\n\n## S\n\n| Name | n | Words |\n| --- | ---: | --- |\n| a\\|b | -1.5 ± 0.1 | x |\n| c | – | 2 x |\n\n"  # noqa: RUF001
        "![S](s.png)\n"
    )
    assert (tmp_path / "out" / "s.png").read_bytes() == PNG
    assert (tmp_path / "out" / "s.csv").read_text(encoding="utf-8") == "Name,n,Words\na|b,-1.5 ± 0.1,x\nc,,2 x\n"
