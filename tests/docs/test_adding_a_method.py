"""The example of docs/adding_a_method.md, run as it stands against its closed form."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from smat_fn import config, optim, random
from smat_fn.mat import METHODS, MORE_METHODS, finetune
from smat_fn.types import Optimizer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/adding_a_method.md"
COUNTS = {6: "six", 7: "seven", 8: "eight", 9: "nine"}


@pytest.fixture
def names():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found = {"__name__": "l2sp"}
    exec(code, found)
    return found


@pytest.fixture
def build(names):
    return names["build"]


def test_the_file_has_what_the_conformance_tests_and_train_py_ask_of_it(names):
    own, build = names["L2sp"], names["build"]
    assert set(names["__all__"]) <= set(names)
    assert "Source:" in build.__doc__
    assert "Raises:" in build.__doc__
    assert {field.name for field in fields(own)} == build.__kwdefaults__.keys() - finetune.build.__kwdefaults__.keys()


def test_the_update_is_the_closed_form(build):
    base, params = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([3.0, 0.5])}
    sgd = Optimizer(lambda p: (), lambda g, s, p: ({"w": p["w"] - 0.5 * g["w"]}, s))
    method = build(lambda p, batch: ((p["w"] * batch).sum(), {}), sgd, base, pull=0.25)
    state, info = method.update(random.key(0), method.init(params), torch.tensor([4.0, 8.0]))
    # w - 0.5 (batch + 0.25 (w - base))
    assert torch.equal(state.params["w"], torch.tensor([3.0 - 0.5 * 4.5, 0.5 - 0.5 * 8.625]))
    assert float(info.loss) == 16.0


def test_bad_arguments_are_refused(build):
    with pytest.raises(ValueError, match="l2sp: pull is -1"):
        build(lambda p, b: (p["w"].sum(), {}), optim.adam(1e-3), {"w": torch.zeros(1)}, pull=-1)


def test_every_method_is_exported_and_on_the_pages():
    kinds = *METHODS, *MORE_METHODS
    costs = PAGE.read_text(encoding="utf-8").partition("\n## What the methods cost\n")[2].partition("\n## ")[0]
    (listed,) = re.findall(r"^\| Methods \| .*", (ROOT / "docs/own_model.md").read_text(encoding="utf-8"), re.MULTILINE)
    for kind in kinds:
        assert kind.__name__ in config.__all__
        assert getattr(config, kind.__name__) is kind
        assert f"`{kind.name}`" in costs
        assert f"`{kind.name}`" in listed
    others = f"by SMAT, fine-tuning and {COUNTS[len(kinds) - 2]} other methods"
    assert others in (ROOT / "README.md").read_text(encoding="utf-8")
