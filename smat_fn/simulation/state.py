"""`draw`, `simulate` and its gradient `reweight` on any tree: checks and paths around the operations of smat_fn.ops."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import NamedTuple, TypeAlias, cast, get_args

import numpy
import torch
from torch import Tensor

from .. import ops, random, tree
from ..errors import raise_problems, shortened, some_of
from ..execution import refuse_donation, shard_starts, transformed, unread
from ..ops.cpu import Numbers
from ..types import Noise, Params, Where
from .noise import quantiles, table_on

Number: TypeAlias = float | Tensor  # tensors are 0-d
NOISES: tuple[str, ...] = get_args(Noise)
_LARGEST = torch.finfo(torch.float32).max


class Draw(NamedTuple):
    """Draws of alpha, m and epsilon; mask and noise stay implicit: functions of (key, path, coordinate).

    Attributes:
        key: int64 (2,).
        scale: alpha, float32, shape ().
        drop_prob: p, float64, shape (); negative in an `opposite`.
        sigma: RMS of the noise in units of the weights, float64, shape (); negative in an `opposite`.
        noise: quantiles of unit noise by 16-bit field, float32 (65536,); empty for uniform noise.
        factors: of alpha, by path; 1 for leaves that are not named.
    """

    key: Tensor
    scale: Tensor
    drop_prob: Tensor
    sigma: Tensor
    noise: Tensor
    factors: Mapping[str, float] = {}


def draw(
    key: Tensor,
    *,
    alpha_min: Number,
    drop_prob: Number,
    sigma: Number,
    noise: Noise = "uniform",
    alpha_max: Number = 1.0,
    factors: Mapping[str, float] | None = None,
) -> Draw:
    r"""Draw the simulated state of one step.

    ``alpha ~ U[alpha_min, alpha_max]``, ``m_k = 0`` with probability p and else ``1 / (1 - p)``, ``epsilon_k`` of
    mean 0 and RMS sigma, all independent. alpha comes from the child 0 of the key, mask and noise from its children
    by parameter name.

    Args:
        key: int64 (2,), from `smat_fn.random`; the same key gives the same draw.
        alpha_min: in [0, 1].
        drop_prob: p in [0, 1), the probability of removing a coordinate of the masked set, realised on 16 bits.
        sigma: RMS of the noise, >= 0, in units of the weights.
        noise: "uniform", "gaussian" or "laplace". ``alpha_min=1``, ``drop_prob=0`` and ``sigma=0`` switch Scale, Mask
            and Perturb off.
        alpha_max: 1 in the paper; larger ones, as far as float32 holds, simulate merges whose coefficients sum to more
            than 1.
        factors: path -> finite number, by which alpha is multiplied in that leaf; 1 for leaves that are not named.

    The four numbers may be 0-d tensors: `simulate` then has derivatives in alpha_min, alpha_max and sigma, and vmap
    runs over any of them. drop_prob has no derivative, the 16-bit mask is a step function of it.

    Returns:
        Draw on the key's device; can be vmapped over keys.

    Raises:
        ValueError: lists every value out of range (inside a transform of torch.func and torch.compile tensors have no
            values to check), and a drop_prob that is differentiated, forward or backward.

    Source: paper Eqs. smat-state and smat-mask.
    """
    problems = draw_problems(alpha_min, drop_prob, sigma, noise, alpha_max) + factor_problems(factors or {})
    if problems:
        raise_problems(problems, "draw")
    unit = random.uniform(random.fold_in(key, 0), dtype=torch.float64)

    def number(value: Number) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(key.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=key.device)

    least = number(alpha_min) if isinstance(alpha_min, Tensor) else alpha_min
    alpha_max = number(alpha_max) if isinstance(alpha_max, Tensor) else alpha_max
    scale = (least + (alpha_max - least) * unit).to(torch.float32)
    if isinstance(drop_prob, Tensor):
        drop_prob = cast(Tensor, _StepFunction.apply(drop_prob))
    if noise == "uniform" and not torch.compiler.is_compiling():  # where `quantiles` is a constant
        table = torch.zeros(0, dtype=torch.float32, device=key.device)
    else:
        table = table_on(quantiles(noise), key.device)
    return Draw(key, scale, number(drop_prob), number(sigma), table, factors or {})


def opposite(draw: Draw, sign: Number = -1.0) -> Draw:
    r"""The antithetic partner of a draw: the same alpha, every 16-bit field u of mask and noise read as 65535 - u.

    epsilon becomes ``-epsilon``. The mask drops a coordinate where ``u >= 65536 - T`` instead of ``u < T``, with the
    same probability: for ``p = 1/2`` that is the complement, ``m + m' = 2``, and below 1/2 no coordinate is dropped by
    both. The mean over the pair at p = 1/2 is therefore ``(theta~ + theta~') / 2 = theta_0 + alpha (theta - theta_0)``.
    Written as a negative drop_prob and sigma: the opposite of the opposite is the draw.

    Args:
        sign: -1, or 1 for the draw itself; may be a 0-d tensor.

    Raises:
        ValueError: sign is a number other than 1 and -1 (a tensor's value is not read).

    Source: Hammersley and Morton, 1956.
    """
    if not isinstance(sign, Tensor) and sign not in (1, -1):
        raise ValueError(f"opposite: sign is {sign!r}, must be -1, or 1 for the draw itself")
    return draw._replace(drop_prob=draw.drop_prob * sign, sigma=draw.sigma * sign)


_DIFFERENTIATED = "drop_prob is differentiated, but the mask is a step function of it: detach it"


class _StepFunction(torch.autograd.Function):
    """The identity; a derivative in either direction raises."""

    @staticmethod
    def forward(prob):  # type: ignore[no-untyped-def]
        return prob.view_as(prob)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        raise ValueError(f"draw: {_DIFFERENTIATED}")

    @staticmethod
    def jvp(ctx, _):  # type: ignore[no-untyped-def]
        raise ValueError(f"draw: {_DIFFERENTIATED}")

    @staticmethod
    def vmap(info, in_dims, prob):  # type: ignore[no-untyped-def]
        return _StepFunction.apply(prob), in_dims[0]


def draw_problems(
    alpha_min: Number, drop_prob: Number, sigma: Number, noise: str, alpha_max: Number = 1.0
) -> list[str]:
    """Errors for hyperparameters of the three operations that are out of range."""
    problems = []
    numbers = {"alpha_min": alpha_min, "drop_prob": drop_prob, "sigma": sigma, "alpha_max": alpha_max}
    for name, value in numbers.items():
        if not isinstance(value, Tensor | Real):
            problems.append(f"{name} is {value!r}: give a number or 0-d tensor")
        if isinstance(value, Tensor) and (value.ndim or not value.is_floating_point()):
            problems.append(f"{name} is a {value.dtype} of shape {tuple(value.shape)}: give a number or 0-d tensor")
    if problems:
        return problems
    if not (unread(alpha_min) or 0 <= alpha_min <= 1):
        problems.append(f"alpha_min is {alpha_min}, must lie in [0, 1] (1 switches Scale off)")
    # torch.compile traces comparisons of a number that another program had otherwise, and not math.isfinite
    known = not (unread(alpha_min) or unread(alpha_max))
    if not (unread(alpha_max) or -math.inf < alpha_max < math.inf) or (known and not alpha_max >= min(alpha_min, 1)):
        problems.append(f"alpha_max is {alpha_max}, must be finite and at least alpha_min, {alpha_min}")
    elif not (unread(alpha_max) or alpha_max <= _LARGEST):
        problems.append(f"alpha_max is {alpha_max}, must be at most {_LARGEST:.3g}, as a float32 is")
    if not (unread(drop_prob) or 0 <= drop_prob < 1):
        problems.append(f"drop_prob is {drop_prob}, must lie in [0, 1): it is the probability of removing a coordinate")
    if isinstance(drop_prob, Tensor) and drop_prob.requires_grad:
        problems.append(_DIFFERENTIATED)
    if not (unread(sigma) or 0 <= sigma < math.inf):
        problems.append(f"sigma is {sigma}, must be finite and not negative (0 switches Perturb off)")
    if noise not in NOISES:
        problems.append(f"noise is {noise!r}, choose one of {', '.join(NOISES)}")
    return problems


def _field_problems(draw: Draw) -> list[str]:
    """Errors for fields that a caller replaced by others than tensors, or by a noise table of another size or dtype."""
    problems = [
        f"{name} of the draw is {value!r}, must be a 0-d tensor: draw._replace({name}=torch.tensor(...))"
        for name, value in (("scale", draw.scale), ("sigma", draw.sigma))
        if not (isinstance(value, Tensor) and not value.ndim)
    ]
    table = draw.noise
    wide = torch.float32, torch.float64
    if not isinstance(table, Tensor) or table.dtype not in wide or table.shape not in ((0,), (65536,)):
        found = f"{table.dtype} {tuple(table.shape)}" if isinstance(table, Tensor) else repr(table)
        problems.append(
            f"noise of the draw is {found}, must be float32 or float64 (65536,), or empty for uniform noise"
        )
    return problems


def of_leaves(draw: Draw, paths: Iterable[str]) -> Draw:
    """A draw for a part of a tree: with the factors of these leaves alone."""
    return draw._replace(factors={path: draw.factors[path] for path in paths if path in draw.factors})


def factor_problems(factors: Mapping[str, float]) -> list[str]:
    """Errors for factors of alpha that are not finite."""
    if not isinstance(factors, Mapping):
        return [f"factors is {factors!r}: give a mapping {{parameter name: number}}"]
    if odd := [f"{path} {factor!r}" for path, factor in factors.items() if not isinstance(factor, Real)]:
        return [f"factors of alpha must be numbers: {some_of(odd)}"]
    bad = [f"{path} {factor}" for path, factor in factors.items() if not abs(factor) < math.inf]
    return [f"factors of alpha must be finite: {some_of(bad)}"] if bad else []


def unknown_factors(factors: Mapping[str, float], leaves: Collection[str], subject: str) -> list[str]:
    """The error for factors of alpha of other names than the leaves'. Args: subject: "factors of alpha name"."""
    unknown = [repr(path) for path in factors if path not in leaves]
    way = "which no parameter here has: correct the names, or leave them out"
    return [f"{subject} {some_of(unknown)}, {way}"] if unknown else []


def all_off(alpha_min: Number, drop_prob: Number, sigma: Number) -> bool:
    """Whether Scale, Mask and Perturb are all switched off, by Python numbers, so that theta~ is theta."""
    if any(isinstance(value, Tensor) for value in (alpha_min, drop_prob, sigma)):
        return False
    return bool(alpha_min == 1 and drop_prob == 0 and sigma == 0)


def simulate(
    params: Params,
    base: Params,
    draw: Draw,
    *,
    where: Where | None = None,
    out: Params | None = None,
    starts: Mapping[str, int] | None = None,
) -> Params:
    r"""The simulated merged state.

    ``theta~ = theta_0 + alpha * m (.) (theta - theta_0) + epsilon``  (Eq. smat-state), in float32 (float64 for float64
    leaves) as ``(theta_0 + c (theta - theta_0)) + epsilon`` with ``c = alpha / (1 - p)`` or 0, each operation rounded,
    then one rounding to the dtype of params. Differentiable in params, base, draw.scale and draw.sigma.

    Args:
        params: theta, any tree of floating-point tensors.
        base: theta_0, same structure and shapes.
        draw: from `smat_fn.draw`.
        where: the masked set S as a predicate on (path, leaf) or a tree of bools, None masks every leaf.
        out: tree whose tensors receive the result (no gradient flows), may be params or base; not inside torch.func.
        starts: path -> index of the leaf's first coordinate in the full leaf, for shards.

    Returns:
        tree of params' structure, shapes, dtypes and (of dense leaves) strides; ``out`` if given.

    Raises:
        ValueError: for trees that do not match (all problems listed, by path), and for factors of alpha of other paths.

    Source: paper section 4.1.
    """
    leaves, origins = tree.flatten(params), tree.flatten(base)
    tree.check_floating(leaves, "params")
    tree.check_floating(origins, "base")
    tree.check_same(leaves, "params", base=origins)
    check_devices(leaves, origins)
    targets, in_place = _targets(out, leaves, origins)
    offsets = _check_starts(starts, leaves)
    if isinstance(draw, Draw) and draw.factors:
        raise_problems(unknown_factors(draw.factors, leaves, "factors of alpha name"))
    result: dict[str, Tensor] = {}
    for part in draw_parts(leaves, draw, where, offsets):
        theta, theta_0 = [leaves[path] for path in part.paths], [origins[path] for path in part.paths]
        if in_place:
            states = [targets[path] for path in part.paths]
            with torch.no_grad():
                ops.simulate_into(theta, theta_0, states, *part.numbers, part.masked, part.starts)
        else:
            states = ops.simulate(theta, theta_0, part.numbers, part.masked, part.starts)
        result.update(zip(part.paths, states, strict=True))
    return out if in_place else _result(params, result, out, targets)


def reweight(
    grads: Params,
    draw: Draw,
    *,
    where: Where | None = None,
    out: Params | None = None,
    starts: Mapping[str, int] | None = None,
) -> Params:
    r"""The gradient at theta from the gradient at the simulated state, the draw held fixed.

    ``alpha * m (.) g``  (Eq. smat-gradient), in float32 (float64), rounded once; the mask is drawn again, not stored.

    Args:
        grads: gradient at `simulate`'s result.
        draw, where, starts: those of that `simulate`.
        out: may be grads.

    Returns:
        tree of grads' structure, shapes, dtypes and (of dense leaves) strides; ``out`` if given.

    Raises:
        ValueError: for leaves that are not floating-point tensors.

    Source: paper section 4.2.
    """
    leaves = tree.flatten(grads)
    tree.check_floating(leaves, "grads")
    targets, in_place = _targets(out, leaves)
    offsets = _check_starts(starts, leaves)
    result: dict[str, Tensor] = {}
    for part in draw_parts(leaves, draw, where, offsets):
        raw = [leaves[path] for path in part.paths]
        if in_place:
            weighted = [targets[path] for path in part.paths]
            with torch.no_grad():
                ops.reweight_into(raw, weighted, *part.numbers[:3], part.masked, part.starts)
        else:
            weighted = ops.reweight(raw, part.numbers, part.masked, part.starts)
        result.update(zip(part.paths, weighted, strict=True))
    return out if in_place else _result(grads, result, out, targets)


def reweight_and_clip(
    grads: Params, draw: Draw | None, *, where: Where | None = None, max_norm: float | None = None, donate: bool = False
) -> tuple[Params, Tensor]:
    """Between a gradient and the optimizer: `reweight` (with a draw), global norm and clip, fused.

    ``g' = g min(1, max_norm / (norm + 1e-6))`` for ``g = alpha m (.) grads``; the bits of `reweight` followed by
    `smat_fn.optim.clip`, in no more passes over memory than a clip alone.

    Args:
        draw: None for a clean gradient.
        max_norm: positive and finite; None only measures.
        donate: write into grads.

    Returns:
        (grads, 0-d float32 norm before clipping).

    Raises:
        ValueError: max_norm is neither None nor positive and finite; for leaves that are not floating-point tensors.
    """
    check_max_norm(max_norm)
    refuse_donation("reweight_and_clip", donate)
    leaves = tree.flatten(grads)
    tree.check_floating(leaves, "grads")
    parts = [] if draw is None else list(draw_parts(leaves, draw, where, {}))
    if len(parts) > 1:
        # several devices or factors of alpha: reweight each, then one norm
        weighted = dict(leaves)  # in their order
        for part in parts:
            made = ops.reweight([leaves[path] for path in part.paths], part.numbers, part.masked, part.starts)
            weighted.update(zip(part.paths, made, strict=True))
        leaves, parts, donate = weighted, [], True
    numbers, masked, starts = (parts[0].numbers, parts[0].masked, parts[0].starts) if parts else (None, [], [])
    if transformed():
        result, norm = ops.autograd.reweight_and_clip(leaves, numbers, masked, starts, max_norm=max_norm)
    else:
        result, norm = ops.reweight_and_clip(leaves, numbers, masked, starts, max_norm=max_norm, donate=donate)
    return tree.unflatten(grads, result), norm


def check_max_norm(max_norm: float | None, name: str = "max_norm") -> None:
    """Raises: ValueError unless max_norm, an argument of that name, is None or positive and finite."""
    number = isinstance(max_norm, Real | Tensor)
    if not (max_norm is None or unread(max_norm) or (number and 0 < max_norm < math.inf)):
        raise ValueError(f"{name} is {max_norm!r}, must be positive and finite, or None for no clipping")


def participation(draw: Draw, like: Params, *, where: Where | None = None) -> Params:
    """``alpha * m`` of every coordinate (the factor of Eq. smat-gradient), float32 (float64 for float64 leaves).

    Args:
        draw, where: as `simulate`.
        like: tree that gives structure, shapes and dtypes.
    """
    return _shown(like, draw, where, lambda leaves, part: ops.plain.coefficients(leaves, part.numbers, part.masked))


def materialise(draw: Draw, like: Params, *, where: Where | None = None) -> tuple[Params, Params]:
    """Mask (0 or 1 / (1 - p)) and noise of every coordinate, for tests and readers.

    Args:
        draw, where: as `simulate`.
        like: tree that gives structure, shapes and dtypes.

    Returns:
        (mask, noise), float32 (float64 for float64 leaves); ``alpha * mask`` is `participation`.
    """
    unit = draw._replace(scale=torch.ones((), dtype=torch.float32, device=draw.key.device), factors={})
    noise = _shown(like, unit, where, lambda leaves, part: ops.plain.noises(leaves, part.numbers))
    return participation(unit, like, where=where), noise


class DrawPart(NamedTuple):
    """The leaves of one device and one factor of alpha, and the draw there."""

    paths: list[str]
    numbers: Numbers
    masked: list[bool]
    starts: list[int]


def draw_parts(
    leaves: Mapping[str, Tensor], draw: Draw, where: Where | None, starts: Mapping[str, int]
) -> Iterator[DrawPart]:
    """The leaves of each device and factor of alpha, with the draw there. Args: starts: empty: those of the context."""
    starts = starts or shard_starts()
    if not isinstance(draw, Draw):
        raise ValueError(f"draw is a {type(draw).__name__}, must be what smat_fn.draw returns")
    if problems := _field_problems(draw):
        raise_problems(problems)
    groups: dict[tuple[torch.device, float], list[str]] = {}
    picks = tree.predicate(where)
    cutoff = random.threshold(draw.drop_prob)
    for path, leaf in leaves.items():
        groups.setdefault((leaf.device, draw.factors.get(path, 1.0)), []).append(path)
    for (device, factor), paths in groups.items():
        # the host does not wait for copies to a device; copies from one are waited for
        # streams are derived where the key is, once for all who ask for those of this step
        alpha = draw.scale if factor == 1 else draw.scale * factor
        fields = (random.leaf_streams(draw.key, paths), alpha, cutoff, draw.sigma)
        streams, scale, dropped, sigma = (field.to(device, non_blocking=device.type == "cuda") for field in fields)
        noise = draw.noise if draw.noise.device == device else table_on(draw.noise, device)
        numbers = Numbers(streams, scale, dropped, sigma, noise)
        masked = [picks is None or bool(picks(path, leaves[path])) for path in paths]
        yield DrawPart(paths, numbers, masked, [starts.get(path, 0) for path in paths])


def _shown(
    like: Params, draw: Draw, where: Where | None, fn: Callable[[list[Tensor], DrawPart], list[Tensor]]
) -> Params:
    leaves = tree.flatten(like)
    tree.check_floating(leaves, "like")
    values: dict[str, Tensor] = {}
    for part in draw_parts(leaves, draw, where, {}):
        values.update(zip(part.paths, fn([leaves[path] for path in part.paths], part), strict=True))
    return tree.unflatten(like, values)


def _check_starts(starts: Mapping[str, int] | None, leaves: Mapping[str, Tensor]) -> Mapping[str, int]:
    if starts is None:
        return {}
    problems = [f"starts names {path!r}, which is not a leaf" for path in starts if path not in leaves]
    problems += [
        f"starts[{path!r}] is {start!r}, must be an integer and not negative"
        for path, start in starts.items()
        if not (type(start) is int and start >= 0)
    ]
    raise_problems(problems)
    return starts


def _targets(
    out: Params | None, leaves: Mapping[str, Tensor], *others: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], bool]:
    """The leaves of out, and whether the operations write into them; leaves and others are what they read."""
    if out is None:
        return {}, False
    refuse_donation("out", True)
    targets = tree.flatten(out)
    tree.check_same(leaves, "the result", out=targets)
    in_place = _in_place(targets, leaves, *others)
    if not in_place:
        tree.check_apart(targets)
        raise_problems(
            [
                f"parameter {path!r} of out is {tree.dtype_name(to)} on {to.device}, which cannot hold a result: "
                "give a floating-point tensor with memory"
                for path, to in targets.items()
                if not to.is_floating_point() or (to.is_meta and not leaves[path].is_meta)
            ]
        )
    return targets, in_place


def check_devices(leaves: Mapping[str, Tensor], origins: Mapping[str, Tensor]) -> None:
    """Raises: ValueError that lists leaves of the base that are elsewhere than those of params, or on no device."""
    if problems := [
        f"leaf {path!r} of base is on {origins[path].device}, that of params on {leaf.device}: move one of them"
        for path, leaf in leaves.items()
        if origins[path].device != leaf.device
    ]:
        raise_problems(shortened(problems, "{} more leaves of base are elsewhere"))


def _in_place(targets: Mapping[str, Tensor], leaves: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> bool:
    """Whether the operations may write into the targets: as the leaves are, and no leaf written over another."""
    trees = [[own[path] for path in targets] for own in (targets, leaves, *others)]
    if torch.compiler.is_compiling() or not all(
        type(leaf) in tree.PLAIN and leaf.is_contiguous() for own in trees for leaf in own
    ):
        return False
    if any((to.dtype, to.device) != (leaf.dtype, leaf.device) for to, leaf in zip(*trees[:2], strict=True)):
        return False
    # addresses alone, for all leaves at once: this is asked at every step
    starts = numpy.array([[leaf.data_ptr() for leaf in own] for own in trees])
    stops = starts + numpy.array([[0 if leaf.is_meta else leaf.nbytes for leaf in own] for own in trees])
    order = starts[0].argsort()
    written, ends = starts[0][order], stops[0][order]
    if not order.size or (written[1:] < ends[:-1]).any():
        return False
    # its own memory is written as it is read; else, of the leaves written, the last that begins below its end decides
    others_own = (starts[1:] != starts[0]) | (stops[1:] != stops[0])
    before = numpy.searchsorted(written, stops[1:]) - 1
    return not (others_own & (before >= 0) & (ends[before] > starts[1:])).any()


def _result(like: Params, values: Mapping[str, Tensor], out: Params | None, targets: Mapping[str, Tensor]) -> Params:
    if out is None:
        return tree.unflatten(like, values)
    with torch.no_grad():
        for path, value in values.items():
            targets[path].copy_(value)
    return out
