"""The run of a multi-task model, which is trained as the expert of one task that has the batches of all."""

from dataclasses import replace

from ...config import Training
from ...errors import problems_of, raise_problems
from ...suites import Suite
from ...suites.joint import joint
from .loop import budget
from .options import RunOptions


def joint_run(suite: Suite, training: Training, run: RunOptions) -> tuple[Suite, Training, RunOptions]:
    """Arguments of `train_run` that train one model on all tasks of ``run.joint``, in the order of the suite.

    Args: training: with the steps, or the epochs, of each task; its schedule and warm-up become those of all steps.
    Raises: ValueError as `budget` and `suites.joint.joint`.
    """
    tasks = tuple(task for task in suite.tasks if task in run.joint)
    raise_problems([text for task in tasks for text in problems_of(budget, suite, task, training)])
    steps = {task: budget(suite, task, training).length for task in tasks}
    whole = replace(training, steps=sum(steps.values()), epochs={})
    return joint(suite, steps, seed=run.seed), whole, replace(run, joint=tasks, joint_steps=tuple(steps.values()))
