"""Merged models of a search's candidates, one at a time in one buffer, on the CPU or on the GPU that scores them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from .... import checkpoint, merge, tree
from ....config import MergerConfig, settings
from ....evaluate import Scorer
from ....folders.prepare import buffers_note
from ....merge.parts.inputs import Leaves
from ....types import Params
from ..experts.inputs import Inputs, like_base, mask_key, read_statistics

T = TypeVar("T")


class Models:
    """Merged models of candidates, one at a time: the next one is written over the last one.

    The merged task vector is made again only where another option than coef changes; a step of coef is one pass over
    the weights. Random masks come from `mask_key`. With a device all of it is done there, on copies of the inputs,
    until the memory of this device is not enough (`attempt`).
    """

    def __init__(self, inputs: Inputs, seed: int, device: torch.device | None = None) -> None:
        self.inputs, self.tasks, self._device = inputs, list(inputs.experts), device
        self.seconds = 0.0  # of merging
        self._seed, self._key = seed, mask_key(seed)
        self._statistics: tuple[str, dict[str, Leaves], dict[str, str]] | None = None  # of one kind, with fingerprints
        self._forget()

    def _forget(self) -> None:
        self._copies: tuple[Leaves, Mapping[str, Leaves]] | None = None  # of base and experts, on the device
        self._made: tuple[MergerConfig, Mapping[str, Tensor]] | None = None
        self._last: MergerConfig | None = None
        self._buffer: Params = None
        self._blocks: tuple[dict[str, float], Params] | None = None  # coefficients by block and their model

    def statistics(self, config: MergerConfig) -> dict[str, Leaves] | None:
        """The statistics that a merger needs, read once; None if it needs none."""
        if (kind := config.statistics()) is None:
            return None
        if self._statistics is None or self._statistics[0] != kind:
            found = read_statistics(config, self.inputs) or {}
            self._statistics = kind, found, fingerprints(found)
        return self._statistics[1]

    def facts(self, config: MergerConfig, **options: Any) -> dict[str, Any]:
        """For score caches: a merger's settings and these, the seed, and the fingerprints of statistics it needs."""
        found = {"merger": config.name, "options": {**settings(config), **options}, "seed": self._seed}
        if self.statistics(config) is not None:
            assert self._statistics is not None
            found["statistics"] = self._statistics[2]
        return found

    def vector(self, config: MergerConfig) -> Mapping[str, Tensor]:
        """The merged task vector of a merger, whatever its coefficient."""
        options = replace(config, coef=None)  # type: ignore[call-arg]
        if self._made is None or self._made[0] != options:
            self._made = None  # two vectors need not be in memory
            (base, experts), statistics = self._trees(), self.statistics(config)
            made = merge.vector_by(options, base, experts, key=self._key, statistics=statistics)
            if (factors := self.inputs.lines) is not None:
                made = merge.lines(made, low=factors[0], high=factors[1])
            self._made = options, made
        return self._made[1]

    def __call__(self, config: MergerConfig) -> Params:
        """The parameters of a merger whose options are all set, valid until the next call."""
        if config != self._last:
            self.attempt(partial(self._timed, self._merge, config))
            self._last = config
        return self._buffer

    def by_block(self, config: MergerConfig, coefs: Mapping[str, float]) -> Params:
        """The parameters of a merger with a coefficient for each block, valid until the next call."""
        if self._blocks is None or self._blocks[0] != coefs:
            self.attempt(partial(self._timed, self._merge_blocks, config, dict(coefs)))
        assert self._blocks is not None
        return self._blocks[1]

    def attempt(self, work: Callable[[], T]) -> T:
        """``work()``; where the memory of the GPU is not enough, once more, merging on the CPU from now on.

        Bits are the same. Other processes may have taken the memory that was free.
        """
        try:
            return work()
        except torch.OutOfMemoryError:
            if self._device is None:
                raise
        self._leave()
        return work()

    def home(self, params: Params) -> Params:
        """Merged parameters on the CPU, where the inputs came from; the device's memory is freed."""
        if self._device is None:
            return params
        params = _moved(tree.flatten(params), torch.device("cpu"))
        self._leave()
        return params

    def _leave(self) -> None:
        self._device = None
        self._forget()
        torch.cuda.empty_cache()  # for scoring, and for other processes

    def _trees(self) -> tuple[Leaves, Mapping[str, Leaves]]:
        """Base and experts on the device that merges."""
        base, experts = self.inputs.base, self.inputs.experts
        if self._device is None:
            return base, experts
        if self._copies is None:
            there = {name: _moved(own, self._device) for name, own in experts.items()}
            self._copies = _moved(base, self._device), there
        return self._copies

    def _timed(self, function: Callable[..., None], *given: Any) -> None:
        started = perf_counter()
        function(*given)
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += perf_counter() - started

    def _merge(self, config: MergerConfig) -> None:
        base, experts = self._trees()
        if not config.based:
            alike = with_buffers(self.inputs._replace(base=base, experts=dict(experts)))[0]
            self._buffer = like_base(base, merge.merge_by(config, base, widened(base, alike)))
        else:
            coef = getattr(config, "coef", None)
            assert coef is not None
            self._buffer = merge.apply_vector(base, self.vector(config), coef=coef, out=self._buffer)

    def _merge_blocks(self, config: MergerConfig, coefs: dict[str, float]) -> None:
        self._blocks = None  # two models need not be in memory
        self._blocks = coefs, merge.apply_blocks(self._trees()[0], self.vector(config), coefs)


def _moved(leaves: Leaves, device: torch.device) -> dict[str, Tensor]:
    return {path: leaf.to(device) for path, leaf in leaves.items()}


def gpu_for(config: MergerConfig, inputs: Inputs, scorer: Scorer | None) -> torch.device | None:
    """The GPU that scores, if merging there is bit-identical and the trees fit; None: the CPU."""
    if scorer is None or not config.same_on_gpu:
        return None
    places = {leaf.device for leaf in tree.flatten(scorer.suite.base).values()}
    if len(places) != 1 or (place := places.pop()).type != "cuda":
        return None
    trees = sum(leaf.nbytes for own in (inputs.base, *inputs.experts.values()) for leaf in own.values())
    vector = sum(leaf.numel() * tree.compute_dtype(leaf).itemsize for leaf in inputs.base.values())
    model = sum(leaf.nbytes for leaf in inputs.base.values())
    # two vectors, one of which the other is made of, two models with coefficients by block, and as much for scoring
    return place if 2 * (trees + 2 * vector + 2 * model) < _free(place) else None


def _free(device: torch.device) -> int:
    """Bytes of a GPU that no process holds, 0 where CUDA does not say; what torch holds and does not use is freed."""
    try:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    except RuntimeError:
        return 0


def about(inputs: Inputs) -> dict[str, Any]:
    """The fingerprints that scores of merged models depend on, for `Scorer`; experts in their order."""
    experts = [[name, inputs.print_of(own)] for name, own in inputs.experts.items()]
    lines = {} if inputs.lines is None else {"lines": list(inputs.lines)}
    return {"base": inputs.print_of(inputs.base), "experts": experts, **lines}


def fingerprints(trees: Mapping[str, Leaves]) -> dict[str, str]:
    """The fingerprint of every tree by name."""
    return {name: checkpoint.fingerprint(own) for name, own in trees.items()}


def with_buffers(inputs: Inputs) -> tuple[dict[str, dict[str, Tensor]], str]:
    """Experts with base's integer leaves where the experts' differ (counts of batches), and a note; as on disk.

    For a merger without a base, which takes one value of such a leaf.
    """
    first, *rest = inputs.experts.values()
    unlike = sorted(
        path
        for path, leaf in first.items()
        if not leaf.is_floating_point() and path in inputs.base and inputs.base[path].dtype == leaf.dtype
        if any(path in other and other[path].dtype == leaf.dtype and not leaf.equal(other[path]) for other in rest)
    )
    if not unlike:
        return inputs.experts, ""
    own = {path: inputs.base[path] for path in unlike}
    return {name: leaves | own for name, leaves in inputs.experts.items()}, buffers_note(unlike)


def widened(base: Leaves, experts: Mapping[str, Leaves]) -> Mapping[str, Leaves]:
    """Experts with one dtype of every leaf: compute dtype where one expert's is not base's; as on disk.

    For a merger without a base, which refuses several dtypes of a leaf.
    """
    wide = {
        path: tree.compute_dtype(leaf, *(own[path] for own in experts.values()))
        for path, leaf in base.items()
        if leaf.is_floating_point() and all(path in own for own in experts.values())
        if any(own[path].is_floating_point() and own[path].dtype != leaf.dtype for own in experts.values())
    }
    if not wide:
        return experts
    return {
        name: {path: leaf.to(wide[path]) if path in wide else leaf for path, leaf in own.items()}
        for name, own in experts.items()
    }
