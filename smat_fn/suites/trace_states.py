"""States of a language model's frozen layers, from which its top layers are trained."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import fingerprint
from ..data.cache import HELD, cached, versions
from ..evaluate.records import content_key
from ..models.modules import frozen
from ..models.top_language import TopLanguage
from ..progress import bar
from ..types import Batch
from .suite import remembered
from .trace_tokens import Tokens

_TOGETHER = 4096  # tokens that go through the frozen layers in one pass


class States:
    """States for the rows of a split, computed when the split is first used; kept in the cache unless they are large.

    Args: top: the layers that are trained; module: the whole model; first: the name of its first trained parameter.
    """

    def __init__(self, top: TopLanguage, tokens: Tokens, module: nn.Module, first: str) -> None:
        self.loss_fn = top.loss_fn
        self._top, self._tokens, self._module, self._first = top, tokens, module, first

    def of(self, task: str, split: str, rows: Sequence[int], batch: Batch) -> Tensor:
        """States of rows by their places and their batch: (B, T, D), 0 where a row is filled up."""
        if (kept := self._kept(task, split)) is None:
            return self._top.states(batch).cpu()
        states = kept[0].new_zeros(*batch["input_ids"].shape, kept[0].shape[-1])
        for place, i in enumerate(rows):
            states[place, : len(kept[i])] = kept[i]
        return states

    @remembered
    def _kept(self, task: str, split: str) -> Sequence[Tensor] | None:
        """The states of every row; None for more of them than are held."""
        examples, top, collate = self._tokens.examples(task, split), self._top, self._tokens.collate
        lengths = [len(example.input_ids) for example in examples]
        order = sorted(range(len(examples)), key=lambda i: lengths[i])
        one = top.states(collate([examples[order[0]]]))
        if sum(lengths) * one[0, 0].nbytes > HELD:
            return None
        parts: list[list[int]] = []
        for i in order:  # a row is at least as long as those before it
            if not parts or (len(parts[-1]) + 1) * lengths[i] > _TOGETHER:
                parts.append([])
            parts[-1].append(i)

        def every() -> dict[str, Tensor]:
            found: dict[int, Tensor] = {}
            with bar(len(parts), desc=f"states of frozen layers, {task}", leave=False, delay=1) as shown:
                for part in parts:
                    states = top.states(collate([examples[i] for i in part])).cpu()
                    found |= {i: own[: lengths[i]].clone() for i, own in zip(part, states, strict=True)}
                    shown.update()
            return {"states": torch.cat([found[i] for i in range(len(examples))])}

        config = {
            "tokens": content_key({"ids": [example.input_ids for example in examples]}),
            "first": self._first,
            "dtype": str(one.dtype),
            "device": one.device.type,
            **self._below(),
        }
        return cached("text-states", config, every)["states"].split(lengths)

    @remembered
    def _below(self) -> Mapping[str, Any]:
        """All that states depend on beside tokens."""
        config: Any = self._module.config
        return {
            "model": [str(config), str(getattr(config, "_attn_implementation", None))],
            "frozen": fingerprint(frozen(self._module)),
            "versions": versions("torch", "transformers"),
        }
