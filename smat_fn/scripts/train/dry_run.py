"""What a run would train, as text."""

from collections.abc import Sequence

from ...analyses.diagnose import unmoved
from ...config import MethodConfig, Training, settings
from ...grad import ModuleLoss
from ...models import inspect
from ...suites import Suite
from .loop import budget


def dry_run(suite: Suite, method: MethodConfig, training: Training, *, tasks: Sequence[str], seed: int) -> str:
    """Settings of suite, method and optimizer, the leaves, and per task the steps and the share of cut rows.

    Raises: ValueError for rows that the suite cannot use.
    """
    shared = {n: value for n, value in vars(training).items() if n not in ("steps", "epochs")}
    shared = {name: value for name, value in shared.items() if value is not None and value is not False}
    lines = [
        f"suite {suite.name}: {_listed(suite.recipe, 'name')}",
        f"method {method.name}: {_listed(settings(method)) or 'no options'}",
        f"training: {_listed(shared)}, run seed {seed}",
        "",
    ]
    loss = suite.loss_fn(tasks[0])
    assert isinstance(loss, ModuleLoss)
    lines += [inspect.table(inspect.describe_leaves(loss.module, suite.where)), ""]
    if sigma := settings(method).get("sigma"):
        still, size = unmoved(suite.base, sigma), sum(leaf.numel() for leaf in suite.base.values())
        if still:
            lines += [f"Perturb cannot move {still:,} of {size:,} parameters: their dtype is too coarse there", ""]
    total = 0
    for task in tasks:
        own = budget(suite, task, training)
        assert own.steps is not None
        total += own.steps
        line = f"{task}: {own.steps} steps" + (f" ({own.epochs[task]} epochs)" if own.epochs else "")
        if suite.cuts is not None:
            cut = suite.cuts(task)
            line += (
                f", {cut.rows} rows of up to {cut.longest} tokens; cut on the right: EOS {cut.eos:.1%}, "
                f"of the answer a part {cut.answer:.1%}, all {cut.whole_answer:.1%}"
            )
        lines.append(line)
    return "\n".join([*lines, f"{total} steps in all"])


def _listed(values: object, *without: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in dict(values).items() if name not in without)  # type: ignore[call-overload]
