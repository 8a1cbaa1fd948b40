"""Numbers in the documents' sentences are those of the presets and of the stored results."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import readme
from smat_fn.analyses import results as analyses
from smat_fn.config import MERGERS, MORE_MERGERS, PRESETS
from smat_fn.evaluate.statistics import paired
from smat_fn.report.section import csv_text

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PRESET_PAGE = (ROOT / "docs/own_model.md").read_text(encoding="utf-8")
STUDIES = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
FOUR = "WA", "TA", "TIES", "TSV_MERGE"


def test_the_table_of_learning_rates_is_that_of_the_presets():
    chosen = {name: preset for name, preset in PRESETS.items() if not preset.note}  # others are not tuned on anything
    rates = {name: {} for name in chosen}
    for line in re.findall(r"^\| `.* \| .*\| (?:\[protocols/[^|]*|the paper) \|$", PRESET_PAGE, flags=re.M):
        presets, text, source = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`([\w.-]+)`", presets):
            own = {method: float(rate) for method, rate in re.findall(r"`(\w+)` ([\d.e-]+\d)", text)}
            if every := re.match(r"all ([\d.e-]+\d)", text):
                own = dict.fromkeys(PRESETS[name].lr, float(every[1]))
                assert source == "the paper"
            rates[name] |= own
            if muon := PRESETS[name].training.muon_lr:
                assert float(re.search(r"Muon ([\d.e-]+\d)", text)[1]) == muon
    assert rates == {name: dict(preset.lr) for name, preset in chosen.items()}


def test_the_learning_rates_of_a_protocol_are_those_that_it_chose():
    first = json.loads((readme.RESULTS / "digits.json").read_text(encoding="utf-8"))["lr"]
    second, third = (
        json.loads((readme.RESULTS / f"{name}_methods_tuning.json").read_text(encoding="utf-8"))["chosen"]
        for name in ("digits", "minilm")
    )
    names = {"asam": "ASAM", "mergopt": "MergOPT", "orthoreg": "OrthoReg"}
    chosen = {name: second[label]["training"]["lr"] for name, label in names.items()}
    assert PRESETS["digits"].lr == {**first, **chosen}
    names |= {"ft": "FT", "smat": "SMAT"}
    assert PRESETS["minilm"].lr == {name: third[label]["training"]["lr"] for name, label in names.items()}
    assert [second[label]["training"]["lr"] for label in ("FT", "SMAT")] == [1.25e-4] * 2


def test_the_interval_of_asam_less_smat_and_the_edges_of_grids_are_those_of_the_results():
    stored = json.loads((readme.RESULTS / "digits_methods.json").read_text(encoding="utf-8"))["test"]
    low, high = readme.paired(stored["SMAT"]["Avg"], stored["ASAM"]["Avg"])["interval"]
    sentences = STUDIES.replace("\n", " ")
    assert f"ASAM - SMAT, {low:+.2f} to {high:+.2f}, just contains zero" in sentences
    assert low < 0 < high
    tuning = json.loads((readme.RESULTS / "digits_methods_tuning.json").read_text(encoding="utf-8"))
    assert readme.at_edge(tuning) == [label for label in tuning["chosen"] if label != "FT"]
    assert "Every choice but FT's lies at an edge of its grid" in sentences
    result = readme.stored("digits_methods")
    smat = result["paired"]["SMAT"]
    assert f"{smat['mean']:.1f} above those of fine-tuning, which is significant by itself, but not with" in sentences
    assert smat["interval"][0] > 0
    assert "significant: ASAM; OrthoReg; SMAT-Muon; SMAT without Scale; SMAT without Mask." in readme.corrected(result)


def test_ft_s_dev_score_varies_with_its_learning_rate_as_the_page_says():
    scores = {}
    for row in readme.stored("when_it_pays")["rates"]:
        scores.setdefault((row["study"], row["steps"]), []).append(row["ft"])
    ranges = [max(own) - min(own) for own in scores.values() if len(own) > 1]
    sentence = f"FT's merged dev score varies by {min(ranges):.1f} to {max(ranges):.0f} points over the learning rates"
    assert sentence in " ".join(STUDIES.split())


def test_ft_s_loss_by_merging_is_that_of_the_results():
    names = (
        "digits",
        "digits_methods",
        "digits_lora",
        "digits_onepass",
        "text_onepass",
        "vit_blocks_onepass",
        "vit_onepass",
    )
    own = [readme.stored(name)["test"]["FT"] for name in (*names, "smollm2_text_onepass")]
    drops = [fmean(line["Expert"]) - fmean(line["All" if "All" in line else "Avg"]) for line in own]
    digits, (_, text, blocks, whole, words) = drops[:4], drops[3:]
    page = " ".join(STUDIES.split())
    assert (
        f"FT loses {text:.0f} points on the text encoder, {min(digits):.0f} to {max(digits):.0f} on digits, "
        f"{blocks:.0f} on two blocks of the ViT, {whole:.0f} on all its weights, {words:.0f} on the language model"
    ) in page
    others = drops[3:7]
    assert f"loses {words:.0f} points by merging, against {min(others):.0f} to {max(others):.0f} in the other" in page


def own_four(words):
    """Differences from FT in the mean of the mergers but WUDI."""
    four = {
        label: [fmean(scores) for scores in zip(*(words["test"][label][n] for n in FOUR), strict=True)]
        for label in ("FT", "SMAT", "SMAT climbing", "ASAM")
    }
    return {label: readme.paired(four["FT"], scores) for label, scores in four.items() if label != "FT"}


def span(found):
    return f"{found['interval'][0]:+.2f} to {found['interval'][1]:+.2f}"


def test_what_the_readme_says_of_one_pass_is_in_the_results():
    test = json.loads((readme.RESULTS / "digits_onepass.json").read_text(encoding="utf-8"))["test"]
    sentences = " ".join(README.split())

    def score(label, merger):
        return f"{fmean(test[label][merger]):.1f}"

    assert (
        f"MSAM with TSV-M is best with {score('MSAM', 'TSV_MERGE')}; SMAT with TSV-M has {score('SMAT', 'TSV_MERGE')},"
        in sentences
    )
    assert f"fine-tuning with TSV-M {score('FT', 'TSV_MERGE')}" in sentences
    one_pass = {name: own for name, own in test.items() if readme.passes(name) == 1}
    best = max(
        fmean(scores) for own in one_pass.values() for name, scores in own.items() if name not in ("Expert", "Drop")
    )
    assert f"{best:.1f}" == score("MSAM", "TSV_MERGE")
    over_ft, over_asam, full = (
        readme.paired(test[name]["All"], test["SMAT"]["All"]) for name in ("FT", "ASAM, half the steps", "ASAM")
    )
    assert f"SMAT is {over_ft['mean']:.1f} points above fine-tuning" in sentences
    assert f"and {over_asam['mean']:.1f} above ASAM given as many" in sentences
    assert over_ft["interval"][0] > 0
    assert over_asam["interval"][0] > 0
    assert full["interval"][0] < 0 < full["interval"][1]
    assert f"ASAM with twice as many passes is {-full['mean']:.1f} above SMAT, not significantly." in sentences
    less = [fmean(test["ASAM"]["All"]) - fmean(test[label]["All"]) for label in ("SMAT", "SMAT climbing", "MSAM")]
    assert f"{min(less):.1f} to {max(less):.1f} more than the three, not significantly" in " ".join(STUDIES.split())
    vit = json.loads((readme.RESULTS / "vit_blocks_onepass.json").read_text(encoding="utf-8"))
    assert all(found["interval"][0] < 0 for found in vit["paired"].values())
    assert vit["paired"]["SMAT"]["interval"][1] > 0
    equal_passes = readme.paired(vit["test"]["ASAM, half the steps"]["All"], vit["test"]["SMAT"]["All"])
    assert f"SMAT is {equal_passes['mean']:.1f} above ASAM given as many passes. - **Text.**" in sentences
    whole, blocks = readme.stored("vit_onepass")["paired"]["SMAT"]["mean"], vit["paired"]["SMAT"]["mean"]
    assert f"({-whole:.1f} lower, on two of its blocks {blocks:.1f} higher) the difference is [not sig" in sentences
    assert equal_passes["interval"][0] > 0
    texts = json.loads((readme.RESULTS / "text_onepass.json").read_text(encoding="utf-8"))
    gain, own = texts["paired"]["SMAT"], texts["test"]
    climbing = texts["paired"]["SMAT climbing"]["mean"]
    assert f"SMAT is {gain['mean']:.1f} above FT and SMAT climbing {climbing:.1f}; ASAM with two passes" in sentences
    assert gain["interval"][0] > 0
    begin = f"score {over_ft['mean']:.1f} points higher with SMAT than with plain fine-tuning on digits"
    tuned = readme.stored("digits_passes")["paired"]["SMAT"]["mean"]
    also = f"({tuned:.1f} if the steps of both are tuned)"
    assert f"{begin}, the included example of tiny models {also}, {gain['mean']:.1f} on a text encoder" in sentences
    names = [name for name in readme.EIGHT if name != "WUDI"]
    rest = {
        label: [fmean(scores) for scores in zip(*(own[label][name] for name in names), strict=True)]
        for label in ("FT", "SMAT", "ASAM")
    }
    smat, asam = (readme.paired(rest["FT"], rest[label]) for label in ("SMAT", "ASAM"))
    assert f"without it SMAT is {smat['mean']:.1f} above FT, which is not significant, and ASAM {asam['mean']:.1f}" in (
        sentences
    )
    assert smat["interval"][0] < 0 < asam["interval"][0]
    assert readme.paired(own["SMAT"]["All"], own["ASAM"]["All"])["interval"][0] < 0
    words = json.loads((readme.RESULTS / "smollm2_text_onepass.json").read_text(encoding="utf-8"))
    asam, gain = (words["paired"][label] for label in ("ASAM", "SMAT"))
    half = words["paired"]["ASAM, half the steps"]
    assert "5 differences from FT none is significant" in readme.corrected(words)
    assert max(gain["interval"][0], half["interval"][0]) < 0 < asam["interval"][0]
    test = words["test"]
    equal = readme.paired(test["ASAM, half the steps"]["All"], test["SMAT"]["All"])
    msam = words["paired"]["MSAM"]
    experts = {label: fmean(own["Expert"]) for label, own in test.items()}
    assert (
        f"{experts['FT'] - experts['ASAM, half the steps']:.1f} points below FT's and "
        f"{experts['ASAM'] - experts['ASAM, half the steps']:.1f} below its own"
    ) in " ".join(STUDIES.split())
    assert (
        f"{half['mean']:.2f} above FT ({span(half)}), those of MSAM, whose experts are "
        f"{experts['FT'] - experts['MSAM']:.1f} points below FT's, {-msam['mean']:.2f} below it ({span(msam)}). "
        f"SMAT's are {equal['mean']:.2f} above ASAM's at half the steps ({span(equal)}). None of these"
    ) in " ".join(STUDIES.split())
    assert all(one["interval"][0] < 0 < one["interval"][1] for one in (half, msam, equal))
    own = list(own_four(words).values())
    ranges = [f"({one['interval'][0]:+.2f} to {one['interval'][1]:+.2f})" for one in own]
    assert (
        f"SMAT is {-own[0]['mean']:.2f} below FT {ranges[0]}, SMAT climbing {-own[1]['mean']:.2f} below it {ranges[1]} "
        f"and ASAM {own[2]['mean']:.2f} above it {ranges[2]}"
    ) in " ".join(STUDIES.split())
    steps = json.loads((readme.RESULTS / "digits_onepass_tuning.json").read_text(encoding="utf-8"))["chosen"]
    assert steps["FT"]["training"]["steps"] == 2 * steps["SMAT"]["training"]["steps"]


def test_what_the_pages_say_of_tuned_strengths_is_in_the_results():
    found = readme.stored("smollm2_text_strengths_onepass")
    first = readme.stored("smollm2_text_onepass")
    test, paired = found["test"], found["paired"]
    labels = "FT", "SMAT", "MSAM", "ASAM"
    four = {label: [fmean(s) for s in zip(*(test[label][n] for n in FOUR), strict=True)] for label in labels}
    of_four = {label: readme.paired(four["FT"], scores) for label, scores in four.items() if label != "FT"}
    over_asam = readme.paired(test["ASAM"]["All"], test["SMAT"]["All"])
    best = {label: max((fmean(test[label][n]), n) for n in (*FOUR, "WUDI")) for label in labels}
    top = {label: f"{own[0]:.1f}" for label, own in best.items()}
    assert [best[label][1] for label in ("SMAT", "ASAM", "FT")] == ["WUDI", "TSV_MERGE", "TSV_MERGE"]
    sentences, page = " ".join(README.split()), " ".join(STUDIES.split())
    assert (
        f"SMAT, here without Scale, is {paired['SMAT']['mean']:.1f} above FT, and {over_asam['mean']:.1f} above ASAM, "
        f"which takes two passes. Most of this is by WUDI: by the four other mergers SMAT is "
        f"{of_four['SMAT']['mean']:.1f} above FT, which is not significant, and ASAM {of_four['ASAM']['mean']:.1f}, "
        f"which is. The best merged score of SMAT is {top['SMAT']} (by WUDI), of ASAM {top['ASAM']} and of FT "
        f"{top['FT']} (by TSV-M). Corrected for three comparisons, SMAT's difference from FT is not significant. "
        "With rho 0.5 and "
        f"other seeds ASAM was [{first['paired']['ASAM']['mean']:.1f} above FT]"
    ) in sentences
    assert f"and {paired['SMAT']['mean']:.1f} on a language model; on the latter two with one merger" in sentences
    for own in (paired["SMAT"], of_four["ASAM"], over_asam):
        assert own["interval"][0] > 0
    over_asam_by_four = readme.paired(four["ASAM"], four["SMAT"])
    for own in (paired["MSAM"], paired["ASAM"], of_four["SMAT"], of_four["MSAM"], over_asam_by_four):
        assert own["interval"][0] < 0 < own["interval"][1]
    assert "3 differences from FT none is significant" in readme.corrected(found)
    assert min(*paired["SMAT"]["differences"], *over_asam["differences"]) > 0
    wudi = {label: f"{min(test[label]['WUDI']):.1f} to {max(test[label]['WUDI']):.1f}" for label in labels}
    assert (
        f"above ASAM ({span(over_asam)}), higher than both in every seed. Corrected for three comparisons, the "
        f"difference from FT is not significant. WUDI has {wudi['SMAT']} points with SMAT's experts, {wudi['FT']} with "
        f"FT's, and {wudi['ASAM']} with ASAM's, on which it fails. With its best merger SMAT has {top['SMAT']}, "
        f"ASAM {top['ASAM']} and FT {top['FT']}, both by TSV-M"
    ) in page
    assert (
        f"it is {of_four['ASAM']['mean']:.2f} above FT, significantly, SMAT {of_four['SMAT']['mean']:.2f} and MSAM "
        f"{of_four['MSAM']['mean']:.2f}, not significantly. SMAT differs from ASAM by "
        f"{over_asam_by_four['mean']:+.2f} ({span(over_asam_by_four)})"
    ) in page
    by_tsv, by_wudi = (
        [fmean(own["test"]["ASAM"][merger]) for own in (first, found)] for merger in ("TSV_MERGE", "WUDI")
    )
    assert f"by WUDI ASAM had {by_wudi[0]:.1f} points there and has {by_wudi[1]:.1f} here, by TSV-M" in page
    assert f"by TSV-M {by_tsv[0]:.1f} and {by_tsv[1]:.1f}." in page
    experts = [fmean(test[label]["Expert"]) for label in labels]
    assert f"their means are {min(experts):.1f} to {max(experts):.1f}." in page


def test_what_the_pages_say_of_one_budget_of_passes_is_in_the_results():
    found, equal = readme.stored("digits_passes"), readme.stored("digits_equal_passes")
    test, own, page = found["test"], found["paired"], " ".join(STUDIES.split())
    passes = {label: readme.passes(label) * steps for label, steps in readme.steps_of("digits_passes").items()}
    assert passes == {"FT": 800, "SMAT": 1600, "MSAM": 400, "ASAM": 800}
    over_asam = readme.paired(test["ASAM"]["All"], test["SMAT"]["All"])
    assert f"SMAT is {own['SMAT']['mean']:.2f} above FT, more than zero in each of the ten seeds" in page
    assert min(own["SMAT"]["differences"]) > 0
    assert all(fmean(test["SMAT"][n]) == max(fmean(line[n]) for line in test.values()) for n in readme.EIGHT)
    assert f"It is {over_asam['mean']:.2f} above ASAM, which is not significant." in page
    assert over_asam["interval"][0] < 0 < over_asam["interval"][1]
    experts, drops = ({label: f"{fmean(test[label][n]):.1f}" for label in test} for n in ("Expert", "Drop"))
    assert (
        f"SMAT's have {experts['SMAT']} points and lose {drops['SMAT']} by merging, ASAM's {experts['ASAM']} and "
        f"{drops['ASAM']}, FT's {experts['FT']} and {drops['FT']}."
    ) in page
    seconds = readme.training_seconds("digits_passes")
    times = fmean(seconds["SMAT"][seed] / seconds["FT"][seed] for seed in found["seeds"])
    assert f"Its training takes {times:.1f} times as long as FT's" in page
    gains = {label: f"{own[label]['mean']:+.2f}" for label in own}
    row = f"as dev chooses: SMAT {gains['SMAT']}, ASAM {gains['ASAM']}, MSAM {gains['MSAM']} above FT |"
    assert row in page
    after = equal["test"]
    assert [after[label] for label in ("FT", "ASAM")] == [test[label] for label in ("FT", "ASAM")]
    whole = after["ASAM, all the steps"]["All"]
    at_800, at_1600 = (
        readme.paired(after["ASAM"]["All"], after["SMAT"]["All"]),
        readme.paired(whole, test["SMAT"]["All"]),
    )
    assert f"SMAT differs from ASAM by {at_800['mean']:+.2f} ({span(at_800)})." in page
    assert f"is {at_1600['mean']:.2f} above ASAM with 800 steps ({span(at_1600)})." in page
    more = [readme.paired(after["SMAT"]["All"], test["SMAT"]["All"]), readme.paired(after["ASAM"]["All"], whole)]
    assert (
        f"from 800 to 1,600 of them it gains {more[0]['mean']:.2f} ({span(more[0])}), ASAM {more[1]['mean']:.2f} "
        f"({span(more[1])})."
    ) in page
    sentences = " ".join(README.split())
    low, high = own["SMAT"]["interval"]
    assert (
        f"on digits SMAT is {own['SMAT']['mean']:.1f} points above fine-tuning ({low:.1f} to {high:.1f}), ASAM "
        f"{own['ASAM']['mean']:.1f} and MSAM {own['MSAM']['mean']:.1f}; SMAT takes all 1,600, fine-tuning and ASAM 800."
        f" SMAT's lead over ASAM, {over_asam['mean']:.1f}, is [not"
    ) in sentences
    for sentence in sentences, page:
        assert f"{own['SMAT']['mean']:.1f} if " in sentence


def test_what_the_pages_say_of_adapters_is_in_the_results():
    found = readme.stored("digits_lora")
    own, page = found["paired"], " ".join(STUDIES.split())
    smat, half = own["SMAT"], own["ASAM, half the steps"]
    assert f"no method is significantly above FT after correction; SMAT is {smat['mean']:.1f} above it" in " ".join(
        README.split()
    )
    assert readme.corrected(found).endswith("none is significant.")
    assert smat["interval"][0] < 0 < half["interval"][0]
    of_factors = readme.paired(found["test"]["SMAT at the factors"]["All"], found["test"]["SMAT"]["All"])
    assert f"it is {smat['mean']:.2f} above FT, and {of_factors['mean']:.2f} above SMAT at the factors" in page
    assert f"({span(of_factors)}): neither is significant" in page
    assert f"with as many passes as FT: {half['mean']:.2f} above it" in page
    expert, drop = (
        fmean(found["test"]["FT"][name]) - fmean(found["test"]["SMAT"][name]) for name in ("Expert", "Drop")
    )
    assert f"weaker** than FT's by {expert:.1f} points, and lose {drop:.1f} points less" in page


def test_what_the_pages_say_of_the_whole_vit_is_in_the_results():
    result = readme.stored("vit_onepass")
    test, gain = result["test"], {label: found["mean"] for label, found in result["paired"].items()}
    assert all(found["interval"][0] < 0 < found["interval"][1] for found in result["paired"].values())
    assert f"SMAT is {-gain['SMAT']:.1f} below it, ASAM with two passes {gain['ASAM']:.1f} above." in README
    studies = " ".join(STUDIES.split())
    named = {"SMAT": "SMAT", "climbing": "SMAT climbing", "MSAM": "MSAM"}
    each = ", ".join(f"{word} {gain[label]:+.2f}" for word, label in named.items())
    half = gain["ASAM, half the steps"]
    assert f"from FT; {each}, ASAM {gain['ASAM']:+.2f} at two passes, {half:+.2f} at as many |" in STUDIES
    assert max(result["paired"]["SMAT"]["differences"]) < 0
    under = {label: readme.paired(test["ASAM"]["All"], test[label]["All"])["interval"][1] for label in named.values()}
    assert {label: high < 0 for label, high in under.items()} == {"SMAT": False, "SMAT climbing": True, "MSAM": True}
    experts, drops = ({label: fmean(test[label][x]) for label in ("SMAT", "FT")} for x in ("Expert", "Drop"))
    half_widths = [(own["interval"][1] - own["interval"][0]) / 2 for own in result["paired"].values()]
    assert f"whose intervals reach {min(half_widths):.1f} points or more to each side" in studies
    chosen = readme.stored("vit_onepass_tuning")
    rates = {label: own["training"]["lr"] for label, own in chosen["chosen"].items()}
    assert {label for label, rate in rates.items() if rate == 2e-5} == {"ASAM", "SMAT climbing"}
    assert set(rates.values()) == {2e-5, 4e-5}
    second, best = sorted(own["dev"][0] for own in chosen["dev"]["ASAM"])[-2:]
    assert f"for ASAM by {best - second:.1f} points on one seed" in studies
    assert f"close to FT's** ({experts['SMAT']:.2f} and {experts['FT']:.2f})" in studies
    assert f"by merging, {drops['SMAT']:.1f} points against {drops['FT']:.1f}." in studies
    first, second, third = result["paired"]["ASAM, half the steps"]["differences"]
    assert f"models are {-first:.1f} below FT's. The other two seeds are {second:.1f} and {third:.1f} above" in studies
    runs = (readme.RESULTS / "vit_onepass_runs.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["coefs"]["ta"] for line in runs} == {0.1, 0.2}
    assert max(test["ASAM"]["All"]) == max(max(own["All"]) for own in test.values())


def test_the_differences_of_mergers_from_task_arithmetic_are_in_the_results():
    test = json.loads((readme.RESULTS / "digits_onepass.json").read_text(encoding="utf-8"))["test"]

    def gain(name, *, muon):
        own = [scores for label, scores in test.items() if ("Muon" in label) is muon]
        return fmean(fmean(scores[name]) - fmean(scores["TA"]) for scores in own)

    names = "tsv_merge", "iso_c", "wudi", "ties", "dare", "della", "wa"
    said = [f"`{name}` {gain(name.upper(), muon=False):+.1f}" for name in names]
    said[0] += " points"
    page = " ".join((ROOT / "docs/merging.md").read_text(encoding="utf-8").split())
    assert f"averaged over seven methods trained by Adam: {', '.join(said)}. After training by Muon none" in page
    assert all(gain(name.upper(), muon=True) < 0 for name in names)


def test_the_distance_of_spectral_mergers_on_the_vit_is_that_of_the_results():
    test = json.loads((readme.RESULTS / "vit_blocks_onepass.json").read_text(encoding="utf-8"))["test"]
    far, others = ("TSV_MERGE", "ISO_C", "WUDI"), ("WA", "TA", "TIES", "DARE", "DELLA")
    found = [fmean(own[a]) - fmean(own[b]) for own in test.values() for a in far for b in others]
    sentence = f"The spectral mergers and WUDI are {min(found):.0f} to {max(found):.0f} points above the others."
    assert sentence in " ".join(STUDIES.split())


def test_the_times_on_a_gpu_in_sentences_are_those_of_the_results():
    page = " ".join((ROOT / "docs/kernels.md").read_text(encoding="utf-8").split())
    rows = {gpu: readme.stored(name)["rows"] for gpu, name in (("H200", "kernels"), ("H100", "kernels_h100"))}

    def span(key, *operations, gpus=("H200", "H100"), tree="Llama-3.2-1B", **more):
        found = [
            row[key]["median"]
            for gpu in gpus
            for row in rows[gpu]
            if row["tree"] == tree and row["operation"] in operations and more.items() <= row.items()
        ]
        return min(found), max(found)

    both = "simulate", "reweight"
    low, high = span("time / copy", *both, gpus=("H100",))
    first, last = span("time / copy", *both, gpus=("H200",))
    assert f"take {low:.2f} to {high:.2f} times as long as copying their bytes" in page
    assert f"is faster, {first:.2f} to {last:.2f} times" in page
    (h100, _), (h200, _) = (span("time / copy", "finish, clip", gpus=(g,), dtype="bfloat16") for g in ("H100", "H200"))
    assert f"takes {h100:.1f} and {h200:.1f} times: its first pass" in page
    low, high = span("torch / time", "simulate")
    first, last = span("torch / time", "reweight")
    assert (
        f"takes {low:.0f} to {high:.0f} times as long for `simulate`, and {first:.0f} to {last:.0f} times for" in page
    )
    assert "takes 1/{:.1f} to 1/{:.1f} of the time of `torch.nn".format(*span("torch / time", "clean, clip")) in page
    assert "`simulate` takes {:.2f} to {:.2f} ms, most of it".format(*span("ms", "simulate", tree="1e+06")) in page
    low, high = span("torch / time", "clean, clip", tree="1e+06")
    assert 0.3 < low < high < 0.57
    low, high = span("rand4x / time", "simulate", tree="1e+06")
    assert 0.17 < low < high < 0.22
    for size, slower in (("1e+08", 0.16), ("1e+09", 0.03)):
        fastest = [span("torch / time", "clean, clip", tree=size)[0], span("rand4x / time", *both, tree=size)[0]]
        assert min(fastest) >= 1 - slower
    for gpu, text in (("H200", "The host** takes {:.1f} to {:.1f} ms"), ("H100", "with {:.1f} to {:.1f} ms.")):
        assert text.format(*span("host ms", *both, "finish", "finish, clip", "clean, clip", gpus=(gpu,))) in page
    steps = {(row["method"], row["offload"]): row for row in readme.stored("steps")["rows"]}
    percent = {key: 100 * (row["ratio"] - 1) for key, row in steps.items()}
    assert f"**SMAT costs {percent['SMAT', 'None']:.1f} % over fine-tuning**" in page
    assert f"{percent['SMAT', 'cpu']:.1f}" == f"{percent['SMAT', 'None']:.1f}"
    readme_text = " ".join(README.split())
    assert f"A step of SMAT takes [{percent['SMAT', 'cpu']:.1f} % longer](docs/kernels.md#on-a-gpu)" in readme_text
    assert f"the loop in torch takes {percent['a loop in torch', '']:.1f} % more" in page
    assert f"takes {percent['SMAT', 'stream']:.0f} % longer on the Llama**" in page
    assert f"than `cpu` on the Llama, {percent['SMAT', 'recompute']:.0f} % over fine-tuning" in page
    peak = {offload: steps["SMAT", offload]["peak GB"] for offload in ("None", "cpu", "recompute", "stream")}
    assert f"the Llama takes {peak['None'] - peak['cpu']:.1f} GB less than" in page
    assert f"`stream` saves another {peak['cpu'] - peak['stream']:.1f} GB" in page
    assert peak["recompute"] > peak["cpu"]
    own = " ".join(PRESET_PAGE.split())
    assert f"fine-tuning peaks at {steps['FT', '']['peak GB']:.1f} GB" in own
    assert f"and SMAT at {peak['cpu']:.1f} GB: one number a weight more" in own
    clip = [row for row in readme.stored("steps_h100")["rows"] if row["model"] == "clip-vit-b32"]
    found = [100 * (row["ratio"] - 1) for row in clip if row["offload"] in ("None", "cpu")]
    assert f"and {min(found):.1f} to {max(found):.1f} % on CLIP" in page
    (streamed,) = [row for row in clip if row["offload"] == "stream"]
    assert f"{100 * (streamed['ratio'] - 1):.0f} % on CLIP: θ₀ crosses" in page


def test_the_instructions_of_kernels_are_those_of_the_results():
    rows = json.loads((readme.RESULTS / "sass.json").read_text(encoding="utf-8"))["rows"]
    page = " ".join((ROOT / "docs/kernels.md").read_text(encoding="utf-8").split())

    def row(kernel, dtype="bf16", **flags):
        wanted = {"kernel": f"{kernel}_kernel", "dtype": dtype, "aligned": "True", "masked": "True"} | flags
        return next(own for own in rows if wanted.items() <= own.items())

    parts = {"norm": "False", "clip": "False", "store": "True"}
    lines = {
        "simulate": (6, row("simulate")),
        "reweight": (4, row("reweight", **parts)),
        "finish without a clip": (4, row("reweight", **{**parts, "norm": "True"})),
        "finish with a clip: norm": (2, row("reweight", **{**parts, "norm": "True", "store": "False"})),
        "finish with a clip: reweight, clip": (4, row("reweight", **{**parts, "clip": "True"})),
    }
    for name, (size, own) in lines.items():
        assert f"| {name} | {size} | {own['instructions per coordinate']:.1f} | {own['registers']} |" in page
    at = {name: own["instructions per coordinate"] / (128 * 132 * 1.98) * 1e3 for name, (_, own) in lines.items()}
    assert (
        f"`simulate` with {at['simulate']:.1f} against 1.4 ps and `reweight` with {at['reweight']:.1f} against" in page
    )
    assert f"with {at['finish with a clip: norm']:.2f} against 0.47 ps" in page
    wide = [row(kernel, "fp32", **flags) for kernel, flags in (("simulate", {}), ("reweight", parts))]
    assert "with {:.1f} and {:.1f} instructions".format(*(own["instructions per coordinate"] for own in wide)) in page
    most = max(own["instructions per coordinate"] for own in rows if own["aligned"] == "True")
    assert f"take at most {most:.1f} instructions" in page


@pytest.mark.parametrize("file", sorted((readme.RESULTS / "analyses").rglob("*.json")), ids=lambda file: file.stem)
def test_the_stored_analyses_are_those_of_the_reports(file):
    records = analyses.records(json.loads(file.read_text(encoding="utf-8")))
    table = ROOT / "docs/results" / file.parent.name / f"{file.stem}.csv"
    assert csv_text(records) == table.read_text(encoding="utf-8")
    assert table.with_suffix(".png").exists()


def test_the_readmes_numbers_of_mergers_and_families_are_those_of_the_package():
    beside = "reg_mean_plus", "adamerging"  # commands of their own
    assert f" {len((*MERGERS, *MORE_MERGERS, *beside))} mergers" in " ".join(README.split())
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    families = set(re.findall(r"^\| ([^| ]+)[^|]* \| [^|]+ \| \d", page, flags=re.M))
    assert f" {len(families)} model families of transformers" in " ".join(README.split())


def test_antithetic_draws_have_the_stored_differences():
    stored = json.loads((readme.RESULTS / "antithetic.json").read_text(encoding="utf-8"))
    scores = {line["label"]: line["test"] for line in stored["lines"]}
    page = (ROOT / "docs/protocols/antithetic.md").read_text(encoding="utf-8")
    names = {"antithetic": "SMAT, antithetic draws", "SMAT": "SMAT", "FT": "FT"}
    for one, other in (("antithetic", "SMAT"), ("SMAT", "FT"), ("antithetic", "FT")):
        for first in (0, 2):  # the first two seeds are those of another tuning
            cells = []
            for column in ("mean", "tsv_merge", "expert"):
                found = paired(scores[names[other]][column][first:], scores[names[one]][column][first:])
                cells.append(f"{found['mean']:+.2f} ({span(found)})")
            assert f"| {one} - {other} | {' | '.join(cells)} |" in page
            if one == "antithetic" and other == "SMAT" and not first:
                assert f"{cells[0]} against SMAT" in " ".join(STUDIES.split())
