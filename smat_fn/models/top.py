"""The top layers of a model on states that its frozen layers gave once."""

import copy
from collections.abc import Callable
from functools import partial
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .modules import blocks

CLOSE = 1e-3  # relative to the largest: both run the same operations, a layer that lacks an input is off by 1e-1
_CLOSE_NARROW = 3e-2  # the same, relative to the resolution of a dtype of 8 bits, in which both round on their own
# what a module may raise where it does not run on states alone
FAILURES = RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError


class Passed(nn.Module):
    """Stands for a frozen layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return hidden_states


class _Reached(Exception):
    """Carries the input of a layer out of a call of its model."""


class Top(NamedTuple):
    """A model that starts at its first trained layer and shares its parameters with the whole model."""

    module: nn.Module  # parameters by the names of the whole model
    states: Callable[[Tensor], Tensor]  # pixel values (B, 3, H, W) -> input of the first trained layer (B, T, D)
    give: Callable[[Tensor], Tensor]  # keeps states for the next call of the module; pixel values to call it with


class Cut(NamedTuple):
    """A model without the blocks before its first trained one, which takes given states for its input."""

    module: nn.Module  # shares the parameters of the whole one, by their names
    given: list[Tensor]  # its one item: the states of the next call
    states: Callable[[Callable[[], Any]], Tensor]  # a call of the whole model -> input of the first trained block


def closeness(dtype: torch.dtype) -> float:
    """How close the values of the top layers must be to those of the whole model, relative to the largest."""
    return CLOSE if torch.finfo(dtype).bits >= 32 else _CLOSE_NARROW


def trained_from(module: nn.Module) -> int | str:
    """The place of the first trained block of a model of which only top blocks are trained; or that it is none."""
    own = blocks(module)
    trained = [place for place, block in enumerate(own) if any(p.requires_grad for p in block.parameters())]
    before = {id(p) for block in own[trained[0] :] for p in block.parameters()} if trained else set()
    if not trained or any(p.requires_grad and id(p) not in before for p in module.parameters()):
        return "layers other than top ones are trained"
    return trained[0]


def cut_of(module: nn.Module) -> Cut | str:
    """Cut a model of which only top blocks are trained below the first of these; or why it cannot be."""
    if isinstance(first := trained_from(module), str):
        return first
    own = blocks(module)
    kept: dict[int, Any] = {id(p): p for p in [*module.parameters(), *module.buffers()]}
    top = copy.deepcopy(module, kept | {id(block): Passed() for block in own[:first]})
    given: list[Tensor] = []

    def swap(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = given[0].to((args[0] if args else options["hidden_states"]).dtype)  # of the weights in this call
        return ((hidden, *args[1:]), options) if args else ((), {**options, "hidden_states": hidden})

    blocks(top)[first].register_forward_pre_hook(swap, with_kwargs=True)
    return Cut(top, given, partial(input_of, own[first]))


def input_of(layer: nn.Module, call: Callable[[], Any]) -> Tensor:
    """The states that a layer gets in a call of its model, which runs no further than to it.

    Raises: RuntimeError where the model does not call the layer as a module (SqueezeBERT calls its ``forward``).
    """

    def reached(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        raise _Reached(args[0] if args else options["hidden_states"])

    try:
        with layer.register_forward_pre_hook(reached, with_kwargs=True), torch.no_grad():
            call()
    except _Reached as stopped:
        return stopped.args[0]
    raise RuntimeError(f"its {type(layer).__name__} is not called as a module")


def top_of(module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], example: Tensor) -> Top | str:
    """Start a model of which only top blocks are trained at the first of these.

    The layers before it are left out, and its input is replaced by states. What stands before the blocks runs on one
    black image, for models that ask it for sizes or dtypes.

    Args:
        module: the whole model.
        call: (module, pixel values (B, 3, H, W)) -> features (B, D).
        example: pixel values (1, 3, H, W) on the model's device, of the size of all images.

    Returns:
        A `Top`, or the reason why the model needs more than the states, or gives other features from them.
    """
    if isinstance(cut := cut_of(module), str):
        return cut
    blank = torch.zeros_like(example)

    def states(values: Tensor) -> Tensor:
        return cut.states(lambda: call(module, values))

    def give(found: Tensor) -> Tensor:
        cut.given[:] = [found]
        return blank

    made = Top(cut.module, states, give)
    return _unlike(made, module, call, example) or made


def _unlike(top: Top, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], example: Tensor) -> str:
    """Why the top layers on states do not give the features of the whole model; "" where they do."""
    values = torch.cat([example, example.flip(-1), -example])
    try:
        with torch.no_grad():
            got, wanted = call(top.module, top.give(top.states(values))), call(module, values)
        if got.shape != wanted.shape:
            return f"features are of shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
        off = float((got - wanted).abs().max() / wanted.abs().max())
    except FAILURES as error:
        return shorten(str(error), 200)
    return "" if off < CLOSE else f"features differ by {off:.1e}"
