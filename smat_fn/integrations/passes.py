"""The micro-batches of a step once more: the same batches, random numbers and counters, without a trace in metrics."""

import copy
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..parallel.shards import local
from . import checks
from .methods import instead

# lists of numbers by name of TRL's trainers, and sums of losses by name of sentence-transformers'
_METRICS = "_metrics", "_stored_metrics", "accum_loss_components"
_NUMBERS = bool, int, float
_FEW = 4096  # values of a tensor that a trainer may count in, as an average of losses; logits would stay for a step
# generators that a trainer may have of its own, and how their state is read and set
_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (
        np.random.Generator,
        lambda own: own.bit_generator.state,
        lambda own, new: setattr(own.bit_generator, "state", new),
    ),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
)
_States = list[tuple[Callable[[Any], Any], Any]]  # of random generators, each with the function that sets it


class _Call(NamedTuple):
    """A call of ``training_step``, and what it found.

    Attributes:
        inputs: the batch among its arguments.
        again: a copy of it, since a training_step may add to it, and take from it.
        reduced: whether its gradient is averaged over processes.
        complete: whether it is the last one of the step.
        numbers: the trainer's attributes that are numbers, or tensors of a few.
        prepared: copies of what ``_prepare_inputs`` made of ``inputs``, and the random states after it.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]
    inputs: Any
    again: Any
    reduced: bool
    complete: bool
    numbers: dict[str, int | float | Tensor]
    states: _States
    prepared: list[tuple[Any, _States]]


class Passes:
    """The calls of a trainer's ``training_step`` in one optimizer step, kept for a second pass.

    Args: step: the number of the step.
    """

    def __init__(self, trainer: Any, step: int) -> None:
        self.step = step
        self._trainer, self._calls = trainer, list[_Call]()
        self._summed = list[tuple[int, int]]()  # the gradients after the last call
        kinds = {p.device.type for p in trainer.model.parameters()} - {"cpu", "meta"}
        self._devices = [torch.get_device_module(kind) for kind in sorted(kinds)]

    @contextmanager
    def first(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        """Around a call, which is kept if it does not fail.

        Raises: ValueError for gradients that were changed since the call before: the second pass would not do it.
        """
        trainer = self._trainer
        if self._calls and self._gradients() != self._summed:
            raise ValueError(checks.changed_between(trainer, self.step))
        prepare, inputs = trainer._prepare_inputs, args[1] if len(args) > 1 else options.get("inputs")
        again = copy.copy(inputs)
        call = _Call(
            (args[0], again, *args[2:]) if len(args) > 1 else args,
            options if len(args) > 1 else options | {"inputs": again},
            inputs=inputs,
            again=again,
            reduced=_is_reduced(model, trainer.accelerator.sync_gradients),
            complete=trainer.accelerator.sync_gradients,
            numbers={name: v for name, v in vars(trainer).items() if type(v) in _NUMBERS or _is_small(v)},
            states=self._states(),
            prepared=[],
        )

        def prepared(batch: Any) -> Any:
            made = prepare(batch)
            if batch is call.inputs:  # not that of an evaluation; losses change the dict, and tensors in it
                call.prepared.append((_copied(made), self._states()))
            return made

        with instead(trainer, "_prepare_inputs", prepared):
            yield
        self._calls.append(call)
        self._summed = self._gradients()

    def second(self, model: nn.Module, training_step: Callable[..., Any]) -> None:
        """All calls once more, without a log; counters, metrics and random states are what they were afterwards."""
        trainer, calls, states = self._trainer, self._calls, self._states()
        prepare, accelerator = trainer._prepare_inputs, trainer.accelerator
        kept = *_NUMBERS, Tensor, type(None)
        before = {name: v for name, v in vars(trainer).items() if type(v) in kept or name in _METRICS}
        self._calls = []
        vars(trainer).update({name: _copied(before[name]) for name in _METRICS if name in before})
        try:
            for call in calls:

                def prepared(batch: Any, call: _Call = call) -> Any:
                    if batch is not call.again or not call.prepared:
                        return prepare(batch)
                    made, after = call.prepared.pop(0)
                    _set(after)
                    return made

                vars(trainer).update(call.numbers)
                _set(call.states)
                accelerator.sync_gradients = call.complete
                with ExitStack() as inside:
                    inside.enter_context(instead(trainer, "_prepare_inputs", prepared))
                    inside.enter_context(instead(trainer, "log", lambda *args, **options: None))
                    if not call.reduced:  # as the Trainer, to send gradients once
                        inside.enter_context(_unreduced(model, accelerator))
                    training_step(*call.args, **call.options)
        finally:
            vars(trainer).update(before)
            _set(states)

    def _gradients(self) -> list[tuple[int, int]]:
        with torch.no_grad():
            grads = [local(p.grad) for p in self._trainer.model.parameters() if p.grad is not None]
        return [(grad.data_ptr(), grad._version) for grad in grads]

    def _states(self) -> _States:
        found: _States = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
        found.append((torch.set_rng_state, torch.get_rng_state()))
        for device in self._devices:
            every = "_all" if hasattr(device, "get_rng_state_all") else ""
            found.append((getattr(device, f"set_rng_state{every}"), getattr(device, f"get_rng_state{every}")()))
        owned = ((own, *one) for own in vars(self._trainer).values() for one in _GENERATORS if type(own) is one[0])
        return found + [(partial(put, own), read(own)) for own, _, read, put in owned]


def _is_reduced(model: nn.Module, complete: bool) -> bool:
    """Whether a backward pass averages the gradient over processes. Args: complete: of the last one of the step."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2 does not say
        return complete
    return getattr(model, "require_backward_grad_sync", True)  # False in DDP's no_sync


@contextmanager
def _unreduced(model: Any, accelerator: Any) -> Iterator[None]:
    """Inside, backward passes average nothing."""
    if not hasattr(model, "set_requires_gradient_sync"):
        with accelerator.no_sync(model):
            yield
        return
    model.set_requires_gradient_sync(False)  # transformers may have made the shards, which accelerate does not know
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _is_small(value: Any) -> bool:
    return type(value) is Tensor and value.numel() <= _FEW and not value.requires_grad


def _copied(batch: Any) -> Any:
    """A copy of a batch, or of metrics, and of the tensors in it."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if type(batch) in (list, tuple):
        return type(batch)(map(_copied, batch))
    if not isinstance(batch, MutableMapping):
        return batch
    made = copy.copy(batch)  # deepcopy would copy whole storages of views, and images
    for name, value in batch.items():
        made[name] = _copied(value)
    return made


def _set(states: _States) -> None:
    for restore, state in states:
        restore(state)
