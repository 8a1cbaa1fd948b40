"""Parameter trees: any nesting of mappings, sequences and pytree nodes, seen as one flat ``{path: tensor}``.

A leaf's path joins mapping keys, indices and field names with "."; a flat dict's key is its own path. None has no
leaves. Other types are nodes once they are registered with ``torch.utils._pytree`` (dataclasses by its
``register_dataclass``); without names of their own, their children count from 0.
"""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import raise_problems, shortened, some_of, takes
from .execution import opaque, over_shards, transformed, valueless, whole_leaf, wrapped
from .types import Params, Predicate, Where

NORM_BLOCK = 4096
WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module)\.")


def flatten(tree: Params) -> dict[str, Tensor]:
    """Leaves of a tree by path, in the tree's own order.

    Raises: ValueError for a leaf that is not a tensor and for two leaves of one path.
    """
    leaves: dict[str, Tensor] = {}
    problems: list[str] = []
    _collect(tree, "", leaves, problems)
    if problems:
        raise_problems(problems)
    return leaves


def unwrapped(path: str) -> str:
    """A parameter's name without the parts of ``torch.compile``, torch's ``checkpoint_wrapper``, FSDP1 and Fabric."""
    return _WRAPPERS.sub("", path)


def flatten_unwrapped(tree: Params) -> dict[str, Tensor]:
    """`flatten` with the names of `unwrapped`: those that parameters have in files and in the model itself.

    Raises: ValueError as `flatten`, and for two leaves of one such name.
    """
    leaves = flatten(tree)
    found = {unwrapped(path): leaf for path, leaf in leaves.items()}
    if len(found) < len(leaves):
        double = [path for path in leaves if path != unwrapped(path) in leaves]
        raise_problems(
            [f"parameters {p!r} and {unwrapped(p)!r} are one parameter without its wrapper: give one" for p in double]
        )
    return found


def unflatten(like: Params, leaves: Mapping[str, Any]) -> Params:
    """The tree of ``like``'s structure whose leaves are ``leaves[path]``.

    Raises: ValueError that lists leaves of ``like`` that ``leaves`` lacks (`shortened`).
    """
    missing: list[str] = []
    built = _build(like, "", leaves, missing)
    if missing:
        problems = [f"parameter {path!r} is missing" for path in missing]
        raise_problems(shortened(problems, "{} more parameters are missing"))
    return built


# no closures: one that calls itself keeps the leaves alive until the garbage collector runs
def _collect(node: Any, path: str, leaves: dict[str, Any], problems: list[str], kind: type = Tensor) -> None:
    children = None if isinstance(node, kind) else _children(node)
    if children is not None:
        for name, child in children:
            _collect(child, f"{path}.{name}" if path else name, leaves, problems, kind)
    elif not isinstance(node, kind):
        problems.append(f"parameter {path!r} is a {type(node).__name__}, {_WANTED[kind]}{_way_out(node)}")
    elif path in leaves:
        problems.append(f"two parameters have the name {path!r}: rename one of them")
    else:
        leaves[path] = node


_WANTED = {
    Tensor: "not a tensor: a tree is made of mappings, sequences, NamedTuples, registered pytree nodes and tensors",
    bool: "not a bool",
}


def _way_out(node: Any) -> str:
    if isinstance(node, nn.ParameterDict):
        return ", give dict(it.items()) for an nn.ParameterDict"
    return ", give dict(module.named_parameters()) for an nn.Module" if isinstance(node, nn.Module) else ""


def _build(node: Any, path: str, leaves: Mapping[str, Any], missing: list[str]) -> Any:
    children = None if isinstance(node, Tensor) else _children(node)
    if children is None:
        if path not in leaves:
            missing.append(path)
        return leaves.get(path)
    built = [_build(child, f"{path}.{name}" if path else name, leaves, missing) for name, child in children]
    if node is None:
        return None
    if (registered := _registered(node)) is not None:
        return registered.unflatten_fn(built, registered.flatten_fn(node)[1])
    if isinstance(node, Mapping):
        rebuilt = dict(zip(node, built, strict=True))
        if isinstance(node, defaultdict):
            return type(node)(node.default_factory, rebuilt)
        return rebuilt if type(node) is dict else type(node)(rebuilt)  # type: ignore[call-arg]
    return type(node)(*built) if hasattr(node, "_fields") else type(node)(built)


def _children(node: Any) -> list[tuple[str, Any]] | None:
    if node is None:
        return []
    if (registered := _registered(node)) is not None:
        if registered.flatten_with_keys_fn is None:
            return [(str(index), child) for index, child in enumerate(registered.flatten_fn(node)[0])]
        return [(_name(key), child) for key, child in registered.flatten_with_keys_fn(node)[0]]
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (list, tuple)):
        return [(str(index), child) for index, child in enumerate(node)]
    return None


_BUILT_IN = frozenset((dict, list, tuple, OrderedDict, defaultdict))


def _registered(node: Any) -> Any:
    """How torch's pytrees take a type of the user's apart; None for builtin types and those that they do not know."""
    return None if type(node) in _BUILT_IN else pytree.SUPPORTED_NODES.get(type(node))


def _name(key: Any) -> str:
    """The name that a pytree's key entry stands for: a mapping's key, an index, or a field."""
    return str(next((getattr(key, part) for part in ("key", "idx", "name") if hasattr(key, part)), key))


def tree_map(fn: Callable[..., Any], tree: Params, *rest: Params) -> Params:
    """``fn(leaf, *other_leaves)`` on leaves of equal path; the result has the first tree's structure.

    Raises: ValueError that lists leaves of the other trees that the first one lacks, and the other way round.
    """
    leaves, others = flatten(tree), [flatten(other) for other in rest]
    if any(other.keys() != leaves.keys() for other in others):
        names = {f"tree {number}": other for number, other in enumerate(others, 2)}
        raise_problems([text for name, other in names.items() for text in _differences(leaves, "tree 1", name, other)])
    return unflatten(tree, {path: fn(leaf, *(o[path] for o in others)) for path, leaf in leaves.items()})


def predicate(where: Where | None) -> Predicate | None:
    """Convert a choice of leaves to ``where(path, leaf) -> bool``: from a predicate, a tree of bools, or None (kept).

    A tree of bools may name more leaves than are asked for. Raises: ValueError for anything else, and, when asked, for
    a leaf that the tree of bools does not name.
    """
    wrong = isinstance(where, (set, frozenset, str, type, nn.Module))  # the last two can be called, with something else
    if where is None or (callable(where) and not wrong):
        if where is not None and not torch.compiler.is_compiling() and not _takes_two(where):
            raise ValueError("where does not take two arguments: give a function (name, weight) -> bool")
        return where
    chosen: dict[str, bool] = {}
    problems: list[str] = []
    if not wrong:
        _collect(where, "", chosen, problems, bool)
    if problems or wrong:
        raise_problems([
            f"where is a {type(where).__name__}: give a function (name, weight) -> bool, a tree of bools that is like "
            "the parameters, or None for all of them",
            *shortened(problems, "{} more leaves of where are not bools"),
        ])  # fmt: skip

    def picks(path: str, leaf: Tensor) -> bool:
        if path not in chosen:
            raise ValueError(f"where is a tree of bools that lacks parameter {path!r}: give it a bool for every one")
        return chosen[path]

    return picks


def _takes_two(function: Callable[..., Any]) -> bool:
    code = getattr(function if type(function) is FunctionType else type(function).__call__, "__code__", None)
    if code is not None and code.co_argcount == 2 + (type(function) is not FunctionType):
        return True  # every step asks, and a signature takes 40 us
    return takes(function, 2)


def check_same(reference: Mapping[str, Tensor], name: str, /, **others: Mapping[str, Tensor]) -> None:
    """All leaves of every other flat tree are in ``reference`` with the same shape, and the other way round.

    Raises: ValueError that lists missing, unknown and misshapen leaves of every tree at once (`shortened`).
    """
    problems = []
    for other_name, other in others.items():
        if len(other) == len(reference) and all(
            path in other and other[path].shape == leaf.shape for path, leaf in reference.items()
        ):
            continue
        misshapen = [
            f"parameter {path!r} has shape {tuple(other[path].shape)} in {other_name} but {tuple(leaf.shape)} in {name}"
            for path, leaf in reference.items()
            if path in other and other[path].shape != leaf.shape
        ]
        problems += _differences(reference, name, other_name, other)
        problems += shortened(misshapen, f"{{}} more parameters of {other_name} have another shape in {name}")
    if problems:
        raise_problems(problems)


def check_gradients(leaves: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """A flat tree of gradients has the names, shapes and dtypes of the parameters.

    Raises: ValueError that lists leaves that differ.
    """
    check_same(leaves, "params", grads=grads)
    problems = [
        f"the gradient of parameter {path!r} is {dtype_name(grads[path])}, the parameter {dtype_name(leaf)}: "
        "cast the gradient"
        for path, leaf in leaves.items()
        if grads[path].dtype != leaf.dtype
    ]
    if problems:
        raise_problems(shortened(problems, "{} more gradients are of another dtype"))


def check_kind(state: Any, *fields: str) -> None:
    """Raises: ValueError for a state without one of these fields, or with others: it is of another optimizer."""
    found = [f"no {name}" for name in fields if not hasattr(state, name)]
    found += [f"an unknown field {name}" for name in getattr(state, "_fields", ()) if name not in fields]
    if found:
        raise ValueError(
            f"the optimizer's state is a {type(state).__name__}, which has {found[0]}: give what init or update "
            "of this optimizer returned"
        )


def check_state(leaves: Mapping[str, Tensor], **trees: Mapping[str, Tensor]) -> None:
    """The flat trees of a state, by field, have the names and shapes of the parameters.

    Raises: ValueError that lists leaves that differ.
    """
    try:
        check_same(leaves, "params", **trees)
    except ValueError as error:
        raise ValueError(
            f"the optimizer's state is of other parameters ({error}): give what its init(params) or update returned "
            "for these"
        ) from None


def _differences(reference: Mapping[str, Any], name: str, other_name: str, other: Mapping[str, Any]) -> list[str]:
    """Errors for leaves that only one of two flat trees has (`shortened`)."""
    lacking = [f"{other_name} lacks parameter {path!r} of {name}" for path in reference if path not in other]
    unknown = [f"{other_name} has parameter {path!r} that {name} lacks" for path in other if path not in reference]
    found = shortened(lacking, f"{other_name} lacks {{}} more parameters of {name}")
    return found + shortened(unknown, f"{other_name} has {{}} more parameters that {name} lacks")


def gradients(loss: Tensor, leaves: Mapping[str, Tensor], *, touched: bool = False) -> Sequence[Tensor]:
    """Gradients of a loss in leaves of autograd, in their order; zero in those that it does not touch.

    Raises: ValueError for a loss without a gradient, for checkpointing that hides leaves, and where ``touched``, for a
        loss that has a gradient, but in none of the leaves.
    """
    if not leaves and not loss.requires_grad:
        return []
    check_differentiable(loss)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    if any(grad is None for grad in found) and _reentrant(loss):
        raise ValueError(
            "gradient checkpointing with use_reentrant=True hides the parameters of its layers, whose gradients would "
            "be zero: take use_reentrant=False"
        )
    if touched and all(grad is None for grad in found):
        raise ValueError(
            f"the loss has a gradient, but in none of the {len(leaves)} parameters given to it: it must run at its "
            "first argument, as smat_fn.grad.ModuleLoss(module, loss) does, and not at a module's own weights"
        )
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves.values(), strict=True)]


def check_differentiable(loss: Tensor) -> None:
    """Raises: ValueError for a loss without a gradient."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was computed under torch.no_grad, detached, or made of numbers such as "
            ".item() gives; compute it from the parameters given to it"
        )


def _reentrant(loss: Tensor) -> bool:
    """Whether a graph has a node of reentrant checkpointing; walks through all of it."""
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        left += [parent for parent, _ in node.next_functions]
    return False


def versions(leaves: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each leaf was written to (torch's version counter); empty in transforms, without inference tensors."""
    if transformed():
        return {}
    return {path: leaf._version for path, leaf in leaves.items() if not leaf.is_inference()}


def written(leaves: Mapping[str, Tensor], before: Mapping[str, int]) -> list[str]:
    """Paths of the leaves that were written to since ``before``, their `versions`."""
    return [path for path, now in versions(leaves).items() if before.get(path, now) != now]


def unchanged(base: Params) -> Callable[[], None]:
    """A check that theta_0 was not written to, as happens where a module that is loaded or trained shares its memory.

    Raises: ValueError that lists leaves written to since.
    """
    leaves = flatten(base)
    before = versions(leaves)

    def check() -> None:
        if changed := written(leaves, before):
            raise ValueError(
                f"base was written to since the method was built ({some_of(changed)}), so that theta_0 is no longer "
                "what it was: give copies, {name: p.detach().clone() for name, p in module.named_parameters()}"
            )

    return check


def check_floating(leaves: Mapping[str, Tensor], name: str) -> None:
    """Every leaf is a dense, real floating-point tensor. Raises: ValueError that lists the others (`shortened`)."""
    problems = [
        f"parameter {path!r} of {name} is {str(leaf.layout).removeprefix('torch.')}: only dense tensors are supported, "
        "give leaf.to_dense(), and an nn.Embedding without sparse=True"
        for path, leaf in leaves.items()
        if leaf.layout != torch.strided
    ]
    problems += [
        f"parameter {path!r} of {name} has dtype {dtype_name(leaf)}: "
        "only floating-point parameters can be trained, pass those alone"
        for path, leaf in leaves.items()
        if not leaf.is_floating_point()
    ]
    if problems:
        raise_problems(shortened(problems, f"{{}} more parameters of {name} are not dense or not floating-point"))


def check_apart(targets: Mapping[str, Tensor]) -> None:
    """Raises: ValueError for leaves to be written that share memory, of which the last one written would be left.

    And for a leaf whose coordinates share memory, as those of ``expand``.
    """
    shared = [
        f"parameters {first!r} and {second!r} of out share memory: give each its own, and a weight of two names once"
        for first, second in sharing(targets)
    ]
    shared += [
        f"coordinates of parameter {path!r} of out share memory: give it memory of its own, as by contiguous()"
        for path, leaf in targets.items()
        if leaf.layout == torch.strided and _overlaps(leaf)
    ]
    if shared:
        raise_problems(shortened(shared, "{} more parameters of out share memory"))


def _overlaps(leaf: Tensor) -> bool:
    """Whether coordinates may share memory: an axis steps into what those of smaller steps cover."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return leaf.numel() > 0
        reach += stride * (size - 1)
    return False


def sharing(leaves: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of leaves that share memory."""
    spans = sorted((*span, path) for path, leaf in leaves.items() if (span := _span_of(leaf)) is not None)
    return [
        (first, second)
        for (device, _, stop, first), (other, start, _, second) in pairwise(spans)
        if device == other and start < stop
    ]


def memory_of(leaves: Iterable[Tensor]) -> tuple[tuple[Any, ...], ...] | None:
    """Where the values of all leaves are, in order, equal for the same tensors; None where a leaf has no memory."""
    found = [(leaf, _start_of(leaf)) for leaf in leaves if leaf.numel()]
    if not found or any(start is None for _, start in found):
        return None
    return tuple((str(leaf.device), start, leaf.dtype, leaf.shape, leaf.stride()) for leaf, start in found)


def _span_of(leaf: Tensor) -> tuple[str, int, int] | None:
    """Device and addresses of a contiguous leaf, None for others and for those without memory of their own."""
    start = _start_of(leaf)
    return None if start is None or not leaf.is_contiguous() else (str(leaf.device), start, start + leaf.nbytes)


def _start_of(leaf: Tensor) -> int | None:
    """The address of a leaf's values; None for empty leaves, other types, and inside transforms and torch modes."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    plain = type(leaf) in PLAIN and leaf.layout == torch.strided and not leaf.is_meta and leaf.numel()
    if not plain or wrapped(leaf):
        return None
    return leaf.data_ptr() or None


def device_problems(leaves: Mapping[str, Tensor]) -> list[str]:
    """The error for parameters on a device without float64, in which draws and norms are computed."""
    kinds = sorted({leaf.device.type for leaf in leaves.values()} & WITHOUT_FLOAT64)
    return [
        f"parameters are on {kind}, which has no float64, the type of a draw's numbers: train on the CPU "
        "(model.to('cpu'), with transformers' Trainer TrainingArguments(use_cpu=True))"
        for kind in kinds
    ]


def check_finite(leaves: Mapping[str, Tensor], name: str) -> None:
    """Every floating-point leaf is finite (reads the data: for scripts). Raises: ValueError that lists the others."""
    problems = [
        f"parameter {path!r} of {name} holds {int((~leaf.isfinite()).sum())} values that are NaN or infinite"
        for path, leaf in leaves.items()
        if leaf.is_floating_point() and not is_finite(leaf)
    ]
    raise_problems(shortened(problems, f"{{}} more parameters of {name} hold such values"))


def is_finite(leaf: Tensor) -> bool:
    """Whether all values are finite."""
    # a sum keeps what is not, in a tenth of the time or less; that of finite values may be infinite. None of eight bits
    return (leaf.itemsize > 1 and bool(leaf.sum().isfinite())) or bool(leaf.isfinite().all())


def compute_dtype(*leaves: Tensor) -> torch.dtype:
    """float64 where a leaf is float64, else float32: the dtype of all arithmetic on parameters."""
    return torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32


def dtype_name(leaf: Tensor) -> str:
    """The dtype of a leaf without its module, "float32"."""
    return str(leaf.dtype).removeprefix("torch.")


def counter(number: int | Tensor, params: Params) -> int | Tensor:
    """Steps done, as a state holds them: an integer, and 0-d int64 beside params inside vmap and torch.compile."""
    if isinstance(number, Tensor) or not valueless():
        return number
    first = next(iter(flatten(params).values()), None)
    return torch.full((), number, dtype=torch.int64, device=None if first is None else first.device)


def as_vectors(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An elementwise ``fn(leaf, *other_leaves)`` that gets 0-d leaves as (1,).

    Torch's forward derivative of a 0-d float32 number times a Python float is float64, and a 0-d rate of float64
    promotes it.
    """

    def run(*leaves: Tensor) -> Tensor:
        return fn(*leaves) if leaves[0].ndim else fn(*(leaf.reshape(1) for leaf in leaves)).reshape(())

    return run


def root(values: Tensor) -> Tensor:
    """Square roots; inside transforms with the derivative 0 at 0, where torch's is infinite."""
    if not transformed():
        return values.sqrt()
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), values)


def cast(tree: Params, dtype: torch.dtype) -> Params:
    """Floating-point leaves in another dtype; other leaves as they are."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def clone(tree: Params) -> Params:
    """A tree of detached copies."""
    return tree_map(lambda leaf: leaf.detach().clone(), tree)


def partition(tree: Params, where: Where) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Flat leaves that ``where`` picks (`predicate`), and the others."""
    leaves, picks = flatten(tree), predicate(where)
    picked = {path: leaf for path, leaf in leaves.items() if picks is None or picks(path, whole_leaf(path, leaf))}
    return picked, {path: leaf for path, leaf in leaves.items() if path not in picked}


def combine(like: Params, *parts: Mapping[str, Tensor]) -> Params:
    """The inverse of `partition`: flat parts put back into the structure of ``like``."""
    return unflatten(like, {path: leaf for part in parts for path, leaf in part.items()})


def spans(sizes: Sequence[int], limit: int) -> Iterable[list[tuple[int, int, int]]]:
    """Groups of (index, start, stop) that cover all items, each group at most ``limit`` coordinates together.

    Small items share a group, a large one is cut at multiples of ``limit``.
    """
    group: list[tuple[int, int, int]] = []
    room = limit
    for index, size in enumerate(sizes):
        for start in range(0, size, limit):
            stop = min(start + limit, size)
            if stop - start > room:
                yield group
                group, room = [], limit
            group.append((index, start, stop))
            room -= stop - start
    if group:
        yield group


def global_norm(tree: Params) -> Tensor:
    """Euclidean norm of all coordinates, a 0-d float64 tensor on the device of the first leaf.

    ``sqrt(sum_b s_b)``: s_b is the float32 (float64 for float64 leaves) sum of squares of block b of 4,096 coordinates
    of a leaf; the s_b, in leaf order, are added in float64. Both sums are `sum_by_halves`, so that the bits depend on
    no device and no number of threads. Leaves may lie on several devices: only the s_b travel. Outside of transforms
    and autograd `smat_fn.ops` sums the squares, by one launch for each device and dtype.
    """
    flat = flatten(tree)
    if wrong := [path for path, leaf in flat.items() if leaf.is_complex()]:
        way = "give torch.view_as_real(leaf), whose norm is the same"
        raise_problems([f"parameter {path!r} is complex: {way}" for path in wrong])
    leaves = list(flat.values())
    if not leaves:
        return torch.zeros((), dtype=torch.float64)
    recorded = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    launched = hasattr(torch.ops.smat_fn, "block_squares")  # whoever takes a step has imported `smat_fn.ops`
    looked_on = transformed() and not opaque(*leaves)
    if not launched or looked_on or recorded or any(type(leaf) not in PLAIN for leaf in leaves):
        sums = block_squares(leaves)
    else:
        sums = torch.ops.smat_fn.block_squares(leaves)
    total = sum_by_halves(sums) if sums.numel() else leaves[0].new_zeros((), dtype=torch.float64)
    return root(over_shards(total))


PLAIN = Tensor, nn.Parameter  # what custom operations are asked about; other types keep to plain torch


def block_squares(leaves: Sequence[Tensor]) -> Tensor:
    """The s_b of `global_norm` in plain torch: float64 (blocks,), in leaf order, on the device of the first leaf."""
    sums, at, whole = [], -1, leaves[0]
    blocks = 128 if leaves[0].device.type == "cpu" else 256  # of a group: 2 MB stay in a CPU's cache
    groups = spans([leaf.numel() for leaf in leaves], NORM_BLOCK * blocks)
    # blocks of one dtype and device together: cat would widen the others
    runs = (
        run
        for group in groups
        for run in groupby(group, key=lambda span: (compute_dtype(leaves[span[0]]), leaves[span[0]].device))
    )
    for (dtype, _), run in runs:
        rows = []
        for index, start, stop in run:
            if index != at:  # a leaf that is not contiguous is copied once
                at, whole = index, leaves[index].reshape(-1)
            flat = whole[start:stop].to(dtype)
            short = -flat.numel() % NORM_BLOCK
            rows.append((torch.nn.functional.pad(flat, (0, short)) if short else flat).view(-1, NORM_BLOCK))
        block = torch.cat(rows) if len(rows) > 1 else rows[0]
        sums.append(sum_by_halves(block * block).double().to(leaves[0].device))
    return torch.cat(sums) if sums else leaves[0].new_zeros(0, dtype=torch.float64)


def sum_by_halves(values: Tensor) -> Tensor:
    """The sum along the last dimension, entry i added to entry i + half until one is left; zeros fill up to 2^n."""
    size = values.shape[-1]
    if short := (1 << (size - 1).bit_length()) - size:
        values = torch.nn.functional.pad(values, (0, short))
    if values.ndim == 1 and not transformed():
        values = values.view([2] * (values.numel().bit_length() - 1))
        while values.ndim:  # a call a level: two terms have one order
            values = values.sum(0)
        return values
    while (half := values.shape[-1] // 2) > 0:
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)
