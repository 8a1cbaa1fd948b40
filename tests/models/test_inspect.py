"""The table of a dry run."""

import pytest
import torch
from torch import nn

from smat_fn import where
from smat_fn.lora import Lora
from smat_fn.models import inspect


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(()), requires_grad=False)


def test_leaves_say_what_is_trained_masked_and_tied():
    module = Model()
    module.layers[1].fc.weight.requires_grad_(False)
    rows = {leaf.name: leaf for leaf in inspect.describe_leaves(module, where.block_linear(module))}
    assert list(rows) == [name for name, _ in module.named_parameters()]
    shape = (5, 2)
    assert rows["embed.weight"] == inspect.Leaf("embed.weight", shape, 10, "float32", True, False, ("head.weight",))
    assert rows["layers.0.fc.weight"][1:] == ((2, 2), 4, "float32", True, True, ())
    # only what is trained can be masked
    assert rows["layers.1.fc.weight"][1:] == ((2, 2), 4, "float32", False, False, ())
    assert rows["gain"] == inspect.Leaf("gain", (), 1, "float32", False, False, ())
    assert [leaf.masked for leaf in inspect.describe_leaves(module, None)] == [leaf.trained for leaf in rows.values()]


def test_the_table_joins_equal_leaves_of_all_blocks_and_adds_up():
    module = Model()
    text = inspect.table(inspect.describe_leaves(module, where.block_linear(module)))
    assert [line.split() for line in text.splitlines()] == [
        ["tensor", "shape", "dtype", "trained", "masked", "parameters"],
        ["gain", "()", "float32", "-", "-", "1"],
        ["embed.weight", "=", "head.weight", "5", "x", "2", "float32", "yes", "-", "10"],
        ["layers.*.fc.weight", "(2)", "2", "x", "2", "float32", "yes", "yes", "8"],
        ["layers.*.fc.bias", "(2)", "2", "float32", "yes", "-", "4"],
        ["layers.*.norm.weight", "(2)", "2", "float32", "yes", "-", "4"],
        ["layers.*.norm.bias", "(2)", "2", "float32", "yes", "-", "4"],
        ["all:", "31", "parameters", "in", "10", "tensors"],
        ["trained:", "30", "parameters", "in", "9", "tensors,", "96.8%"],
        ["masked:", "8", "parameters", "in", "2", "tensors,", "25.8%"],
    ]


def test_a_block_that_differs_has_its_own_line():
    module = Model()
    module.layers[1].fc.weight.requires_grad_(False)
    lines = inspect.table(inspect.describe_leaves(module, where.block_linear(module))).splitlines()
    assert [line.split() for line in lines if "fc.weight" in line] == [
        ["layers.0.fc.weight", "2", "x", "2", "float32", "yes", "yes", "4"],
        ["layers.1.fc.weight", "2", "x", "2", "float32", "-", "-", "4"],
    ]


@pytest.mark.parametrize("merged", [True, False])
def test_adapters_are_trained_and_the_weights_that_they_adapt_are_not(merged):
    module = Model()
    paths = ("layers.0.fc.weight", "layers.1.fc.weight")
    lora = Lora(paths, 1, transposed=frozenset(paths), saved=("layers.0.norm.bias",))
    leaves = inspect.describe_leaves(module, where.block_linear(module))
    text = inspect.table(inspect.with_adapters(leaves, lora, merged=merged, dtype=None if merged else "float64"))
    kind, weight, half = ("float32", "yes", "-") if merged else ("float64", "-", "yes")
    assert [line.split() for line in text.splitlines()[3:]] == [
        ["layers.*.fc.weight", "(2)", "2", "x", "2", "float32", "-", weight, "8"],
        ["layers.*.fc.lora_A.weight", "(2)", "1", "x", "2", kind, "yes", half, "4"],
        ["layers.*.fc.lora_B.weight", "(2)", "2", "x", "1", kind, "yes", half, "4"],
        ["layers.*.fc.bias", "(2)", "2", "float32", "-", "-", "4"],
        ["layers.*.norm.weight", "(2)", "2", "float32", "-", "-", "4"],
        ["layers.0.norm.bias", "2", "float32", "yes", "-", "2"],
        ["layers.1.norm.bias", "2", "float32", "-", "-", "2"],
        ["all:", "39", "parameters", "in", "14", "tensors"],
        ["trained:", "10", "parameters", "in", "5", "tensors,", "25.6%"],
        ["masked:", "8", "parameters", "in", "2" if merged else "4", "tensors,", "20.5%"],
    ]


def test_no_leaves():
    assert inspect.table([]).splitlines()[1:] == [
        f"{name}: 0 parameters in 0 tensors" for name in ("all", "trained", "masked")
    ]
