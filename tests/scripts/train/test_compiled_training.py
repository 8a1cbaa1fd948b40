"""--compile: the same training around a compiled module."""

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from smat_fn import checkpoint
from smat_fn.config import DIGITS, Adapters, Asam, Finetune, Training
from smat_fn.grad import compiling
from smat_fn.parallel import ALONE
from smat_fn.scripts.train.loop import train_expert
from smat_fn.scripts.train.variants import problems
from smat_fn.testing import assert_trees_close

FOUR = Training(steps=4, lr=5e-4, compiled=True)
NO_CXX = shutil.which("g++") is None and shutil.which("clang++") is None


@pytest.mark.parametrize(
    "method", [DIGITS.methods["smat"], pytest.param(Asam(rho=0.5), marks=pytest.mark.slow)], ids=["smat", "asam"]
)
def test_forward_and_backward_run_as_one_program_and_the_module_is_left_as_it_was(method, suite, monkeypatch):
    graphs, true = [], torch.compile

    def kept(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiling, "torch", SimpleNamespace(compile=partial(true, backend=kept, fullgraph=True)))
    module = suite.loss_fn("rot90").module
    found = train_expert(suite, "rot90", method, FOUR, seed=21)
    assert len(graphs) == 1  # clean and simulated steps, and both passes of asam, run the same one
    assert module._compiled_call_impl is None
    wanted = train_expert(suite, "rot90", method, replace(FOUR, compiled=False), seed=21)
    assert all(torch.equal(found[path], leaf) for path, leaf in wanted.items())


@pytest.mark.slow
@pytest.mark.skipif(NO_CXX, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it compiles
def test_inductor_trains_as_torch_does_within_rounding(suite, train, tmp_path):
    train(tmp_path, "smat", tasks=("rot90",), training=FOUR)
    found, manifest = checkpoint.load_expert(tmp_path / "rot90", suite.base)
    assert manifest["training"]["compiled"] is True
    wanted = train_expert(suite, "rot90", DIGITS.methods["smat"], replace(FOUR, compiled=False), seed=21)
    # the gradient of a key's bias is 0 but for rounding, which Adam makes large
    known = {path for path in wanted if not path.endswith("k_proj.bias")}
    assert_trees_close(*({path: leaves[path] for path in known} for leaves in (found, wanted)), rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match=r"training\.compiled was True"):
        train(tmp_path, "smat", tasks=("rot90",), training=replace(FOUR, compiled=False), resume=True)


def test_what_does_not_go_with_compiling_is_named_before_work(monkeypatch, suite, train, tmp_path):
    found = problems(Finetune(), replace(FOUR, lora=Adapters(2, 4.0), dropout=True), ALONE)
    assert found == [
        f"`compile` is not supported with {name}: leave one of them out" for name in ("adapters", "dropout")
    ]
    smat = DIGITS.methods["smat"]
    assert problems(smat, FOUR, ALONE, "stream") == [
        "`compile` is not supported with `offload='stream'`: leave one of them out"
    ]
    assert problems(smat, FOUR, ALONE, "cpu") == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"`compile` needs a C\+\+ compiler on the CPU, and none of g\+\+, clang"):
            train(tmp_path, "ft", tasks=("rot90",), training=FOUR)
