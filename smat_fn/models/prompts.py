"""Prompts of a causal language model whose frozen layers read each batch of them once, whatever the weights above."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .modules import blocks, cache_name
from .top import FAILURES, Passed, closeness, trained_from

HELD = 2 * 2**30  # bytes of states, keys and values that are kept, on the model's device; later batches are not


class Prompts:
    """Reads prompts with a model of which only top blocks are trained, at weights that change from call to call.

    The first reading of a batch runs the whole model and keeps what the blocks below the first trained one made of it:
    their output, and their layers of the key-value cache. Later readings of the same tokens begin at that block.

    Args: module: its frozen parameters stay as they are; first: place of the first trained block.
    """

    def __init__(self, module: nn.Module, first: int) -> None:
        self._blocks, self._first = blocks(module), first
        self._kept: dict[tuple[bytes, ...], _Kept] = {}
        self._bytes = 0

    def __call__(self, module: nn.Module, **options: Any) -> Any:
        """The output of ``module(**options)`` for tokens without a past, a new key-value cache in it."""
        key = tuple(value.cpu().numpy().tobytes() for value in options.values() if isinstance(value, Tensor))
        if (kept := self._kept.get(key)) is None:
            return self._read(module, key, options)
        with self._from(kept.states):
            out = module(**options)
        # a layer is replaced by longer tensors, not written to, so that copies of the object are enough
        out[cache_name(module)].layers[: self._first] = [copy.copy(layer) for layer in kept.below]
        return out

    def _read(self, module: nn.Module, key: tuple[bytes, ...], options: Mapping[str, Any]) -> Any:
        seen: list[Tensor] = []

        def look(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append(args[0] if args else named["hidden_states"])

        with self._blocks[self._first].register_forward_pre_hook(look, with_kwargs=True):
            out = module(**options)
        kept = _Kept(seen[0], [copy.copy(layer) for layer in out[cache_name(module)].layers[: self._first]])
        size = sum(tensor.nbytes for tensor in (kept.states, *(x for b in kept.below for x in (b.keys, b.values))))
        if self._bytes + size <= HELD:
            self._bytes += size
            self._kept[key] = kept
        return out

    @contextmanager
    def _from(self, states: Tensor) -> Iterator[None]:
        """The model begins at its first trained block, with these states."""

        def swap(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return ((states, *args[1:]), named) if args else ((), {**named, "hidden_states": states})

        below = self._blocks[: self._first]
        try:
            for block in below:
                block.forward = Passed().forward
            with self._blocks[self._first].register_forward_pre_hook(swap, with_kwargs=True):
                yield
        finally:
            for block in below:
                vars(block).pop("forward", None)  # the class's own again


class _Kept(NamedTuple):
    states: Tensor  # input of the first trained block (B, T, D)
    below: list[Any]  # layers of the key-value cache of the blocks before it


def prompts_of(module: Any, tokens: Mapping[str, Tensor]) -> Prompts | str:
    """A `Prompts` of a model, or the reason why the model needs more than states, keys and values below its top blocks.

    Args:
        module: a causal language model of ``transformers``.
        tokens: input_ids, attention_mask and position_ids of some prompts of unequal length, (B, T) each.
    """
    if isinstance(first := trained_from(module), str):
        return first
    if first == 0:
        return "the lowest block is trained"
    if not cache_name(module):
        return "its forward function takes no cache of keys and values"
    if any("forward" in vars(block) for block in blocks(module)[:first]):
        return "something else has replaced the forward function of its blocks"
    prompts = Prompts(module, first)
    ways = module, partial(prompts, module), partial(prompts, module)  # the second keeps, the third takes
    try:
        with torch.no_grad():
            wanted, kept, taken = (_two_steps(module, way, tokens) for way in ways)
    except FAILURES as error:
        return shorten(str(error), 200)
    off = max(float((found - wanted).abs().max() / wanted.abs().max()) for found in (kept, taken))
    return Prompts(module, first) if off < closeness(wanted.dtype) else f"logits differ by {off:.1e}"


def _two_steps(module: Any, way: Callable[..., Any], tokens: Mapping[str, Tensor]) -> Tensor:
    """Logits after the prompts and after one more token, (2, B, V)."""
    out = way(**tokens, use_cache=True)
    mask, positions = tokens["attention_mask"], tokens["position_ids"]
    after = {
        "input_ids": tokens["input_ids"][:, -1:],
        "attention_mask": torch.cat((mask, mask.new_ones(len(mask), 1)), 1),
        "position_ids": positions[:, -1:] + 1,
    }
    name = cache_name(module)
    then = module(**after, **{name: out[name]}, use_cache=True)
    return torch.stack([step.logits[:, -1] for step in (out, then)])
