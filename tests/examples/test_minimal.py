"""The example of one file: short, runs, and its loop is the library's method."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from smat_fn import optim
from smat_fn.mat import smat
from smat_fn.random import fold_in, key
from smat_fn.where import block_linear

FILE = Path(__file__).parents[2] / "examples" / "smat_minimal.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(FILE))


def test_it_is_short_and_prints_a_table(example, capsys):
    assert len(FILE.read_text(encoding="utf-8").splitlines()) < 150
    table = example["main"](steps=4, warm_up=2)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["method", "base", "experts", "merged", "coef"]
    assert [line.split()[0] for line in lines] == ["FT", "SMAT"]
    for line, values in zip(lines, table.values(), strict=True):
        assert [float(value) for value in line.split()[1:]] == [round(value, 1) for value in values.values()]
    assert table["FT"]["base"] == table["SMAT"]["base"]


def test_its_loop_takes_the_steps_of_smat(example):
    torch.manual_seed(0)
    model = example["tiny_model"]().eval()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = example["train"](model, base, ["last"], steps=8, lr=1e-3, period=4, seed=3)

    def loss_fn(params, batch):
        logits = functional_call(model, params, (batch[0],)).logits[:, -1]
        return cross_entropy(logits.float(), batch[1]), None

    hyper = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 1e-3, "period": 4, "where": block_linear(model)}
    method = smat.build(loss_fn, optim.adam(1e-3), base, **hyper)
    state = method.init(base)
    for step in range(8):
        state, info = method.update(fold_in(key(3), "last"), state, example["rows"]("last", seed=1 + step))
    assert info.simulated
    for name, p in state.params.items():
        torch.testing.assert_close(found[name], p, rtol=0, atol=1e-6)
