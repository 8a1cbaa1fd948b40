"""The loss of adapters, and SMAT on them with the simulated state taken on the merged weight."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .. import random, tree
from ..grad import ModuleLoss, keyed, reparametrised
from ..mat import smat
from ..mat.simulated import Composed
from ..simulation import Draw, simulate
from ..types import LossFn, Method, Optimizer, Params, Where
from ..where import mask_problems
from .adapters import Lora, expand, init
from .dropout import dropout_of
from .per_module import PerModule

_DROPOUT = "give lora.with_dropout(loss_fn, base, lora, p), or dataclasses.replace(lora, dropout=0.0)"


def with_lora(
    loss_fn: LossFn, base: Mapping[str, Tensor], lora: Lora, *, drawn: Draw | None = None, where: Where | None = None
) -> LossFn:
    r"""The loss of adapters: ``L(W_0 + s B A)``, or with a draw ``L(W_0 + alpha m (.) s B A + epsilon)``.

    The draw is that of the weights' own paths, on the adapted matrices alone: the state that full fine-tuning would
    simulate there. Gradients reach A and B by the chain rule through `simulate`: with ``G = alpha m (.) grad L``,
    ``s B^T G`` and ``s G A^T``. For any method and engine.

    Args:
        loss_fn: of the full tree. A `ModuleLoss` forms each weight when its layer runs, and in a dtype narrower than
            float32 adds the update in the layer's output (`smat_fn.lora.per_module.PerModule`); any other function gets
            all weights at once, rounded to their dtypes.
        base: theta_0, all leaves.
        where: the masked set, by path of the weights.

    Source: Eqs. smat-state, smat-gradient at ``theta = W_0 + s B A``.
    """

    if isinstance(loss_fn, ModuleLoss):
        return PerModule(loss_fn, base, lora, drawn, where)

    check_base = tree.unchanged(base)

    def weights(adapters: Params) -> dict[str, Tensor]:
        check_base()
        merged = expand(adapters, base, lora)
        if drawn is not None:
            merged = simulate(merged, {path: base[path] for path in merged}, drawn, where=where)
        return {**base, **merged}

    return reparametrised(loss_fn, weights)


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Mapping[str, Tensor],
    lora: Lora,
    *,
    where: Where | None = None,
    around: Callable[[LossFn], LossFn] = lambda loss_fn: loss_fn,
    **options: Any,
) -> Method:
    r"""SMAT whose parameters are adapters: every period-th step at ``W_0 + alpha m (.) s B A + epsilon``.

    A merger scales, prunes and disturbs the task vector ``s B A`` of the merged weight, not A and B: the product of a
    disturbed A and a disturbed B is another distribution. Clean steps are plain LoRA training. To disturb A and B
    themselves instead, which is cheaper, give ``with_lora(loss_fn, base, lora)`` and the adapters to
    `smat_fn.mat.smat.build`. All other methods take `with_lora` in the same way.

    Args:
        loss_fn: of the full tree.
        base: theta_0, all leaves.
        where: the masked set.
        around: wraps every loss of the adapters, as `smat_fn.parallel.replicated` does.
        options: as in `smat_fn.mat.smat.build`, without offload and sigma_of; alpha_depth by the paths of the weights
            and of ``lora.saved``, climb and rho climb in A and B.

    Returns:
        Method over adapters: ``init(lora.init(...))``. Memory: the weight and the gradient of one layer at a time for a
        `ModuleLoss`, and no optimizer state for them.

    Raises:
        ValueError: lists every bad argument, and a dropout of ``lora`` that the loss lacks; in ``init`` for adapters of
            other names or shapes.
    """
    silent = lora.dropout and dropout_of(loss_fn) is None
    problems = [f"lora.dropout is {lora.dropout}, but the loss drops nothing: {_DROPOUT}"] if silent else []
    problems += [
        f"{name} is {options.pop(name)!r}, but adapters are simulated at one weight at a time: leave it out"
        for name in ("offload", "sigma_of")
        if name in options
    ]
    like = tree.tree_map(lambda leaf: leaf.to("meta"), init(random.key(0), base, lora))
    check_base = tree.unchanged(base)

    def loss_at(drawn: Draw) -> LossFn:
        check_base()
        return keyed(around(with_lora(loss_fn, base, lora, drawn=drawn, where=where)))

    at_simulated = Composed(loss_at, options.get("engine", "autograd"))
    simulated = {path: base[path] for path in (*lora.paths, *lora.saved)}
    return smat.build_from(
        around(with_lora(loss_fn, base, lora)), at_simulated, optimizer, like,
        problems=problems + mask_problems(where, simulated, options.get("drop_prob", 0.5)), weights=simulated,
        **options,
    )  # fmt: skip
