"""A method on all weights or on adapters, in one process or several."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ... import lora, mat, parallel, tree
from ...config import MethodConfig, Smat, Training, settings
from ...errors import some_of
from ...grad import ModuleLoss
from ...lora import Lora
from ...parallel import ALONE, World
from ...types import LossFn, Method, Offload, Optimizer, Params, Predicate, Where
from .settings import Place

CXX = "g++", "clang++"


def sigma_is_auto(method: MethodConfig) -> TypeGuard[Smat]:
    """Whether SMAT's sigma is to be found (`noise_level.with_sigma`)."""
    return isinstance(method, Smat) and method.sigma == "auto"


def without_auto(method: MethodConfig) -> MethodConfig:
    """The method with a number in place of "auto", to check everything else."""
    return replace(method, sigma=0.0) if sigma_is_auto(method) else method


def offload_of(
    method: MethodConfig, training: Training, place: Place, base: Mapping[str, Tensor] | None = None
) -> Offload | None:
    """The offload mode of SMAT's build, None for other methods; ``base`` says what "auto" means, without it None."""
    if method.name != "smat" or place == "device" or (training.shard and place == "auto"):
        return None
    if place != "auto":
        return place
    own = settings(method)
    whole = training.lora is None and not training.independent_draws and "sigma_of" not in own
    on_gpu = bool(base) and all(leaf.is_cuda for leaf in (base or {}).values())
    # without clean steps every copy of the base would be waited for
    return "cpu" if whole and on_gpu and "lam" not in own and own.get("period") != 1 else None


def adapters_of(loss_fn: LossFn, training: Training) -> Lora | None:
    """The adapters that a training asks for. Raises: ValueError for numbers and targets that fit no layer."""
    if training.lora is None:
        return None
    assert isinstance(loss_fn, ModuleLoss), "a suite's losses are of modules"
    paths, transposed = lora.linear_paths(loss_fn.module, training.lora.targets)
    frozen = {path for path, leaf in loss_fn.module.named_parameters() if not leaf.requires_grad}
    if training.lora.targets and (outside := sorted(frozen.intersection(paths))):
        raise ValueError(f"targets of adapters are frozen by train or train_layers: {some_of(outside)}")
    if not (trained := tuple(path for path in paths if path not in frozen)):
        why = "all are frozen by train or train_layers, leave that out" if paths else "the model has none"
        raise ValueError(f"adapters are for linear layers in blocks: {why}, or leave out `lora_rank`")
    saved = lora.whole_paths(loss_fn.module, training.lora.save, trained)
    given = {"transposed": transposed, "saved": saved, "dropout": training.lora.dropout}
    return Lora(trained, training.lora.rank, training.lora.alpha, **given)  # type: ignore[arg-type]


def whole_weights(params: Params, base: Params, adapters: Lora | None) -> Params:
    """All weights of a trained expert, in the dtypes of base."""
    return params if adapters is None else {**base, **lora.expand(params, base, adapters)}


def training_settings(training: Training, world: World = ALONE) -> dict[str, Any]:
    """The settings of a training as JSON values, without those that are off.

    The number of processes is one where draws depend on it; elsewhere steps depend on it by rounding alone.
    """
    left_out = (
        "epochs", "lora", "independent_draws", "warmup", "decay_matrices", "average", "dropout", "dev", "compiled",
        "shard",
    )  # fmt: skip
    values = asdict(training)
    if training.lora is not None:
        values["lora"] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values["lora"].items()
            if name not in ("dropout", "save") or value
        }
    found = {name: value for name, value in values.items() if name not in left_out or value}
    own = training.independent_draws or training.dropout or (training.lora is not None and training.lora.dropout)
    return {**found, "processes": world.size} if own and world.size > 1 else found


def problems(method: MethodConfig, training: Training, world: World, place: Place = "auto") -> list[str]:
    """Errors for options that exclude each other, and for a method on adapters or with several processes."""
    found, own, offload = [], settings(method), offload_of(method, training, place)
    if own.keys() >= {"lam", "period"}:
        found.append(f"lam {own['lam']} replaces the period: leave out --lam or --period {own['period']}")
    if "rho" in own and own.get("climb") is None and method.name == "smat":
        found.append(f"rho {own['rho']} is the length of a climb, and there is none: give --climb, or leave out --rho")
    if training.lora is not None:
        found += [f"lora rank is {training.lora.rank}, must be at least 1"] if training.lora.rank < 1 else []
        dropout = training.lora.dropout
        found += [] if 0 <= dropout < 1 else [f"lora dropout is {dropout}, must lie in [0, 1)"]
        alpha = training.lora.alpha  # not given, it is twice the rank, whatever that is
        found += [] if alpha > 0 or alpha == 2 * training.lora.rank else [f"lora alpha is {alpha}, must be positive"]
    alone = "independent draws" if training.independent_draws else ""
    alone = "adapters at the merged weight" if training.lora and training.lora.simulate == "merged" else alone
    if alone and method.name == "smat":
        found += [
            f"`{n}={own[n]!r}` is not supported with {alone}: leave it out" for n in ("lam", "sigma_of") if n in own
        ]
        found += [f"`offload={offload!r}` is not supported with {alone}: leave it out"] if offload else []
    if sigma_is_auto(method) and "sigma_of" in own:
        found.append(f"sigma auto is in units of the weights: leave out sigma_of {own['sigma_of']}, or give a number")
    if sigma_is_auto(method) and training.lora is not None and training.lora.simulate == "factors":
        found.append("sigma auto is in units of the weights, not of the factors of adapters: give a number")
    if training.lora is not None and offload and not alone:
        found.append(f"`offload={offload!r}` is not supported with adapters: leave it out")
    if world.size > 1 and offload in ("recompute", "stream"):
        found.append(f"`offload={offload!r}` is not supported with several processes: leave it out")
    found += _shard_problems(method, training, world, place) if training.shard else []
    found += _compile_problems(training, offload) if training.compiled else []
    if training.independent_draws:
        if method.name != "smat" or training.lora is not None:
            found.append("independent draws require the method smat without adapters: leave them out")
        if world.size == 1:
            found.append("independent draws need several processes: start with torchrun")
    return found


def _shard_problems(method: MethodConfig, training: Training, world: World, place: Place) -> list[str]:
    found = ["`shard` needs several processes: start with torchrun"] if world.size == 1 else []
    if training.lora is None and mat.build_of(method) not in parallel.SHARDED:
        found.append(f"`shard` is not supported with {method.name}, which looks at whole parameters: leave it out")
    others = {
        "`compile`": training.compiled,
        "independent draws": training.independent_draws,
        f"`offload={place!r}`": place not in ("auto", "device"),
    }
    names = [name for name, chosen in others.items() if chosen]
    return found + [f"`shard` is not supported with {name}: leave one of them out" for name in names]


def _compile_problems(training: Training, offload: Offload | None) -> list[str]:
    found = []
    if not torch.cuda.is_available() and not any(shutil.which(name) for name in (os.environ.get("CXX"), *CXX) if name):
        found.append(f"`compile` needs a C++ compiler on the CPU, and none of {', '.join(CXX)} is there: install one")
    # layers whose hooks are new in every step would be compiled in every step
    others = {"adapters": training.lora is not None, f"`offload={offload!r}`": offload in ("recompute", "stream")}
    names = [name for name, chosen in {**others, "dropout": training.dropout}.items() if chosen]
    return found + [f"`compile` is not supported with {name}: leave one of them out" for name in names]


def arrange(
    method: MethodConfig,
    training: Training,
    optimizer: Optimizer,
    loss_fn: LossFn,
    base: Params,
    start: Params,
    adapters: Lora | None,
    where: Where,
    world: World,
    offload: Offload | None,
) -> Method:
    """The method on what is trained: ``start``, all weights or adapters; it donates its state's buffers."""
    shared = parallel.replicated if world.size > 1 else lambda loss_fn: loss_fn
    options: dict[str, Any] = {"max_grad_norm": training.max_grad_norm, "donate": True, **settings(method)}
    if training.independent_draws:
        return parallel.independent_smat(loss_fn, optimizer, base, where=where, **options)
    build = mat.build_of(method)
    if adapters is None:
        more = {"offload": offload} if offload else {}
        return build(shared(loss_fn), optimizer, base, where=where, **options, **more)
    full = tree.flatten(base)
    if method.name == "smat" and training.lora is not None and training.lora.simulate == "merged":
        return lora.build(loss_fn, optimizer, full, adapters, where=where, around=shared, **options)
    masked = masked_beside(adapters, where)
    return build(shared(lora.with_lora(loss_fn, full, adapters)), optimizer, start, where=masked, **options)


def masked_beside(adapters: Lora, where: Where | None) -> Predicate:
    """A and B, and of what is trained whole beside them the leaves that ``where`` picks without adapters."""
    picks, saved = tree.predicate(where), frozenset(adapters.saved)
    return lambda path, leaf: path not in saved or picks is None or picks(path, leaf)
