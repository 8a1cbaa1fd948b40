"""The loss of adapters on a module: each weight is formed when its layer runs, and again when backward reads it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear

from .. import errors, ops, tree
from ..execution import transformed
from ..grad import MasterWeights, ModuleLoss
from ..grad.modules import WrappedLoss
from ..grad.tangent import Linearised
from ..mat.offload.rebuild import Absent, Versioned
from ..simulation import Draw, simulate
from ..simulation.state import DrawPart, draw_parts, of_leaves
from ..types import Where
from .adapters import WEIGHT, A, B, Lora, check_fit, delta_of, expand, layer_of
from .dropout import chain, dropout_of

LATER = "outside the forward pass of the layer that owns it: adapters are added to a weight for that time only"


class PerModule(WrappedLoss):
    """A `ModuleLoss` of all weights as a loss of adapters, ``L(W_0 + s B A)``, or that at a draw's state.

    Where the module runs in float32 or float64, a layer's weight is ``W = W_0 + s B A``, or the simulated one, rounded
    once. It exists while the layer runs, and again when the backward pass reads it; its gradient goes to A and B as
    soon as the layer's backward pass made it.

    Where it runs in a narrower dtype, that sum would lose an update below half a unit in the last place of ``W_0``. So
    a layer adds its update in its output: ``x W_0^T + s (x A^T) B^T`` as PEFT does, at a simulated state
    ``x W_0^T + x D^T`` with ``D = alpha m (.) s B A + epsilon`` computed in float32 and rounded once. An
    ``in_proj_weight`` of ``nn.MultiheadAttention``, whose product is not its own, is rounded as a whole.

    Where the module's weights are shards (`smat_fn.parallel.frozen_shards`), layers add their updates too, whatever
    their dtype, and of base no value is read.
    """

    def __init__(
        self, inner: ModuleLoss, base: Mapping[str, Tensor], lora: Lora, drawn: Draw | None, where: Where | None
    ) -> None:
        super().__init__(inner)
        if _sharded(self.module):
            errors.raise_problems(shard_problems(lora), "adapters on shards")
        self._base, self._lora, self._drawn, self._where = base, lora, drawn, where
        self._check_base = tree.unchanged(base)

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while layers form their weights of these adapters; all at once compiled and linearised.

        Raises: ValueError for a base that was written to; under torch.compile, and for a linearised module, for a
            narrow dtype; as `check_fit`.
        """
        self._check_base()
        check_fit(params, self._base, self._lora)
        # the first cannot trace hooks that come and go, the second takes its derivative in whole weights
        if torch.compiler.is_compiling() or any(isinstance(loss, Linearised) for loss in chain(self.inner)):
            return self.inner.within(self._all_at_once(params), fn)

        def run(module: nn.Module) -> Any:
            with _forming(module, _Weights(params, self._base, self._lora, self._drawn, self._where), self.inner):
                return fn(module)

        return self.inner.within({} if _sharded(self.module) else self._whole(params), run)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError as the loss inside, and as `check_fit`."""
        check_fit(params, self._base, self._lora)
        self.inner.check({**self._base, **{path: params[path] for path in self._lora.saved}})

    def _all_at_once(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inside = [loss for loss in chain(self.inner) if isinstance(loss, MasterWeights)]
        if inside or any(tree.compute_dtype(self._base[path]) != self._base[path].dtype for path in self._lora.paths):
            raise ValueError(
                "adapters of a module in a narrow dtype add their update in its layers, which a compiled step and a "
                "linearised module cannot: compile the module instead of the step, or train in float32"
            )
        merged = expand(params, self._base, self._lora)
        if self._drawn is not None:
            merged = simulate(merged, {path: self._base[path] for path in merged}, self._drawn, where=self._where)
        return {**self._base, **merged}

    def _whole(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = {path: params[path].to(self._base[path].dtype) for path in self._lora.saved}
        if saved and self._drawn is not None:
            drawn, origins = of_leaves(self._drawn, saved), {path: self._base[path] for path in saved}
            saved = simulate(saved, origins, drawn, where=self._where)
        return {**self._base, **saved}


class _Weights:
    """Weights of adapted layers, made anew whenever asked: the same values each time."""

    def __init__(
        self,
        adapters: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        lora: Lora,
        drawn: Draw | None,
        where: Where | None,
    ) -> None:
        self.adapters, self.lora, self.simulated = adapters, lora, drawn is not None
        self._base = base
        self._where: dict[str, tuple[DrawPart, int]] = {}
        if drawn is not None:
            for part in draw_parts({path: base[path] for path in lora.paths}, drawn, where, {}):
                self._where.update({path: (part, i) for i, path in enumerate(part.paths)})

    def merged(self, path: str) -> Tensor:
        """``W_0 + s B A`` in base's dtype, or the simulated state."""
        leaf, delta = self._base[path], delta_of(self.adapters, path, self._base[path], self.lora)
        weight = (leaf.to(delta.dtype) + delta).to(leaf.dtype)
        return self._at_draw(path, weight, leaf) if self.simulated else weight

    def update(self, path: str) -> Tensor:
        """``alpha m (.) s B A + epsilon`` in float32 (float64 for a base in float64): theta~ of a base of zeros."""
        delta = delta_of(self.adapters, path, self._base[path], self.lora).contiguous()
        return self._at_draw(path, delta, torch.zeros_like(delta))

    def versions(self, path: str) -> tuple[int, int]:
        """Versions of A and B, which change when they are written in place."""
        layer = layer_of(path)
        return self.adapters[layer + A]._version, self.adapters[layer + B]._version

    def _at_draw(self, path: str, theta: Tensor, theta_0: Tensor) -> Tensor:
        part, row = self._where[path]
        streams = part.numbers.streams[:, row : row + 1].contiguous()
        given = part.numbers._replace(streams=streams), [part.masked[row]], [part.starts[row]]
        # `_Simulated` has derivatives in theta and theta_0 alone
        drawn = any(number.requires_grad for number in part.numbers)
        if drawn or transformed() or forward_ad._current_level >= 0:
            return ops.simulate([theta], [theta_0], *given)[0]
        return _Simulated.apply(theta, theta_0, given)


class _Simulated(torch.autograd.Function):
    """`ops.simulate` of one leaf that keeps neither theta nor theta_0 for the backward pass."""

    @staticmethod
    def forward(ctx, theta, theta_0, given):  # type: ignore[no-untyped-def]
        ctx.given = given
        with torch.no_grad():
            return ops.simulate([theta], [theta_0], *given)[0]

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        own = ops.reweight([gradient.contiguous()], *ctx.given)[0]
        return own, gradient - own if ctx.needs_input_grad[1] else None, None


class _Saved(NamedTuple):
    """Kept by autograd in place of a weight."""

    make: Callable[[], Tensor]
    versions: Callable[[], tuple[int, int]]
    made_at: tuple[int, int]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Alive:
    """Weights of the layers that run now, by address, so that autograd keeps how they are made in their place."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor], Callable[[], tuple[int, int]]]] = {}

    def add(self, weight: Tensor, make: Callable[[], Tensor], versions: Callable[[], tuple[int, int]]) -> None:
        """A weight, alive until `drop`."""
        self._made[weight.untyped_storage().data_ptr()] = weight, make, versions

    def drop(self, weight: Tensor) -> None:
        """Forget a weight whose layer has run."""
        if self._made:
            self._made.pop(weight.untyped_storage().data_ptr(), None)

    def pack(self, tensor: Tensor) -> Any:
        """Save for the backward pass: of a weight the function that makes it, any other tensor itself (`Versioned`)."""
        found = self._made.get(tensor.untyped_storage().data_ptr())
        if found is None or found[0].dtype != tensor.dtype:
            return Versioned(tensor)
        _, make, versions = found
        return _Saved(make, versions, versions(), tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """The tensor that `pack` saved; a weight is made again.

        Raises: RuntimeError for adapters and other tensors that changed since, as autograd does.
        """
        if isinstance(saved, Versioned):
            return saved.unchanged()
        if saved.versions() != saved.made_at:
            raise RuntimeError("adapters were written to between the forward and the backward pass that needs them")
        with torch.no_grad():
            return saved.make().as_strided(saved.size, saved.stride, saved.offset)


@contextmanager
def _forming(module: nn.Module, weights: _Weights, loss: ModuleLoss) -> Iterator[None]:
    """Layers with adapters form their weights while they run; run loss *and* gradient inside. As before afterwards."""
    wanted, alive, handles, layers = set(weights.lora.paths), _Alive(), [], list[tuple[nn.Module, _Layer]]()
    path_of = {id(p): path for path, p in module.named_parameters() if path in wanted}
    if len(path_of) < len(wanted):
        missing = sorted(wanted - set(path_of.values()))
        raise ValueError(f"leaves {', '.join(missing)} are tied to others: give adapters to the first of their names")
    plain, shards, dropping = transformed(), _sharded(module), dropout_of(loss)
    try:
        for owner in module.modules():
            own = {name: path_of[id(p)] for name, p in owner._parameters.items() if id(p) in path_of}
            if type(owner).__name__ == "Conv1D" and not weights.lora.transposed.issuperset(own.values()):
                raise ValueError(
                    f"{', '.join(own.values())} of a Conv1D is stored (in, out): give lora the transposed paths of "
                    "lora.linear_paths"
                )
            for name, path in own.items():
                leaf = owner._parameters[name]
                assert leaf is not None
                layer = _Layer(path, name, leaf, weights, alive, plain, shards, dropping)
                layers.append((owner, layer))
                if not shards:  # which FSDP2 replaces by gathered weights
                    owner._parameters[name] = layer.idle  # type: ignore[assignment]
                # first and last of the layer's hooks, so that the others see its weight too
                handles.append(owner.register_forward_pre_hook(layer.enter, prepend=True))
                handles.append(owner.register_forward_hook(layer.leave, with_kwargs=True, always_call=True))
        for part in module.modules() if shards else ():
            if _gathers(part):  # both after FSDP2's own hooks, which gather and shard again
                hide = _hiding(part, layers)
                handles += [part.register_forward_pre_hook(hide), part.register_forward_hook(hide)]
        keeping = nullcontext() if plain else torch.autograd.graph.saved_tensors_hooks(alive.pack, alive.unpack)
        with keeping:
            yield
    finally:
        for handle in handles:
            handle.remove()
        for owner, layer in layers:
            layer.reveal(owner)


def shard_problems(lora: Lora) -> list[str]:
    """Errors for adapters that cannot be added in the output of a layer, where the module's weights are shards."""
    found = [
        f"{path!r} is of an nn.MultiheadAttention, which reads it whole: name other targets"
        for path in lora.paths
        if not path.endswith(WEIGHT)
    ]
    return found + [f"{path!r} is to be trained whole, and shards are frozen: leave it out" for path in lora.saved]


def _sharded(module: nn.Module) -> bool:
    return any(map(_gathers, module.modules()))


def _gathers(part: nn.Module) -> bool:
    """Whether FSDP2 shards a module, whose weights may be gathered now."""
    return hasattr(part, "unshard")


def _hiding(part: nn.Module, layers: Sequence[tuple[nn.Module, "_Layer"]]) -> Callable[..., None]:
    """A hook that hides the weights of a part's layers, until these run."""
    inside = {*part.modules()} - {part}
    own = [(owner, layer) for owner, layer in layers if owner in inside]

    def hide(*_: Any) -> None:
        for owner, layer in own:
            layer.hide(owner)

    return hide


class _Layer:
    """The hooks of a layer around its forward pass."""

    def __init__(
        self,
        path: str,
        name: str,
        leaf: Tensor,
        weights: _Weights,
        alive: _Alive,
        plain: bool,
        shards: bool,
        dropping: Any,
    ) -> None:
        self._path, self._name, self._leaf, self._weights, self._alive = path, name, leaf, weights, alive
        self._plain, self._dropping = plain, dropping
        self._apart = shards or (path.endswith(WEIGHT) and tree.compute_dtype(leaf) != leaf.dtype)
        self.idle = leaf if plain else Absent(leaf, path, LATER)
        self._now: Tensor | None = None

    def hide(self, layer: nn.Module) -> None:
        """Put the placeholder in the place of the weight that FSDP2 has put there, gathered or a shard."""
        now = layer._parameters[self._name]
        if now is not None and now is not self.idle:
            self._leaf = now
            layer._parameters[self._name] = self.idle  # type: ignore[assignment]

    def reveal(self, layer: nn.Module) -> None:
        """Put the weight back in the place of the placeholder; where FSDP2 has replaced this, nothing."""
        if layer._parameters[self._name] is self.idle:
            layer._parameters[self._name] = self._leaf  # type: ignore[assignment]

    def enter(self, layer: nn.Module, _: Any) -> None:
        """Put the weight in place before the layer runs."""
        if self._apart:
            self.hide(layer)  # a block that the backward pass runs again has weights that FSDP2 has gathered since
            weight = self._leaf
            if self._dropping is not None:
                self._dropping.elsewhere.add(self._path)
        else:
            weight = self._now = self._made(self._merged)  # kept, so that its address is no other tensor's
        layer._parameters[self._name] = weight  # type: ignore[assignment]

    def leave(self, layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Any) -> Any:
        """Remove the weight after the layer ran, or failed."""
        layer._parameters[self._name] = self.idle  # type: ignore[assignment]
        if self._now is not None:
            self._alive.drop(self._now)
            self._now = None
        if not self._apart:
            return None
        if self._dropping is not None:
            self._dropping.elsewhere.discard(self._path)
        return None if output is None else output + self._product(next(iter((*args, *named.values()))))

    def _product(self, x: Tensor) -> Tensor:
        """The layer's update on its input."""
        weights, path = self._weights, self._path
        seen = x if self._dropping is None else self._dropping.dropped(path, x)
        if not weights.simulated:
            down, up = (weights.adapters[layer_of(path) + name].to(x.dtype) for name in (A, B))
            return linear(linear(seen, down), up) * weights.lora.scaling
        update = self._made(lambda: weights.update(path).to(self._leaf.dtype))
        product = seen @ (update if path in weights.lora.transposed else update.T)
        self._alive.drop(update)
        return product

    def _made(self, make: Callable[[], Tensor]) -> Tensor:
        weight = make()
        if not self._plain:
            self._alive.add(weight, make, lambda: self._weights.versions(self._path))
        return weight

    def _merged(self) -> Tensor:
        return self._weights.merged(self._path).to(self._leaf.dtype)
