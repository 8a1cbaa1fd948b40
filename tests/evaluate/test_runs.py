"""Facts of runs: from manifests, and through a file."""

import pytest

from smat_fn.evaluate.results import SET, Run, read_rows, run_of, write_results

EXPERT = {
    "label": "SMAT", "method": "smat", "hyperparameters": {"sigma": 0.01}, "seed": 3, "suite": {"name": "digits"},
    "base_fingerprint": "b", "kind": "expert", "task": "rot90", "training": {"lr": 1e-3, "steps": 6}, "seconds": 1.5,
    "fingerprint": "f", "versions": {"torch": "2"},
}  # fmt: skip
MERGED = {
    "kind": "merged", "merger": "ties", "hyperparameters": {"keep": 0.5, "coef": 0.3}, "label": "SMAT", "seed": 3,
    "merge_seed": 0, "suite": None, "experts": {"rot90": "f"}, "dev": {"rot90": 50.0}, "dev_curve": [[0.1, 40.0]],
    "fingerprint": "g", "versions": {"torch": "2"},
}  # fmt: skip


def test_an_experts_manifest_gives_its_training():
    run = run_of(EXPERT)
    assert (run.label, run.model, run.seed, run.method) == ("SMAT", "expert:rot90", 3, "smat")
    assert (run.hyperparameters, run.training) == ({"sigma": 0.01}, {"lr": 1e-3, "steps": 6})
    assert (run.seconds, run.peak_memory_bytes, run.suite) == (1.5, None, {"name": "digits"})
    assert run_of({**EXPERT, "peak_memory_bytes": 7, "peak_memory_of": "process"}).peak_memory_bytes == 7
    assert run.trains


def test_a_merged_models_manifest_gives_its_search():
    run = run_of(MERGED)
    assert (run.model, run.method, run.training, run.suite) == ("ties", "", {}, {})
    assert (run.hyperparameters["coef"], run.dev, run.dev_curve) == (0.3, {"rot90": 50.0}, [[0.1, 40.0]])
    assert not run.trains
    assert Run("SMAT", SET, 3).trains


def test_json_lines_round_trip_and_name_bad_lines(tmp_path):
    runs = [run_of(EXPERT), run_of(MERGED)]
    write_results(tmp_path / "runs.jsonl", runs)
    assert read_rows(tmp_path / "runs.jsonl", Run) == runs
    (tmp_path / "runs.jsonl").write_text('{"label": "FT"}\n')
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1: .*missing"):
        read_rows(tmp_path / "runs.jsonl", Run)
