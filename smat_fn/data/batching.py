"""Batches by random access: which examples a step sees is a function of the key and the step number."""

from functools import lru_cache
from itertools import pairwise

import numpy
import torch
from torch import Tensor

from .. import random, tree
from ..errors import count_problem, raise_problems
from ..types import Batch, Micro


def permutation(key: Tensor, size: int) -> Tensor:
    """A random order of ``size`` items, the same on every device.

    The positions sorted by a 24-bit random word each, equal words by position.

    Args: key: int64 (2,).
    Returns: int64 (size,) on the key's device.
    """
    words = (random.uniform(key, (size,), dtype=torch.float64) * 2**24).to(torch.int64)
    return ((words << 32) | torch.arange(size, device=key.device)).argsort()


def batch_indices(key: Tensor, size: int, batch_size: int, step: int) -> Tensor:
    """The examples of one step: epochs of fresh permutations, cut into batches, the last partial batch kept.

    Step s is batch ``s % n`` of epoch ``s // n``, n = ceil(size / batch_size); epoch e is
    ``permutation(fold_in(key, f"epoch:{e}"), size)``, so that a run key can serve draws and batches alike.

    Args: key: int64 (2,); step: counted from 0.
    Returns: int64 (batch_size,), or fewer in the last batch of an epoch, on the CPU.
    Raises: ValueError for a size or batch_size below 1 and a negative step.
    """
    sizes = {"size": size, "batch_size": batch_size}
    problems = [f"{name} is {n}, must be at least 1" for name, n in sizes.items() if n < 1]
    problems += [f"step is {step}, must not be negative"] if step < 0 else []
    raise_problems(problems, "batch_indices")
    epoch, batch = divmod(step, -(-size // batch_size))
    order = _epoch(tuple(key.tolist()), size, epoch)
    return torch.from_numpy(order[batch * batch_size : (batch + 1) * batch_size].copy())


@lru_cache(maxsize=32)  # an order costs as much as a fifth of a small training step
def _epoch(key: tuple[int, int], size: int, epoch: int) -> numpy.ndarray:
    # plain memory: a tensor would belong to the mode or transform that was there first
    order = permutation(random.fold_in(torch.tensor(key, device="cpu"), f"epoch:{epoch}"), size)
    return numpy.array(order.tolist())


def split_rows(batch: Batch, parts: int) -> list[Micro]:
    """A batch cut along the first dimension of its tensors into at most ``parts`` micro-batches of equal size.

    Sizes differ by one at most where they must; the weight of a micro-batch is its number of rows.

    Args: batch: a mapping, tuple or NamedTuple of tensors, or one tensor; parts: at least 1.
    Raises: ValueError for tensors of different lengths, or without rows, and fewer than one part.
    """
    raise_problems(count_problem("parts", parts), "split_rows")
    leaves = {"": batch} if isinstance(batch, Tensor) else tree.flatten(batch)
    if scalars := [path for path, leaf in leaves.items() if not leaf.ndim]:
        raise ValueError(
            f"the batch has no rows in {', '.join(map(repr, scalars))}, 0-d: give every tensor the same rows"
        )
    lengths = {path: len(leaf) for path, leaf in leaves.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the batch has tensors of lengths {lengths}: to be split they need the same rows")
    rows = next(iter(lengths.values()))
    bounds = [rows * part // parts for part in range(parts + 1)]
    cuts = [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]
    if isinstance(batch, Tensor):
        return [Micro(batch[cut], cut.stop - cut.start) for cut in cuts]
    return [Micro(tree.tree_map(lambda leaf: leaf[cut], batch), cut.stop - cut.start) for cut in cuts]  # noqa: B023
