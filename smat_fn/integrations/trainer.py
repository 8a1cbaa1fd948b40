"""SMAT inside ``transformers.Trainer``, and inside the trainers that build on it (TRL).

trainer = SFTTrainer(model, ...)
attach(trainer, key=random.key(0), sigma=2e-3)
trainer.train()
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import errors, tree
from ..mat.simulated import SimulatedWeights
from ..mat.smat import is_simulated
from ..random import fold_in
from ..simulation import Draw, draw
from ..simulation.state import all_off, draw_problems
from ..types import Noise, Params, Where
from ..where import block_linear


class Attached:
    """What `attach` did to a trainer. ``draw`` is that of the last simulated step."""

    def __init__(
        self,
        trainer: Any,
        base: dict[str, Tensor],
        where: Where,
        make: Callable[[int], Draw],
        simulated: Callable[[int], bool],
    ) -> None:
        self.draw: Draw | None = None
        self._trainer, self._make, self._simulated = trainer, make, simulated
        self._leaves = leaves_of(trainer.model)
        self._weights = SimulatedWeights(self._leaves, base, where=where)
        self._step = -1  # that of the draw
        self._original = trainer.training_step
        trainer.training_step = self._training_step

    def detach(self) -> None:
        """Plain training again."""
        self._trainer.training_step = self._original

    def _training_step(self, *args: Any, **options: Any) -> Any:
        trainer, step = self._trainer, self._trainer.state.global_step
        if not self._simulated(step):
            return self._original(*args, **options)
        if step != self._step or self.draw is None:  # one draw for all micro-batches of an optimizer step
            self.draw, self._step = self._make(step), step
        with self._weights.at(self.draw):
            result = self._original(*args, **options)
        if trainer.accelerator.sync_gradients:  # the last micro-batch: the sum is complete, clipping is next
            grads = {path: p.grad for path, p in self._leaves.items() if p.grad is not None}
            self._weights.reweight(grads, self.draw)
            self._step = -1  # training may begin anew, from this step on
        return result


def attach(
    trainer: Any,
    *,
    key: Tensor,
    base: Params | None = None,
    where: Where | None = None,
    alpha_min: float = 0.2,
    drop_prob: float = 0.5,
    sigma: float = 2e-3,
    period: int = 4,
    noise: Noise = "uniform",
) -> Attached:
    r"""Turns the training that a ``transformers.Trainer`` does into SMAT; everything else stays the trainer's.

    Optimizer step s, counted from 0, with ``(s + 1) % period == 0`` runs forward and backward of all its micro-batches
    at ``theta~ = theta_0 + alpha m (.) (theta - theta_0) + epsilon`` and multiplies the accumulated gradient by
    ``alpha m`` before it is clipped (Eqs. smat-state, smat-gradient). The parameters hold theta~ inside
    ``training_step`` alone: optimizer, evaluation, saving and error handling see theta. The draw of step s is
    ``draw(fold_in(key, s), ...)``, so that a resumed run has the same draws.

    Args:
        trainer: with its model in place; wrapped models (DDP), accumulation, checkpointing, mixed precision and
            compiled models are fine.
        key: the run key, int64 (2,).
        base: theta_0 by parameter name; None: a copy of the trainable weights as they are now (before a checkpoint is
            resumed, these are the pretrained ones).
        where: the masked set; None: `smat_fn.where.block_linear` of the model.
        alpha_min, drop_prob, sigma, period, noise: as in `smat_fn.mat.smat.build`.

    Returns:
        A handle with ``detach()``.

    Raises:
        ValueError: lists bad options, a base that does not match, weights sharded by FSDP or DeepSpeed.

    Source: paper sections 4.1 to 4.3. Memory: theta_0 and theta~ beside the model.
    """
    problems = draw_problems(alpha_min, drop_prob, sigma, noise)
    if not (isinstance(period, int) and period >= 1):
        problems.append(f"period is {period}, must be an integer of at least 1 (1 simulates every step)")
    sharded = [name for name in ("fsdp", "deepspeed") if getattr(trainer, f"is_{name}_enabled", False)]
    problems += [f"the trainer shards its weights by {name}: attach cannot switch them" for name in sharded]
    leaves = leaves_of(trainer.model)
    problems += [] if leaves else ["the trainer's model has no trainable parameter"]
    errors.raise_problems(problems)
    if base is None:
        base = {path: p.detach().clone() for path, p in leaves.items()}
    tree.check_same(leaves, "the trainer's model", base=base)

    def make(step: int) -> Draw:
        return draw(fold_in(key, step), alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma, noise=noise)

    off = all_off(alpha_min, drop_prob, sigma)  # then every step is clean: theta~ would differ from theta by rounding

    def simulated(step: int) -> bool:
        return not off and is_simulated(step, period)

    own = {path: leaf.to(leaves[path].device) for path, leaf in tree.flatten(base).items()}
    return Attached(trainer, own, where or block_linear(trainer.model), make, simulated)


def leaves_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
