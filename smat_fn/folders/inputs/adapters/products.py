"""The change of a weight that an adapter's tensors make, some rows at a time: LoRA, also with a core, LoHa and LoKr.

In the names of LyCORIS, which PEFT has too; the weight of a convolution (out, in, k, k) is a matrix (out, in k k):

- LoRA: B A; with a core T (``lora_mid``) a convolution B, then T, then A.
- LoHa: (W1a W1b) (.) (W2a W2b), elementwise.
- LoKr: the Kronecker product of W1 and W2, each of them whole or a product of two factors.

A factor of LoHa and LoKr with a core, T (r, r, k, k), A (r, out) and B (r, in), is sum_ij T_ij A_i B_j.

Source: LyCORIS (Yeh et al., 2024), section 3.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

CORE = "mid"  # of LoRA
_HADA = tuple(f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"))
_LOKR = tuple(f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"))
ENDS = {".lora_mid.weight": CORE, **{f".{part}": part for part in (*_HADA, *_LOKR)}}  # names in files -> parts
Rows = Callable[[int, int], Tensor]  # (start, stop) -> float32 (stop - start, columns)


def is_plain(parts: Collection[str]) -> bool:
    """Whether they are A and B of a plain LoRA, or one of them."""
    return {*parts} <= {"A", "B"}


def is_complete(parts: Collection[str]) -> bool:
    """Whether they are all tensors of one product."""
    own = {*parts}
    if not own.isdisjoint(_LOKR):
        return own <= {*_LOKR} and all(_is_factor(own, "lokr", n) for n in (1, 2))
    if not own.isdisjoint(_HADA):
        return own <= {*_HADA} and all(_is_factor(own, "hada", n) for n in (1, 2))
    return {"A", "B"} <= own <= {"A", "B", CORE}


def _is_factor(parts: set[str], kind: str, number: int) -> bool:
    whole, halves, core = f"{kind}_w{number}", {f"{kind}_w{number}_a", f"{kind}_w{number}_b"}, f"{kind}_t{number}"
    if whole in parts:
        return parts.isdisjoint({*halves, core})
    return halves <= parts


def rank(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The rank of the factors that the scale is divided by; None where all of them are whole matrices."""
    if "A" in shapes:
        return shapes["A"][0]
    halves = "hada_w1_b", "lokr_w2_b", "lokr_w1_b"
    return next((shapes[name][0] for name in halves if shapes.get(name)), None)


def matrix(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """(rows, columns) of the change that tensors of these shapes make; None where they do not fit each other."""
    try:
        columns = rows_of({part: torch.empty(shape, device="meta") for part, shape in shapes.items()})(0, 1).shape[1]
    except (RuntimeError, IndexError):
        return None
    if "A" in shapes:
        return shapes["B"][0], columns
    if "hada_w1_a" in shapes:
        return shapes["hada_w1_a"]["hada_t1" in shapes], columns
    return _height(shapes, 1) * _height(shapes, 2), columns


def _height(shapes: Mapping[str, tuple[int, ...]], number: int) -> int:
    whole = shapes.get(f"lokr_w{number}")
    return whole[0] if whole else shapes[f"lokr_w{number}_a"][f"lokr_t{number}" in shapes]


def rows_of(parts: Mapping[str, Tensor], *, transposed: bool = False) -> Rows:
    """A function of the first row and the one after the last: these rows of the change, unscaled.

    Args: parts: all tensors of one product; transposed: of a plain LoRA, rows of (B A)ᵀ.
    """
    if is_plain(parts):
        a, b = parts["A"].flatten(1), parts["B"].flatten(1)
        left, right = (a.T, b.T) if transposed else (b, a)
        return partial(_product, left, right.float().contiguous())
    wide = {part: tensor.float() for part, tensor in parts.items()}
    if CORE in parts:
        core = torch.einsum("rskl,si->rikl", wide[CORE], wide["A"].flatten(1)).flatten(1)
        return partial(_product, wide["B"].flatten(1), core)
    if "hada_w1_a" in parts:
        one, two = (_factor(wide, number) for number in (1, 2))
        return lambda start, stop: one(start, stop) * two(start, stop)
    small, large = (_whole(wide, number) for number in (1, 2))
    return partial(_kronecker, small, large)


def _product(left: Tensor, right: Tensor, start: int, stop: int) -> Tensor:
    return left[start:stop].float().contiguous() @ right


def _factor(wide: Mapping[str, Tensor], number: int) -> Rows:
    """Rows of one of the two products of LoHa."""
    a, b, core = (wide.get(f"hada_{part}") for part in (f"w{number}_a", f"w{number}_b", f"t{number}"))
    assert a is not None, "`is_complete`"
    assert b is not None, "`is_complete`"
    if core is None:
        return partial(_product, a, b.flatten(1))
    right = torch.einsum("ijkl,jr->irkl", core, b).flatten(1)
    return partial(_product, a.T, right)


def _whole(wide: Mapping[str, Tensor], number: int) -> Tensor:
    """A factor of LoKr: (rows, columns), or with a core (rows, columns, k, k)."""
    if (whole := wide.get(f"lokr_w{number}")) is not None:
        return whole
    a, b, core = (wide.get(f"lokr_{part}") for part in (f"w{number}_a", f"w{number}_b", f"t{number}"))
    assert a is not None, "`is_complete`"
    assert b is not None, "`is_complete`"
    return a @ b if core is None else torch.einsum("ijkl,ip,jr->prkl", core, a, b)


def _kronecker(small: Tensor, large: Tensor, start: int, stop: int) -> Tensor:
    height, size = len(large), (1,) * (large.ndim - 2)
    places = torch.arange(start, min(stop, len(small) * height), device=small.device)
    left, right = small[places // height], large[places % height]
    return (left.view(len(places), -1, 1, *size) * right[:, None]).flatten(1)
