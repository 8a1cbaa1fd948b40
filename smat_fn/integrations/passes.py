"""The micro-batches of a step once more: the same batches, random numbers and counters, without a trace in metrics."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .methods import instead

_METRICS = "_metrics", "_stored_metrics"  # of TRL's trainers: lists of numbers by name
_COUNTERS = int, float, Tensor, type(None)  # types of the attributes that a trainer counts in
_States = list[tuple[Callable[[Any], Any], Any]]  # of random generators, each with the function that sets it


class _Call(NamedTuple):
    """A call of ``training_step``, and what it found.

    Attributes:
        inputs: the batch among its arguments.
        reduced: whether its gradient is averaged over processes.
        complete: whether it is the last one of the step.
        numbers: the trainer's attributes that are numbers.
        prepared: what ``_prepare_inputs`` made of ``inputs``, and the random states after it.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]
    inputs: Any
    reduced: bool
    complete: bool
    numbers: dict[str, int | float]
    states: _States
    prepared: list[tuple[Any, _States]]


class Passes:
    """The calls of a trainer's ``training_step`` in one optimizer step, kept for a second pass.

    Args: step: the number of the step.
    """

    def __init__(self, trainer: Any, step: int) -> None:
        self.step = step
        self._trainer, self._calls = trainer, list[_Call]()
        kinds = {p.device.type for p in trainer.model.parameters()} - {"cpu", "meta"}
        self._devices = [torch.get_device_module(kind) for kind in sorted(kinds)]

    @contextmanager
    def first(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        """Around a call, which is kept if it does not fail."""
        trainer = self._trainer
        prepare, numbers = trainer._prepare_inputs, {n: v for n, v in vars(trainer).items() if type(v) in (int, float)}
        call = _Call(
            args,
            options,
            inputs=args[1] if len(args) > 1 else options.get("inputs"),
            reduced=getattr(model, "require_backward_grad_sync", True),  # False in DDP's no_sync
            complete=trainer.accelerator.sync_gradients,
            numbers=numbers,
            states=self._states(),
            prepared=[],
        )

        def prepared(batch: Any) -> Any:
            made = prepare(batch)
            if batch is call.inputs:  # not that of an evaluation; losses add to the dict, and take from it
                call.prepared.append((copy.copy(made), self._states()))
            return made

        with instead(trainer, "_prepare_inputs", prepared):
            yield
        self._calls.append(call)

    def second(self, model: nn.Module, training_step: Callable[..., Any]) -> None:
        """All calls once more; counters, metrics and random states are what they were afterwards."""
        trainer, calls, states = self._trainer, self._calls, self._states()
        prepare, accelerator = trainer._prepare_inputs, trainer.accelerator
        before = {name: v for name, v in vars(trainer).items() if type(v) in _COUNTERS or name in _METRICS}
        self._calls = []
        vars(trainer).update({name: copy.deepcopy(before[name]) for name in _METRICS if name in before})
        try:
            for call in calls:

                def prepared(batch: Any, call: _Call = call) -> Any:
                    if batch is not call.inputs or not call.prepared:
                        return prepare(batch)
                    made, after = call.prepared.pop(0)
                    _set(after)
                    return made

                vars(trainer).update(call.numbers)
                _set(call.states)
                accelerator.sync_gradients = call.complete
                with ExitStack() as inside:
                    inside.enter_context(instead(trainer, "_prepare_inputs", prepared))
                    if not call.reduced:  # as the Trainer, to send gradients once
                        inside.enter_context(accelerator.no_sync(model))
                    training_step(*call.args, **call.options)
        finally:
            vars(trainer).update(before)
            _set(states)

    def _states(self) -> _States:
        found: _States = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
        found.append((torch.set_rng_state, torch.get_rng_state()))
        for device in self._devices:
            every = "_all" if hasattr(device, "get_rng_state_all") else ""
            found.append((getattr(device, f"set_rng_state{every}"), getattr(device, f"get_rng_state{every}")()))
        return found


def _set(states: _States) -> None:
    for restore, state in states:
        restore(state)
