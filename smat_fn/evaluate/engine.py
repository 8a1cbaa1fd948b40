"""Interface of text-generation engines: ``Engine(model, tokenizer, params) -> Generate(prompts, settings, seed)``.

`decoding.generator` is the engine that is built in; docs/serving.md shows another one.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .. import random
from ..errors import imported, takes
from ..grad import ModuleLoss


class Decoding(NamedTuple):
    """How to decode; ``repeats`` is for the caller, who averages the scores of that many decodes."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    repeats: int = 1  # greedy repeats would be equal


class Generate(Protocol):
    """One answer per prompt, in order, without the prompt and outer whitespace.

    A sample depends on its prompt and (seed, repeat, row) alone; ``rows`` are the numbers of the prompts' rows, None:
    their positions.
    """

    def __call__(
        self,
        prompts: Sequence[str],
        settings: Decoding,
        seed: int,
        *,
        repeat: int = 0,
        rows: Sequence[int] | None = None,
    ) -> list[str]: ...


class Engine(Protocol):
    """Makes a `Generate` of given weights: the interface of a serving engine (docs/serving.md).

    Args: model, tokenizer: of the suite; params: flat parameters, on the model's device, valid and unchanged until the
        last answer; batch_size: prompts of one call.
    """

    def __call__(
        self, model: ModuleLoss, tokenizer: Any, params: Mapping[str, Tensor], *, batch_size: int
    ) -> Generate: ...


Batch = Callable[[Mapping[int, str], int, int], None]  # (new answers by row, rows done, rows)


def in_batches(
    generate: Generate,
    prompts: Sequence[str],
    settings: Decoding,
    seed: int,
    *,
    repeat: int = 0,
    lengths: Sequence[int],
    batch_size: int,
    tokens: int | None = None,
    known: Mapping[int, str] = MappingProxyType({}),
    on_batch: Batch | None = None,
) -> list[str]:
    """All answers, the longest prompts first, ``batch_size`` a call; a batch whose rows are all cached is not decoded.

    Batches do not depend on what is known: a resumed run is bit-identical to an uninterrupted one.

    Args: lengths: of the prompts, in any unit without ``tokens``; tokens: of a batch at most, its prompts filled up to
        the longest and as many new ones as there may be (one row may have more); known: answers by row; on_batch: gets
        the new answers of each batch.
    Raises: ValueError for a batch size below 1, and for an engine that gives other than one text a prompt.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, must be at least 1")
    order, first = sorted(range(len(prompts)), key=lambda i: -lengths[i]), 0
    texts = dict(known)
    while first < len(order):
        most = batch_size if tokens is None else tokens // (lengths[order[first]] + settings.max_new_tokens)
        rows = order[first : first + max(1, min(batch_size, most))]
        new: dict[int, str] = {}
        if not all(row in known for row in rows):
            found = generate([prompts[row] for row in rows], settings, seed, repeat=repeat, rows=rows)
            if len(found) != len(rows) or not all(isinstance(text, str) for text in found):
                raise ValueError(
                    f"the engine gave {len(found)} answers to {len(rows)} prompts: it must give one text each"
                )
            new = dict(zip(rows, found, strict=True))
            texts.update(new)
        first += len(rows)
        if on_batch:
            on_batch(new, first, len(order))
    return [texts[row] for row in range(len(prompts))]


def row_seed(seed: int, repeat: int, row: int) -> int:
    """A seed in [0, 2**31) for an engine that takes one with each request: the low bits of the row's key."""
    return int(random.fold_in(root_key(seed, repeat), row)[0]) % 2**31


def find_engine(name: str) -> Engine:
    """The engine "module:function". Raises: ValueError where there is none, or it takes other arguments."""
    found: Engine = imported("engine", name)
    if not callable(found) or not takes(found, 3, batch_size=1):
        raise ValueError(f"engine {name!r} does not take (model, tokenizer, params, *, batch_size)")
    return found


def engine_name(engine: Engine) -> str:
    """Identifies an engine in the score cache: a function's import path, other objects' ``repr``."""
    place = getattr(engine, "__qualname__", None)
    return repr(engine) if place is None else f"{engine.__module__}:{place}"


def root_key(seed: int, repeat: int) -> Tensor:
    """The key whose children, by row, are those of the samples."""
    return random.fold_in(random.fold_in(random.key(seed), "decode"), repeat)
