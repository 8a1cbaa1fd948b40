"""Source of the configuration, tokenizer and chat template of a merge's output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ... import errors
from .differing import differences, unread_notes
from .heads import head_files, head_notes
from .hub import local_folder
from .opening import RESERVED, key_of, roots_of
from .reading import Folder, load_config
from .side_files import TOKENIZER, Files, beside, chosen_template, files_of
from .tokens import Aligned, Tokens, aligned, without_tokenizer
from .vocabulary import tokenizer_notes

TokenRows: TypeAlias = Literal["base", "mean", "by-row"]
Align: TypeAlias = Callable[[Folder, dict[str, Folder]], tuple[Folder, dict[str, Folder]]]


@dataclass(frozen=True)
class Sources:
    """Where the files beside a merge's weights come from, and its rows of tokens: options of `merge_folders`."""

    inputs: Mapping[str, Path]  # "base" and the experts, by `key_of`
    config_from: str | None = None
    tokenizer_from: str | None = None
    chat_template: str | None = None
    token_rows: TokenRows = "base"
    tokens: Tokens = field(default_factory=dict)
    pad: int = 1
    rows: list[Aligned] = field(default_factory=list)  # that `align` has made
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by expert, of those that are kept apart

    def align(self, *, based: bool) -> Align | None:
        """Function that reorders embedding rows to one tokenizer; None if none was named, or only for its files."""
        source = self.tokenizer_from
        if source is None or self.token_rows == "by-row":
            return None

        def align(start: Folder, found: dict[str, Folder]) -> tuple[Folder, dict[str, Folder]]:
            whose, named = source, {key_of(name): folder for name, folder in found.items()}
            if whose not in (*RESERVED, *named):
                known = roots_of({"base": start, **named}, self.inputs).get(whose)
                whose = str(known or local_folder("tokenizer_from", Path(whose)))
            mean = self.token_rows == "mean"
            rows = aligned(start, named, whose, based=based, mean=mean, tokens=self.tokens, pad=self.pad)
            self.rows.append(rows)
            return rows.base, dict(zip(found, rows.experts.values(), strict=True))

        return align

    def _tokenizer(self, base: Path, roots: Mapping[str, Path]) -> Path:
        """The folder of a tokenizer whose rows are not aligned."""
        if self.tokenizer_from in (None, "union"):  # a union whose rows are not aligned is an error already
            return base
        root = roots.get(self.tokenizer_from) or local_folder("tokenizer_from", Path(self.tokenizer_from))
        if not files_of(root, TOKENIZER):
            raise ValueError(without_tokenizer(self.tokenizer_from, root))
        return root

    def files(
        self,
        start: Folder,
        found: Mapping[str, Folder],
        dtype: torch.dtype | None,
        problems: list[str],
        notes: list[str],
        *,
        partial: bool,
    ) -> Files:
        """The files beside the weights; appends to ``problems`` and ``notes``."""
        opened = {"base": start, **{key_of(name): folder for name, folder in found.items()}}
        # an input that cannot be opened is an error already
        roots = dict.fromkeys(self.inputs, start.root) | roots_of(opened, self.inputs)
        labels = {key_of(name): f"expert {name!r}" for name in RESERVED}
        others = {labels.get(name, f"expert {name!r}"): root for name, root in roots.items() if root != start.root}
        if not self.rows and start.within is None:  # else `inside` has notes of its own
            notes += tokenizer_notes(start.root, others)
        if not partial and start.within is None:
            template = self.chat_template is not None or self.tokenizer_from not in (None, "base", "union")
            wrong, unlike = differences(start.root, others, chosen=self.config_from is not None, template=template)
            problems += wrong
            notes += unlike
        notes += unread_notes({"base": start.root, **others})
        for row in self.rows:
            notes += row.notes
        notes += head_notes(self.heads)
        notes += [folder.note for folder in (start, *found.values()) if folder.note]
        with errors.collected(problems):
            given = "base" if self.config_from is None else self.config_from
            config = roots.get(given) or local_folder("config_from", Path(given))
            if load_config(config) is None and self.config_from is not None:
                problems.append(f"config_from is {given!r}: {config} has no config.json")
            return head_files(self.heads, {name: roots[key_of(name)] for name in self.heads}) | beside(
                start.root,
                config,
                self.rows[0].tokenizer if self.rows else self._tokenizer(start.root, roots),
                changes=start.config,
                numbers=self.rows[0].numbers if self.rows and config == start.root else {},
                dtype=dtype,
                chat_template=chosen_template(self.chat_template, [start.root, *others.values()]),
            )
        return {}
