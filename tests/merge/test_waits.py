"""How often the host waits for a device: mergers on the CPU's tensors that stand for a device's; waits are counted."""

from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smat_fn import merge
from smat_fn.merge.parts import chunks, ranks
from smat_fn.testing import assert_trees_equal, random_tree

AWAY = torch.device("meta")  # the one whose tensors torch indexes without a driver
WAITS = "_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "equal"  # the host reads a result
SHAPES = {"wide": (12, 10), "tall": (30, 8), "vector": (7,)}


class Away(torch.Tensor):
    """A device's tensor, whose values are on the CPU."""

    waits: ClassVar = Counter()
    is_meta = False

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=AWAY,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        arrives = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        chosen = name.startswith("index") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if arrives or chosen or name in WAITS:
            cls.waits[name] += 1
        if kwargs.get("device") == AWAY:
            kwargs["device"] = "cpu"
        own = {id(leaf.inner): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Away)}
        args, kwargs = pytree.tree_map_only(Away, lambda leaf: leaf.inner, (args, kwargs))
        found = func(*args, **kwargs)
        if arrives:
            return found
        return pytree.tree_map_only(torch.Tensor, lambda leaf: own[id(leaf)] if id(leaf) in own else Away(leaf), found)


class Made(TorchFunctionMode):
    """New tensors of the device, and lists of numbers of it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.tolist and isinstance(args[0], Away):
            args = (args[0].cpu(),)
        if kwargs.get("device") == AWAY and not any(isinstance(arg, Away) for arg in args):
            return Away(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


def there(tree):
    return {path: Away(leaf.clone()) for path, leaf in tree.items()}


@pytest.mark.parametrize(
    ("merger", "options", "expected"),
    [
        # 3 experts: magnitudes counted in two passes of two steps, and their bits selected; one sum of signs
        ("ties", {"coef": 0.3, "keep": 0.3}, 3 * 2 * (2 + 1) + 3 * 2 + 1),
        # 2 matrices: the norms, and whether the system has a solution
        ("wudi", {"coef": 1.0}, 2 * (1 + 1)),
        ("iso_cts", {"coef": 1.0}, 2),
        # 3 leaves: norms, how many vary, their threshold and its last place
        ("sce", {"density": 0.5}, 3 * (1 + 1 + 3)),
    ],
)
def test_the_host_waits_for_a_leaf_and_not_for_its_pieces(monkeypatch, merger, options, expected):
    monkeypatch.setattr(chunks, "CHUNK", 48)  # 16 coordinates of each expert
    base, *trees = (random_tree(seed, SHAPES) for seed in range(4))
    run, experts = getattr(merge, merger), dict(zip("abc", trees, strict=True))
    wanted = run(base, experts, **options)
    if merger == "ties":
        monkeypatch.setattr(ranks, "SMALL", 16)
    monkeypatch.setattr(ranks, "STEP", 16)
    monkeypatch.setattr(ranks, "AWAY", 256)
    monkeypatch.setattr(Away, "waits", Counter())
    with Made():
        found = run(there(base), {name: there(tree) for name, tree in experts.items()}, **options)
    assert_trees_equal({path: leaf.inner for path, leaf in found.items()}, wanted)
    assert Away.waits.total() == expected, Away.waits
