"""Chunks of one leaf: which leaves loops read, sizes of chunks, and leaves outside of the merged part."""

from types import SimpleNamespace

import pytest
import torch

from smat_fn import execution
from smat_fn.config import TaskArithmetic
from smat_fn.folders.inputs.reading import Folder
from smat_fn.folders.inputs.stored import Stored, reader_of_tensor
from smat_fn.folders.streaming.chunks import Job, looped, write_order
from smat_fn.merge.parts.merger import Rule
from smat_fn.merge.parts.windows import ROWS, SPAN, InPlace, Scratch


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    """Loops count as compiled: none is run."""
    monkeypatch.setattr(execution, "loops", object)


def folder(label, leaf, **more):
    return Folder(label, {"w": leaf.to("meta")}, {"w": reader_of_tensor(leaf)}, {}, **more)


def job(leaf, *, base=None, expert=None, dtype=None, chunk=1 << 24):
    base, expert = base or folder("base", leaf), expert or folder("expert", leaf)
    config = TaskArithmetic(coef=0.5)
    experts = {"a": expert, "b": expert}
    return Job(config, {"w": 0.5}, None, base, experts, dtype, chunk, torch.device("cpu"), Scratch())


def test_a_loop_must_read_every_leaf_and_write_the_output():
    leaf = torch.ones(8, 4)
    assert looped(job(leaf), "w")
    assert looped(job(leaf, dtype=torch.bfloat16), "w")
    assert not looped(job(leaf, dtype=torch.float64), "w")
    assert not looped(job(leaf, expert=folder("expert", leaf.double())), "w")
    assert not looped(job(leaf, expert=folder("expert", leaf, absent=frozenset({"w"}))), "w")


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("chunk", [1 << 24, 1 << 14])
def test_chunks_of_a_loop_are_as_large_as_their_memory_allows(rows, stored, chunk):
    leaf = torch.zeros(600, 4096, dtype=torch.bfloat16)
    read = Stored(SimpleNamespace(get_tensor=lambda name: leaf), "w") if stored else reader_of_tensor(leaf)
    held = Folder("held", {"w": leaf.to("meta")}, {"w": read}, {})
    rule = Rule(loop=lambda path: lambda window: None, rows=rows)
    found = [task.args for task in write_order(job(leaf, base=held, expert=held, chunk=chunk), rule, "w")]
    most = min(4 * chunk, InPlace.span) if stored else min(chunk, SPAN)
    most = min(chunk // 2, ROWS) if rows else most
    assert [stop - start for start, stop in found[:-1]] == [most] * (len(found) - 1)
    assert (found[0][0], found[-1][1]) == (0, leaf.numel())


def test_a_leaf_outside_the_merged_part_must_fit_the_output():
    leaf = torch.tensor([1.0, 3.4e38])
    whole = Folder("whole", {"out": leaf.to("meta")}, {"out": reader_of_tensor(leaf)}, {})
    found = job(torch.ones(2), base=folder("base", torch.ones(2), within=whole))
    (task,) = write_order(found, Rule(), "out")
    assert task().values.tolist() == leaf.tolist()
    (task,) = write_order(found._replace(dtype=torch.bfloat16), Rule(), "out")
    with pytest.raises(ValueError, match="'out': merged values exceed the range of"):
        task()
