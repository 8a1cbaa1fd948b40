"""Checks of a trainer, its model and theta_0 for `attach`, and the line that describes the simulated steps."""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import errors, tree
from ..grad import trained
from ..mat.ascent import Ascent
from ..mat.smat import Schedule, is_simulated
from ..parallel.shards import local, rows_of, shard_problems, sharded, starts_in, total_of
from ..parallel.world import World
from ..simulation.relative import beside_update, update_rms
from ..types import Predicate
from ..where import masked_text

_T = TypeVar("_T")
_OWN_LOOPS = "PPOTrainer", "OnlineDPOTrainer", "NashMDTrainer", "XPOTrainer"  # TRL: no training_step or compute_loss
_INSIDE_BACKWARD = "LayerWiseDummyOptimizer", "Lomo", "AdaLomo"
_SAMPLED = 64  # values of a parameter by which another theta_0 is recognised
# in records that lack them
_BEFORE = {"alpha_max": 1.0, "factors": {}, "antithetic": False, "climb": None, "rho": None}
_NAMES = {"masked": "hash of the masked parameters", "theta_0": "hash of theta_0"}  # in errors


def key_problems(key: Any) -> list[str]:
    """The error for what is not one run key."""
    if isinstance(key, Tensor) and key.dtype == torch.int64 and tuple(key.shape) == (2,):
        return []
    return [f"key is {key!r}, must be one key: key=smat_fn.random.key({key if type(key) is int else 0})"]


def record(
    key: Tensor,
    schedule: Schedule,
    climbs: Ascent | None,
    base: Mapping[str, Tensor],
    where: Predicate,
    samples: Mapping[str, bytes],
) -> dict[str, Any]:
    """JSON values that a run must share to resume from a checkpoint. Args: samples: of base, as `samples_of`."""
    masked = hashlib.blake2b(digest_size=8)
    for path, leaf in sorted(base.items()):
        masked.update(f"{path}:{bool(where(path, leaf))};".encode())
    # JSON cannot hold numbers of numpy
    numbers = {name: float(getattr(schedule, name)) for name in ("alpha_min", "drop_prob", "sigma", "alpha_max")}
    factors = {path: float(factor) for path, factor in (schedule.factors or {}).items()}
    settings: dict[str, Any] = {"period": schedule.period, "noise": schedule.noise, "antithetic": schedule.antithetic}
    settings |= {**numbers, "factors": factors, "climb": None, "rho": None}
    settings |= {} if climbs is None else {"climb": climbs.climb, "rho": float(climbs.rho)}
    return {"key": key.tolist(), **settings, "masked": masked.hexdigest(), "theta_0": hash_of(samples)}


def of_all_processes(found: _T) -> list[_T]:
    """The values of the processes that train together, by rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [found]
    return World(dist.get_rank(), dist.get_world_size()).gather(found)


def process_problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors for processes with other settings or another theta_0: their simulated states would differ."""
    others = {
        name: rank for rank, own in reversed(list(enumerate(records))) for name in own if own[name] != records[0][name]
    }
    found = [
        f"{_NAMES.get(name, name)} is {records[0][name]} in process 0, and {records[rank][name]} in process {rank}"
        for name, rank in others.items()
    ]
    if "theta_0" in others:
        found.append(
            "theta_0 is base, or without it a copy of each process's own weights at attach: call transformers.set_seed "
            "before the model, its adapters or heads are made, or give the same whole base= in all processes"
        )
    if others.keys() - {"theta_0"}:
        found.append("attach with the same arguments in all processes")
    return found


def samples_of(base: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Some values of every parameter, whatever its dtype and shards, by which other weights are recognised."""
    bits = {path: _sample(leaf) for path, leaf in base.items()}
    parts = {path: leaf for path, leaf in base.items() if hasattr(leaf, "to_local")}
    if parts:  # one process has a value, the others 0
        summed = total_of(parts)(torch.cat([bits[path] for path in parts]))
        bits |= zip(parts, summed.split([bits[path].numel() for path in parts]), strict=True)
    return {path: bytes(own.cpu().numpy().tobytes()) for path, own in bits.items()}


@torch.no_grad()
def _sample(leaf: Tensor) -> Tensor:
    """The bits of float64 values at places of the whole leaf, 0 at those that this process does not hold."""
    own = local(leaf).flatten()
    count, start = min(leaf.numel(), _SAMPLED), starts_in({"": leaf})[""]
    places = torch.arange(count, device=own.device) * leaf.numel() // max(count, 1) - start
    inside = (places >= 0) & (places < own.numel())
    bits = torch.zeros(count, dtype=torch.int64, device=own.device)
    bits[inside] = own[places[inside]].double().view(torch.int64)
    return bits


def hash_of(samples: Mapping[str, bytes]) -> str:
    """A hash of the samples of all parameters."""
    hashed = hashlib.blake2b(digest_size=8)
    for path, values in sorted(samples.items()):
        hashed.update(path.encode() + values)
    return hashed.hexdigest()


def resume_problems(stored: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Errors for a checkpoint of a run with other settings or another theta_0; None: it was not SMAT's."""
    if stored is None:
        return []
    before = {name: stored.get(name, _BEFORE.get(name, value)) for name, value in now.items()}
    found = [
        f"{_NAMES.get(name, name)} was {before[name]} when the checkpoint was saved, is {value}"
        for name, value in now.items()
        if name != "factors" and before[name] != value
    ]
    old, new = (own.get("factors", {}) for own in (before, now))
    pairs = {path: (old.get(path, 1.0), new.get(path, 1.0)) for path in {**old, **new}}
    if unlike := [f"{path} was {one}, is {other}" for path, (one, other) in pairs.items() if one != other]:
        found.append(f"factors of alpha differ from those when the checkpoint was saved: {errors.some_of(unlike)}")
    if found and stored.get("theta_0") != now["theta_0"]:
        found.append(
            "theta_0 is a copy of the weights at attach: build the model as before, from the same pretrained weights "
            "and not from a checkpoint (call transformers.set_seed before adapters or heads are made), or give base="
        )
    if found:
        found.append(
            "attach with the same arguments; to resume with others from here on, delete 'smat_fn' in the "
            "checkpoint's trainer_state.json"
        )
    return found


def start_problems(base: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> list[str]:
    """The error for weights before the first step that are not theta_0, the copy of them that attach made."""
    pairs = {path: (local(p).detach(), rows_of(p, base[path])) for path, p in leaves.items()}
    changed = [path for path, (p, own) in pairs.items() if not _equal(p, own.to(p.device, p.dtype))]
    if sharded(leaves):  # the same in all processes, which would wait for one that stops
        found = set[str]().union(*of_all_processes(changed))
        changed = [path for path in leaves if path in found]
    if not changed:
        return []
    return [
        f"{len(changed)} of {len(leaves)} parameters ({errors.some_of(changed)}) have changed "
        "between attach, which copied them as theta_0, and the first step: load the pretrained weights before attach "
        "(now: handle.detach(), then attach again), or give base= if the training starts from others"
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def model_problems(trainer: Any) -> list[str]:
    """Errors for what is not a trainer (a model, arguments), and for one without a model."""
    if not all(callable(getattr(trainer, name, None)) for name in ("training_step", "compute_loss", "add_callback")):
        kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}".removeprefix("builtins.")
        return [f"trainer is a {kind}: give the transformers.Trainer (or TRL's) of the model"]
    model: Any = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        return [f"the trainer's model is {model!r}: attach needs a trainer with its model in place"]
    return []


def trained_problems(trainer: Any, origin: Mapping[str, Tensor], known: Mapping[Tensor, bytes]) -> list[str]:
    """The error for a copy of weights that this trainer, or another one, has trained already.

    Args: origin: the weights of now; known: samples of theta_0 by the parameters that were trained with SMAT from it.
    """
    if (steps := trainer.state.global_step) and trainer.model_init is None:  # which makes new ones
        return [
            f"the trainer has trained for {steps} steps, so that its weights are no longer the pretrained ones: "
            "attach before train(), or give base="
        ]
    samples = samples_of({path: p for path, p in origin.items() if p in known and not p.is_meta})
    changed = [path for path, p in origin.items() if p in known and (p.is_meta or known[p] != samples[path])]
    if not changed:
        return []
    return [
        f"{errors.some_of(changed)}: trained with SMAT by another trainer before, and not the "
        "weights any more that this began from: load these, or build the model again (as where a notebook's cell makes "
        "the trainer again), or give base="
    ]


def never(schedule: Schedule, start: int, stop: int) -> str:
    """The warning for a training without a simulated step, an empty text otherwise."""
    steps = range(start, min(stop, start + schedule.period))
    if schedule.off or any(is_simulated(step, schedule.period) for step in steps):
        return ""
    return f"SMAT: no step is simulated, period is {schedule.period} and training ends after step {stop}: lower period"


def beside(trainer: Any, leaves: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The parameters that the optimizer trains beside the model's, as those of a loss."""
    groups = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "param_groups", None) or []
    held = {id(p): p for group in groups for p in group["params"] if p.requires_grad}
    own = {id(leaf) for leaf in leaves.values()}
    found = [p for key, p in held.items() if key not in own]
    return [] if len(found) == len(held) else found  # an optimizer that has none of the model's may work on copies


def others(trainer: Any, leaves: Mapping[str, nn.Parameter]) -> str:
    """The warning for parameters that the optimizer trains beside the model's, an empty text otherwise."""
    found = beside(trainer, leaves)
    if not found:
        return ""
    texts = errors.some_of(str(tuple(p.shape)) for p in found)
    return (
        f"SMAT: the optimizer also trains parameters that are not the model's, of shapes {texts}: they are neither "
        "simulated nor reweighted; make them parameters of the model if they are to be merged"
    )


def factors(leaves: Iterable[str], adapters: Mapping[str, Any] | None) -> str:
    """The warning for the factors of an adapter, an empty text without them.

    Args: adapters: PEFT's configurations by name; None: PEFT has not made the model.
    """
    given = (own.peft_type for own in (adapters or {}).values())
    if kinds := sorted({str(getattr(kind, "value", kind)) for kind in given} - {"LORA"}):
        return (
            f"SMAT: Scale, Mask and Perturb act on the parameters of the adapter ({', '.join(kinds)}) themselves, not "
            "on the weights that a merger sees"
        )
    if not any("lora_A" in path for path in leaves):
        return ""
    return (
        "SMAT: Scale, Mask and Perturb act on the adapter's A and B, whose product does not become what a merger makes "
        "of the merged weight W0 + BA; train.py simulates that with --lora-rank (docs/lora.md)"
    )


def noise_line(sigma: float, leaves: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> tuple[str, bool]:
    """Sigma beside the RMS of what was trained, and whether it is far from it; an empty text where nothing was."""
    squares = 0.0
    for path, p in leaves.items():
        own = local(p).detach()
        squares += float(update_rms({"": own}, {"": rows_of(p, base[path]).to(p.device)})) ** 2 * own.numel()
    squares = float(total_of(leaves)(torch.tensor(squares, dtype=torch.float64, device=_device_of(leaves))))
    update = (squares / max(1, sum(p.numel() for p in leaves.values()))) ** 0.5
    if not sigma or not update:
        return "", False
    line, far = beside_update(sigma, update)
    return f"SMAT: {line}" + (", far from 1: docs/own_model.md says how to choose it" if far else ""), far


def _device_of(leaves: Mapping[str, Tensor]) -> torch.device | None:
    return next((p.device for p in leaves.values()), None)


def gradient_problems(leaves: Mapping[str, nn.Parameter]) -> list[str]:
    """The error for gradients that are there before the first loss of an optimizer step."""
    if any(p.grad is not None and local(p.grad).any() for p in leaves.values()):
        return [
            "gradients were summed before the first compute_loss of an optimizer step, at theta: take all losses of a "
            "step in compute_loss (or after super().training_step), and attach between two steps"
        ]
    return []


def describe(schedule: Schedule, climbs: Ascent | None, leaves: Mapping[str, Tensor], where: Predicate) -> str:
    """One line: which steps, which operations, which parameters are masked, and which steps climb."""
    climbing = ""
    if climbs is not None:
        steps = "all steps climb" if climbs.climb == "both" else "clean steps climb"
        along = "their gradient, in two passes" if climbs.climb == "asam" else "the optimizer's momentum"
        climbing = f"; {steps} along {along}, rho {climbs.rho:g}"
    if schedule.off:
        return f"SMAT: Scale, Mask and Perturb are off, every step is clean{climbing}"
    every = "every step" if schedule.period == 1 else f"every step s with (s + 1) % {schedule.period} == 0"
    off = schedule.alpha_min == schedule.alpha_max == 1
    parts = ["Scale off" if off else f"Scale alpha from {schedule.alpha_min} to {schedule.alpha_max:g}"]
    if schedule.factors:
        scaled = f"a factor in {len(schedule.factors)} parameters"
        parts = [f"Scale only by {scaled}"] if off else [*parts, f"times {scaled}"]
    if schedule.drop_prob:
        masked = masked_text(where, leaves)
        parts.append(f"Mask removes coordinates with probability {schedule.drop_prob} in {masked}")
    else:
        parts.append("Mask off")
    parts.append(f"Perturb {schedule.noise} noise of RMS {schedule.sigma}" if schedule.sigma else "Perturb off")
    pairs = ", in antithetic pairs" if schedule.antithetic else ""
    return f"SMAT simulates {every}{pairs}: {'; '.join(parts)}{climbing}"


def class_problems(trainer: Any) -> list[str]:
    """Errors for trainers that are known to override the training loop."""
    known = [kind.__name__ for kind in type(trainer).__mro__ if kind.__name__ in _OWN_LOOPS]
    return [no_compute_loss(trainer)] if known else []


def no_compute_loss(trainer: Any) -> str:
    """The error for a training_step around which no weights can be switched."""
    return (
        f"the training step of {type(trainer).__name__} does not call compute_loss with gradients enabled, so that its "
        "loss cannot be taken at simulated states (a batch that is left out must leave no gradient): write the loop "
        "yourself, with smat_fn.mat.smat.build"
    )


def early_forward(trainer: Any) -> str:
    """The error for a forward pass whose loss would be taken at theta in a simulated step."""
    return (
        f"training_step of {type(trainer).__name__} runs the model with gradients before or without compute_loss, "
        "where the weights are not simulated: compute all that the loss takes from the trained model in compute_loss "
        "(before it, torch.no_grad() gives values at theta, without an error), or write the loop yourself, with "
        "smat_fn.mat.smat.build"
    )


def cast_problems(leaves: Mapping[str, Tensor], dtypes: Sequence[torch.dtype]) -> list[str]:
    """Errors for parameters that were converted since training began."""
    problems = [
        f"parameter {path!r} is {p.dtype}, and was {dtype} when training began"
        for (path, p), dtype in zip(leaves.items(), dtypes, strict=True)
        if p.dtype != dtype
    ]
    return errors.shortened(problems, "{} more parameters were converted")


def no_training_step(trainer: Any) -> str:
    """The error for an update whose gradient came from elsewhere."""
    return (
        f"{type(trainer).__name__} updates the weights without a complete training_step before, so that its steps are "
        "not SMAT: write the loop yourself, with smat_fn.mat.smat.build"
    )


def finished(trainer: Any, step: int) -> str:
    """The error for a gradient that is complete, and would be reweighted, or dropped, with what is added to it."""
    return (
        f"training_step of {type(trainer).__name__} begins again after the last micro-batch of step {step}, whose "
        "gradient is complete, and before the next step: call it once a micro-batch, and split a batch in a "
        "training_step of the class, around super().training_step"
    )


def changed_between(trainer: Any, step: int) -> str:
    """The error for gradients that a second pass would not have."""
    return (
        f"gradients were changed between two micro-batches of step {step} (by a callback, or by a backward pass around "
        f"training_step of {type(trainer).__name__}), which the second pass of climb 'asam' does not repeat: do it in "
        "compute_loss or in the class's training_step, or before the update, in on_pre_optimizer_step"
    )


def trainer_problems(trainer: Any, leaves: Mapping[str, nn.Parameter]) -> list[str]:
    """Errors for no parameters, weights that are not whole in this process, and updates inside the backward pass."""
    problems = [] if leaves else ["the trainer's model has no trainable parameter"]
    problems += errors.problems_of(tree.check_floating, leaves, "the trainer's model")
    problems += [*tree.device_problems(leaves), *trained.embedding_problems(trainer.model)]
    wrapped = [
        f"parameter {path!r} is a {type(p).__name__}, whose values are in other tensors: attach cannot switch it"
        for path, p in leaves.items()
        if is_traceable_wrapper_subclass(p) and not hasattr(p, "to_local")
    ]
    problems += errors.shortened(wrapped, "{} more parameters are such tensors")
    meta = [path for path, p in leaves.items() if p.is_meta]
    if meta and not shards_later(trainer):  # which gives each process its shards
        problems.append(
            "offloaded to host memory or disk by device_map, on the meta device here: "
            f"{errors.some_of(map(repr, meta))}: use a device_map of devices alone, or train fewer parameters"
        )
    problems += _overlaps(trainer.model, leaves)
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    made = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate's wrapper holds it
    inside = [f"optim={name!r}"] if made is None and (name.endswith("layerwise") or name in ("lomo", "adalomo")) else []
    if type(made).__name__ in _INSIDE_BACKWARD or hasattr(made, "fused_backward"):
        inside.append(type(made).__name__)
    problems += [
        f"{what} acts on gradients inside the backward pass, at theta~ and before they are reweighted: choose an "
        "optimizer that steps after it"
        for what in [*inside, *hooks_of(leaves)]
    ]
    if groups := getattr(made, "param_groups", None):
        held = {id(p) for group in groups for p in group["params"]}
        idle = [repr(path) for path, p in leaves.items() if id(p) not in held]
        if 0 < len(idle) < len(leaves):  # one that has none of them may work on copies
            problems.append(
                f"the optimizer does not have {len(idle)} of {len(leaves)} parameters that require a gradient "
                f"({errors.some_of(idle)}), and Perturb would add noise to them: freeze them "
                "(p.requires_grad_(False)) before attach, or give them to the optimizer"
            )
    return problems


def shards_later(trainer: Any) -> bool:
    """Whether accelerate shards the trainer's model by FSDP2, inside ``train()``."""
    plugin = getattr(getattr(getattr(trainer, "accelerator", None), "state", None), "fsdp_plugin", None)
    return bool(getattr(trainer, "is_fsdp_enabled", False)) and getattr(plugin, "fsdp_version", 1) == 2


def shard_problems_of(trainer: Any, leaves: Mapping[str, nn.Parameter], host: bool) -> list[str]:
    """Errors for weights that are, or will be, sharded otherwise than by FSDP2 alone, and for options without shards.

    Args: host: whether theta_0 is to be in host memory.
    """
    problems = [
        f"the trainer shards its weights by {name}: attach cannot switch them"
        for name in ("fsdp_xla", "deepspeed")
        if getattr(trainer, f"is_{name}_enabled", False)
    ]
    if getattr(trainer, "is_fsdp_enabled", False) and not shards_later(trainer):
        problems.append(
            "the trainer shards its weights by fsdp: attach can switch those of FSDP2, fsdp_config={'version': 2}"
        )
    problems += [*trained.fsdp1_problems(leaves), *shard_problems(leaves)]
    if host and (sharded(leaves) or shards_later(trainer)):
        problems.append("base is 'host', which shards do not support: leave base out")
    return problems


def no_shards(trainer: Any) -> str:
    """The error for a theta_0 that was to be copied from shards, and a checkpoint that was loaded before these were."""
    return (
        f"{type(trainer).__name__} did not shard its model by accelerate's FSDP2 before it called create_scheduler, so "
        "that the pretrained weights of this process are not known: give base="
    )


def hooks_of(leaves: Mapping[str, nn.Parameter]) -> list[str]:
    """The first hook on gradients that runs inside the backward pass, if there is one."""
    hooked = [path for path, p in leaves.items() if getattr(p, "_post_accumulate_grad_hooks", None)]
    return [f"the post-accumulate-grad hook of {hooked[0]!r}"] if hooked else []


def _overlaps(model: nn.Module, leaves: Mapping[str, nn.Parameter]) -> list[str]:
    """Errors for trained parameters that share memory with another tensor of the model."""
    trained = {id(p): path for path, p in leaves.items()}
    ranges = sorted(
        (str(own.device), *_range(own), place, trained.get(id(own), path), id(own) in trained)
        for place, (path, own) in enumerate(chain(model.named_parameters(), model.named_buffers()))
        if own.numel() and not own.is_meta and not is_traceable_wrapper_subclass(own) and own.layout == torch.strided
    )
    problems = list[str]()
    for one, two in pairwise(ranges):
        (device, _, end, *first), (where, start, _, *second) = one, two
        (_, name, simulated), (_, other, too) = sorted((first, second))  # in the model's order
        if device != where or start >= end or not (simulated or too):
            continue
        if simulated and too:
            problems.append(
                f"parameters {name!r} and {other!r} share memory, which theta~ would separate: tie them as one "
                "nn.Parameter in both modules, or clone one of them"
            )
            continue
        name, other = (name, other) if simulated else (other, name)
        problems.append(
            f"parameter {name!r} shares memory with {other!r}, which is not trained and would stay at theta in a "
            "simulated step: tie them as one nn.Parameter in both modules, or clone one of them"
        )
    return errors.shortened(problems, "{} more share memory")


def _range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's coordinates, from the first to behind the last one; with gaps, of the first alone."""
    size = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (size if size == tensor.numel() else 1) * tensor.itemsize


def base_problems(base: Mapping[str, Tensor], model: nn.Module, leaves: Mapping[str, Tensor]) -> list[str]:
    """Errors for a theta_0 of other names or shapes, and for one that would follow the training."""
    problems = errors.problems_of(tree.check_same, leaves, "the trainer's model", base=base)
    if set(base) - set(leaves):
        problems.append(
            "base holds the trained parameters alone, tied ones once: {name: p.detach().clone() for name, p in "
            "pretrained.named_parameters() if p.requires_grad}"
        )
    problems += errors.problems_of(tree.check_floating, base, "base")
    unlike = [
        f"base has a shard of {path!r} that is placed otherwise than the parameter: give the whole tensor"
        for path, leaf in base.items()
        if hasattr(leaf, "to_local") and path in leaves and not _placed_alike(leaf, leaves[path])
    ]
    problems += errors.shortened(unlike, "{} more shards of base are")
    live = sorted(_extent(p) for p in model.parameters())
    shared = []
    for path, leaf in base.items():
        device, start, stop = _extent(leaf)
        at = bisect_left(live, (device, stop)) - 1
        if start and at >= 0 and live[at][0] == device and live[at][2] > start:
            shared.append(path)
    if shared:
        problems.append(
            f"base shares memory with the model ({errors.and_more(map(repr, shared), 3)}), so that theta_0 "
            "would follow theta: clone its tensors, or leave base out for a copy of the current weights"
        )
    return problems


def _placed_alike(one: Any, other: Any) -> bool:
    mesh = getattr(other, "device_mesh", None)
    return bool(mesh == one.device_mesh and one.placements == other.placements)


def _extent(tensor: Tensor) -> tuple[str, int, int]:
    """Device and addresses of a tensor's storage, which views share; none of a tensor that wraps others."""
    tensor = local(tensor)
    if tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return str(tensor.device), 0, 0
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()
