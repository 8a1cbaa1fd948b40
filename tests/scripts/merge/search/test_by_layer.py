"""A search that then gives each block a coefficient of its own."""

from statistics import fmean

import pytest
import torch

from smat_fn import checkpoint, merge
from smat_fn.config import TaskArithmetic, TsvMerge, WeightAverage
from smat_fn.scripts.merge import commands, in_memory, settings
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize(
    "config", [TaskArithmetic(), pytest.param(TsvMerge(), marks=pytest.mark.slow)], ids=["ta", "tsv_merge"]
)
def test_every_block_gets_the_coefficient_of_the_best_dev_score(config, runs, suite, tmp_path):
    base, experts = find_inputs(runs["ft"])
    experts = [path for path in experts if path.name in ("rot90", "mirror")]
    coefs, tasks = (0.3, 1.0, 1.7), ("mirror", "rot90")
    options = {"out": tmp_path, "search": True, "seed": 0, "coefs": coefs}
    (found,) = merge_run(Request([config], base, experts, sweeps=2, **options)).values()
    inputs = load_inputs(base, experts)
    vector = merge.vector_by(config, inputs.base, inputs.experts)

    def score(by_block):
        params = merge.apply_blocks(inputs.base, vector, by_block)
        return fmean(suite.score(params, task, "dev") for task in tasks)

    expected = merge.select_coefs(vector, score, coefs, start=found.coef, sweeps=2)
    assert found.layers == expected
    assert same(found.params, merge.apply_blocks(inputs.base, vector, expected.coefs))
    assert found.dev == {task: suite.score(found.params, task, "dev") for task in tasks}
    manifest = checkpoint.load_manifest(tmp_path / config.name)
    assert len(expected.coefs) == 3  # two blocks and the rest
    rules = manifest["hyperparameters"]["coefs"]
    assert list(rules.values())[-1] == expected.coefs[""]
    assert "each block in its turn" in (tmp_path / config.name / "README.md").read_text()
    commands.from_recipe(settings.FromRecipe(tmp_path / config.name / checkpoint.RECIPE, tmp_path / "disk"))
    assert same(checkpoint.load_leaves(tmp_path / "disk" / config.name)[0], found.params)
    (again,) = merge_run(Request([config], base, experts, sweeps=2, **options)).values()
    assert again.kept
    assert ", then by block, dev " in next(iter(in_memory.summary({tmp_path: again})))
    with pytest.raises(ValueError, match=r"holds another merge: its asked\.sweeps is 2"):
        merge_run(Request([config], base, experts, sweeps=1, **options))


def test_a_merger_without_a_coefficient_is_as_it_was(runs, tmp_path):
    (found,) = merge_run(
        Request([WeightAverage()], *find_inputs(runs["ft"]), out=tmp_path, search=True, seed=0, sweeps=1)
    ).values()
    assert found.layers is None
