"""The trained parameters of a module, and what must not happen to it while its weights are replaced."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from .. import errors, tree

_WITHIN = "_orig_mod", "_forward_module"  # what torch.compile and Lightning Fabric wrap


def bare(module: nn.Module) -> nn.Module:
    """The module without wrappers that put a prefix before its parameters' names, on which draws depend."""
    while True:
        if inner := [own for name in _WITHIN if isinstance(own := getattr(module, name, None), nn.Module)]:
            module = inner[0]
        elif isinstance(module, nn.DataParallel | DistributedDataParallel):
            module = module.module
        else:
            return module


def leaves_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, without the parts of wrappers around blocks; tied ones once."""
    found: Any = tree.flatten_unwrapped({name: p for name, p in bare(module).named_parameters() if p.requires_grad})
    return found


def weight_problems(parameters: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> list[str]:
    """Errors for weights that cannot be replaced."""
    if wrong := [
        f"{name} is a {type(given).__name__}, must be a dict of tensors by name"
        for name, given in (("parameters", parameters), ("base", base))
        if not hasattr(given, "items")
    ]:
        return wrong
    problems = []
    held = {path: p.data_ptr() for path, p in parameters.items() if path in base and type(p) in tree.PLAIN}
    if same := [path for path, place in held.items() if place and place == base[path].data_ptr()]:
        problems.append(
            f"base shares memory with the parameters ({errors.some_of(same)}), so that theta_0 "
            "would follow theta: give copies, {name: p.detach().clone() for name, p in module.named_parameters()}"
        )
    problems += errors.shortened(
        [
            f"parameters {first!r} and {second!r} share memory, which theta~ would separate: give a tied weight once"
            for first, second in tree.sharing(parameters)
        ],
        "{} more share memory",
    )
    if frozen := [path for path, p in parameters.items() if isinstance(p, nn.Parameter) and not p.requires_grad]:
        problems.append(
            f"parameters are frozen ({errors.some_of(frozen)}), and Perturb would add noise to them: "
            "give those with requires_grad"
        )
    problems += [*tree.device_problems(parameters), *fsdp1_problems(parameters)]
    if sharded := [path for path, p in parameters.items() if hasattr(p, "to_local")]:
        problems.append(f"parameters are DTensors ({errors.some_of(sharded)}): use smat_fn.parallel.simulated_shards")
    return problems


def fsdp1_problems(parameters: Mapping[str, Tensor]) -> list[str]:
    """Errors for parameters of FSDP1, which copies what their storage is switched to into its flat parameter."""
    owned = [path for path, p in parameters.items() if hasattr(p, "_fsdp_flattened") or hasattr(p, "_is_flat_param")]
    return [
        f"FSDP1 owns the storage of {errors.some_of(owned)}: shard by FSDP2 (torch.distributed.fsdp.fully_shard), and "
        "simulate by smat_fn.parallel.simulated_shards"
    ] * bool(owned)


def changes(before: Mapping[str, Tensor], now: Mapping[str, Tensor], since: str) -> list[str]:
    """Errors for trainable parameters that are not those of before."""
    problems = [f"parameter {path!r} is trained now, and was not {since}" for path in now if path not in before]
    problems += [f"parameter {path!r} was trained {since}, and is not now" for path in before if path not in now]
    for path, p in before.items():
        other = now.get(path)
        if other is not None and (p.shape != other.shape or (isinstance(p, nn.Parameter) and p is not other)):
            problems.append(f"parameter {path!r} is another tensor than {since}")
    return errors.shortened(problems, f"{{}} more trainable parameters are not those {since}")


def norms_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The batch norms that move running statistics in train mode, by name."""
    norms = ((name, own) for name, own in module.named_modules() if isinstance(own, _NormBase))
    return [(name, own) for name, own in norms if own.running_mean is not None and (own.momentum != 0 or _is_own(own))]


def _is_own(norm: nn.Module) -> bool:
    """Whether a norm's class is not torch's, so that its forward pass may not heed momentum."""
    return not type(norm).__module__.startswith("torch.")


@contextmanager
def still(norms: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """Hold the running statistics of batch norms (`norms_of`): inside the block their momentum is 0.

    A norm whose momentum is None averages over the batches that it has counted: its count is restored. So are the
    statistics of classes that are not torch's, which may write them all the same.
    """
    before: list[tuple[Any, Any, Any]] = [(own, own.momentum, own.num_batches_tracked) for _, own in norms]
    kept = [(count, count.clone()) for _, momentum, count in before if momentum is None and count is not None]
    states = [(norm._buffers, dict(norm._buffers)) for norm, _, _ in before if _is_own(norm)]
    kept += [(own, own.clone()) for _, buffers in states for own in buffers.values() if own is not None]
    try:
        for norm, _, _ in before:
            norm.momentum = 0.0
        yield
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
        for now, buffers in states:
            now.update(buffers)  # a forward pass may have put others in their place
        for own, value in kept:
            own.copy_(value)


def embedding_problems(module: nn.Module) -> list[str]:
    """Errors for embeddings whose gradients are sparse, or that clip their rows in the forward pass."""
    found = [
        (name, own)
        for name, own in bare(module).named_modules()
        if isinstance(own, nn.Embedding | nn.EmbeddingBag) and own.weight.requires_grad
    ]
    return [
        f"{name!r} gives sparse gradients, which cannot be reweighted: make the {type(own).__name__} with sparse=False"
        for name, own in found
        if own.sparse
    ] + [
        f"{name!r} writes to its weight in the forward pass, which would be at theta~: set its max_norm to None"
        for name, own in found
        if own.max_norm is not None
    ]
