"""SMAT on adapters, the simulated state taken on the merged weight."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import random, tree
from ..grad import value_and_grad
from ..mat import _step
from ..mat.smat import Info, is_simulated
from ..simulation.draws import check_strengths, draw
from ..types import Batch, Engine, LossFn, Method, Noise, Optimizer, Where
from .adapters import Lora, init
from .loss import with_lora


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Mapping[str, Tensor],
    lora: Lora,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    alpha_min: float = 0.2,
    drop_prob: float = 0.5,
    sigma: float = 2e-3,
    period: int = 4,
    noise: Noise = "uniform",
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""SMAT whose parameters are adapters: every period-th step at ``W_0 + alpha m (.) s B A + epsilon``.

    A merger scales, prunes and disturbs the task vector ``s B A`` of the merged weight, not A and B: the product of a
    disturbed A and a disturbed B is another distribution. Clean steps are plain LoRA training. To disturb A and B
    themselves instead, which is cheaper, give ``with_lora(loss_fn, base, lora)`` and the adapters to
    `smat_fn.mat.smat.build`. All other methods take `with_lora` in the same way.

    Args: loss_fn: of the full tree; base: theta_0, all leaves; others as in `smat_fn.mat.smat.build`.
    Returns: Method over adapters: ``init(lora.init(...))``. Memory: the adapted matrices once more while a step runs,
        and no optimizer state for them.
    Raises: ValueError that lists every bad argument, and in ``init`` for adapters of other names or shapes.
    """
    problems = _step.check(optimizer, max_grad_norm, engine) + check_strengths(alpha_min, drop_prob, sigma, noise)
    if not (isinstance(period, int) and period >= 1):
        problems.append(f"period is {period}, must be an integer of at least 1 (1 simulates every step)")
    if problems:
        raise ValueError("smat: " + "; ".join(problems))
    clean = value_and_grad(with_lora(loss_fn, base, lora), engine=engine)
    off = alpha_min == 1 and drop_prob == 0 and sigma == 0

    def update(key: Tensor, state: _step.State, batch: Batch) -> tuple[_step.State, Info]:
        simulated, at, scale = not off and is_simulated(state.step, period), clean, torch.ones(())
        if simulated:
            own = random.fold_in(key, state.step)
            drawn = draw(own, alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma, noise=noise)
            at = value_and_grad(with_lora(loss_fn, base, lora, drawn=drawn, where=where), engine=engine)
            scale = drawn.scale
        loss, aux, grads = _step.accumulate(at, state.params, batch)
        state, norm = _step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm, scale, simulated)

    like = tree.tree_map(lambda leaf: leaf.to("meta"), init(random.key(0), base, lora))
    return Method(_step.init(optimizer, like, donate=donate), update)
