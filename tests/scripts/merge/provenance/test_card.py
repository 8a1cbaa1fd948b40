"""The model card's metadata are what the hub's own client takes."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id
from markdown_it import MarkdownIt

from smat_fn.scripts.merge.provenance.card import adapter_card, card, exported_card, library_of, licenses_of, model_ids

NAMES = (
    "gpt2", "owner/name", "a-b_c.d", "my base", "two/slashes/here", "-start", "end-", "a--b", "a..b", "repo.git",
    "owner/x.git",     "ü",
    "x" * 96, "x" * 97, "./folder", "owner/", ".hidden", "owner/-x", "name@revision", "1", "a/b.", "_a_",
)  # fmt: skip
MANIFEST = {
    "merger": "ta", "hyperparameters": {"coef": 1.0}, "label": "A+B", "experts": {"A": None, "B": None}, "dev": {},
    "dev_curve": [], "base_fingerprint": "0", "fingerprint": "1", "versions": {"smat_fn": "0"},
    "files": {"config.json": "2"},     "inputs": {}, "merge_seed": 0,
}  # fmt: skip


def takes(name):
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def test_names_are_those_that_the_hubs_client_takes():
    assert {name: model_ids([name]) == [name] for name in NAMES} == {name: takes(name) for name in NAMES}
    assert any(map(takes, NAMES))
    assert not all(map(takes, NAMES))


@pytest.mark.parametrize("name", ["owner/base", "my base (v2)", None])
def test_metadata_of_an_adapter_name_its_base_if_the_hub_can_have_it(name):
    adapter = {"method": "svd", "stored_rank": 2, "adapters": ["A"], "weights": {}, "versions": {}, "base_model": name}
    found = ModelCard(adapter_card(adapter), ignore_metadata_errors=False).data.to_dict()
    known = name if name == "owner/base" else None
    assert (found.get("base_model"), found.get("base_model_relation")) == (known, known and "adapter")
    assert name is None or f"Base: `{name}`" in adapter_card(adapter)


def test_bars_in_names_stay_in_their_cells():
    experts = {"experts": {"A|1": None}, "base_model": [], "files": {"x|y": "2"}, "inputs": {"expert 'A|1'": {}}}
    adapter = {"method": "svd", "stored_rank": 2, "adapters": ["A|1"], "weights": {}, "versions": {}}
    adapter |= {"base_model": None}
    texts = card(MANIFEST | experts), adapter_card(adapter)
    for line in ("| A\\|1 | |  |", "| x\\|y | `2` |", "| read of expert 'A\\|1' | SHA-256 |"):
        assert f"\n{line}\n" in texts[0]
    assert "\n| A\\|1 | 1 |\n" in texts[1]


def test_options_that_hold_nothing_are_left_out():
    given = {"coef": 0.0, "skip": (), "windows": {}, "elect": False, "densities": {"A": 0.5}, "coefs": None}
    text = card(MANIFEST | {"hyperparameters": given, "base_model": []})
    assert "\nMerger: ta (coef 0.0, elect False, densities {'A': 0.5}).\n" in text
    assert "\nMerger: ta (no options).\n" in card(MANIFEST | {"hyperparameters": {"skip": []}, "base_model": []})


@pytest.mark.parametrize("names", [["owner/base", "my base", "owner/expert"], ["my base"]])
def test_metadata_are_read_by_the_hubs_client_and_name_models_alone(names):
    found = ModelCard(card(MANIFEST | {"base_model": names}), ignore_metadata_errors=False)
    kept = [name for name in names if "/" in name]
    assert (found.data.base_model or []) == kept
    assert found.data.tags == ["merge", "smat_fn", "ta"]
    assert found.data.library_name == "transformers"
    assert ModelCard(str(found)).data.to_dict() == found.data.to_dict()
    assert all(map(takes, kept))


def test_pipelines_of_diffusers_and_their_components_are_of_that_library():
    files = "model_index.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
    for file in files:
        text = card(MANIFEST | {"base_model": [], "files": {file: "1", "config.json": "2"}})
        assert ModelCard(text).data.library_name == "diffusers"


def test_models_of_sentence_transformers_and_timm_are_of_these_libraries(tmp_path):
    given = MANIFEST | {"base_model": []}
    files = {"files": {"modules.json": "1", "config.json": "2"}}
    assert ModelCard(card(given | files)).data.library_name == "sentence-transformers"
    for text, expected in {
        '{"architecture": "resnet18", "pretrained_cfg": {}}': "timm",
        '{"architecture": "resnet18", "pretrained_cfg": {}, "model_type": "timm_wrapper"}': "transformers",
        '{"model_type": "bert", "sentence_transformers": {"version": "5"}}': "sentence-transformers",
        '{"model_type": "bert"}': "transformers",
    }.items():
        (tmp_path / "config.json").write_text(text)
        assert ModelCard(card(given | library_of(tmp_path))).data.library_name == expected


def test_the_license_is_that_of_the_base_and_other_ones_are_named(tmp_path):
    several = ["mit", "cc-by-4.0"]
    own = {"license": "other", "license_name": "llama3.2", "license_link": "https://x.y/z"}
    cards = {
        "base": "license: other\nlicense_name: llama3.2\nlicense_link: https://x.y/z",
        "A": "license: other\nlicense_name: llama3.2\nlicense_link: LICENSE", "B": "tags: [x]\nlicense: mit",
        "C": "license: [", "D": "tags: []", "E": "license: 3", "F": "license: [mit, cc-by-4.0]", "G": "license: []",
    }  # fmt: skip
    for name, text in cards.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\n{text}\n---\n\n# Text\n\n---\n\nlicense: gpl\n")
    (tmp_path / "none").mkdir()
    of_base, *others = (tmp_path / name for name in (*cards, "none"))
    found = licenses_of(of_base, {path.name: path for path in others})
    assert found == {
        "licenses": {
            "base": own,
            "experts": {"A": own | {"license_link": "LICENSE"}, "B": {"license": "mit"}, "F": {"license": several}},
        }
    }
    made = ModelCard(card(MANIFEST | {"base_model": []} | found), ignore_metadata_errors=False)
    assert {name: value for name, value in made.data.to_dict().items() if "license" in name} == own
    assert (
        "The license is that of base; experts name others (B mit, F mit and cc-by-4.0): check their terms." in made.text
    )
    assert licenses_of(tmp_path / "none", {}) == {}
    alone = card(MANIFEST | {"base_model": []} | licenses_of(tmp_path / "none", {"B": tmp_path / "B"}))
    assert "The license of base is not known; experts name theirs (B mit): check" in alone
    listed = licenses_of(tmp_path / "F", {"B": tmp_path / "B"})
    assert ModelCard(card(MANIFEST | {"base_model": []} | listed)).data.license == several
    adapter = {"method": "svd", "stored_rank": 2, "adapters": [], "weights": {}, "versions": {}, "base_model": None}
    text = adapter_card(adapter | listed)
    assert "is that of base; adapters name others (B mit): check" in text
    assert ModelCard(text).data.license == several
    exported = {"base_model": ["owner/base"], **found}
    (tmp_path / "none/README.md").write_text("# Text\n")
    for name, whose in {"none": own, "A": own | {"license_link": "LICENSE"}, "B": {"license": "mit"}}.items():
        made = ModelCard(exported_card(tmp_path / name, exported))
        assert {field: value for field, value in made.data.to_dict().items() if "license" in field} == whose
        assert ("base names another (llama3.2): check its terms" in made.text) == (name == "B")
    stack = Path(f"{tmp_path}/base[0:1]+{tmp_path}/B[1:2]")
    assert licenses_of(stack, {"x": Path("owner/unknown")})["licenses"].keys() == {"base", "experts"}


def test_texts_of_input_folders_begin_neither_html_nor_links_nor_headings():
    told = "expert 'A' has other norms: rms_norm_eps \x1b[31m<script>\n\n# x [y](javascript:z) \\<b>"
    licenses = {"base": {"license": "mit"}, "experts": {"A": {"license": "<img src=x>\n\n# [L](l)"}}}
    text = card(
        {
            **MANIFEST,
            "label": "<b>+B",
            "notes": [told],
            "licenses": licenses,
            "files": {"<b>.json": "2"},
            "base_model": [],
        }
    )
    html = MarkdownIt("commonmark").enable("table").render(text.partition("\n# ")[2])
    assert "\x1b" not in text
    assert "# \\<b>+" in text
    for tag in "<script", "<img", "<b>", "<a ", "<h1":
        assert tag not in html
    assert "rms_norm_eps \\x1b[31m&lt;script&gt; # x [y](javascript:z) \\&lt;b&gt;" in html


def test_the_base_that_an_adapter_names_stays_code():
    name = "x` <b>\n\n# h \x1b`"
    adapter = {"method": "svd", "stored_rank": 2, "adapters": ["A"], "weights": {}, "versions": {}, "base_model": name}
    assert "\nBase: `x' <b> # h \\x1b'`. It was not read.\n" in adapter_card(adapter)


@pytest.mark.parametrize("metadata", ["[" * 1000, "license: !!bool x", "license: !!timestamp x", "license: !!int ''"])
def test_metadata_that_yaml_cannot_make_hold_no_license(metadata, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n")
    assert licenses_of(tmp_path, {}) == {}
