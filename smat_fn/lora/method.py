"""SMAT on adapters, the simulated state taken on the merged weight."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .. import random, tree
from ..grad import keyed
from ..mat import smat
from ..mat.simulated import simulated_gradient
from ..types import LossFn, Method, Optimizer, Where
from ..where import mask_problems
from .adapters import Lora, init
from .loss import with_lora


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
        around: made of every loss of the adapters (`smat_fn.parallel.replicated`).
        options: max_grad_norm, alpha_min, drop_prob, sigma, period, noise, engine, donate, as in
            `smat_fn.mat.smat.build`.

    Returns:
        Method over adapters: ``init(lora.init(...))``. Memory: the adapted matrices once more while a step runs, and no
        optimizer state for them.

    Raises:
        ValueError: lists every bad argument, and in ``init`` for adapters of other names or shapes.
    """
    like = tree.tree_map(lambda leaf: leaf.to("meta"), init(random.key(0), base, lora))
    at_simulated = simulated_gradient(
        None, base, engine=options.get("engine", "autograd"),
        loss_at=lambda drawn: keyed(around(with_lora(loss_fn, base, lora, drawn=drawn, where=where))),
    )  # fmt: skip
    adapted = {path: base[path] for path in lora.paths}
    return smat.build_from(
        around(with_lora(loss_fn, base, lora)), at_simulated, optimizer, like,
        problems=mask_problems(where, adapted, options.get("drop_prob", 0.5)), **options,
    )  # fmt: skip
