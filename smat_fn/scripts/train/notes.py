"""Notes and warnings of a training run: on its rows, its settings, and what it has changed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ... import tree
from ...analyses.diagnose import unmoved
from ...config import MethodConfig, Training, settings
from ...simulation.relative import beside_update
from ...suites import Suite
from ...types import Params
from .loop import schedules
from .noise_level import update_rms
from .variants import without_auto


def cut_notes(suite: Suite, tasks: Sequence[str]) -> list[str]:
    """Notes on training rows whose answers are cut, so that they are not learned whole, and on split texts."""
    if suite.cuts is None:
        return []
    notes = []
    for task, cut in ((task, suite.cuts(task)) for task in tasks):
        if cut.rows > cut.texts > 0:
            notes.append(
                f"note: some of the {cut.texts} training texts of {task} have more than max_length "
                f"{suite.recipe['max_length']} tokens: all are trained as {cut.rows} windows"
            )
        shares = cut.eos, cut.answer, cut.whole_answer, cut.middle
        cut_rows, part, whole, middle = (round(share * cut.rows) for share in shares)
        count = max(cut_rows, part)
        # not of encoder-decoders, which lose answers alone
        kept = count - middle if cut_rows and suite.recipe.get("truncate", "right") == "right" else 0
        other = "--suite-options truncate prompt-middle"
        way = f", or {other}, keeps answers" if kept == count else " keeps answers"
        way += f", {other} those of {kept} of these rows" if 0 < kept < count else ""
        if count:
            notes.append(
                f"note: {count} of the {cut.rows} training rows of {task} {'is' if count == 1 else 'are'} cut at "
                f"max_length {suite.recipe['max_length']}, {max(part - whole, 0)} of them within the answer, {whole} "
                f"before it: --max-length {cut.longest}{way}"
            )
    return notes


def never_simulated(method: MethodConfig, steps: Mapping[str, int]) -> list[str]:
    """A warning about tasks with fewer steps than SMAT's period, none of which would be simulated."""
    period = settings(method).get("period")
    short = [f"{task} ({n} steps)" for task, n in steps.items() if method.name == "smat" and period and n < period]
    way = "this trains as ft does: give more --steps, or a smaller --period"
    return [f"warning: no step of {', '.join(short)} is simulated with period {period}; {way}"] if short else []


def coarse_line(base: Mapping[str, Tensor], method: MethodConfig, training: Training, *, above: float = 0.0) -> str:
    """The weights whose dtype is too coarse for SMAT's noise, or an empty text if their share is at most ``above``.

    Not of adapters, whose noise is not rounded into weights, nor of a sigma in other units than those of weights.
    """
    own = settings(without_auto(method))
    if not (sigma := own.get("sigma")) or own.get("sigma_of", "weights") != "weights" or training.lora is not None:
        return ""
    weights = tree.cast(base, torch.bfloat16) if training.precision in ("mixed", "bf16") else base
    still, size = unmoved(weights, sigma, own.get("noise", "uniform")), sum(leaf.numel() for leaf in weights.values())
    if still <= above * size:
        return ""
    return f"Perturb cannot move {still:,} of {size:,} parameters: their dtype is too coarse there"


def still_line(training: Training, params: Params, base: Params, largest_norm: float | None) -> str:
    """Why training changed no parameter, and the way out; an empty text where one differs from base.

    Args: largest_norm: of the gradients that the log has read, None for none.
    """
    found = tree.flatten(params)
    if not all(torch.equal(found.get(path, leaf), leaf) for path, leaf in tree.flatten(base).items()):
        return ""
    if not any(float(rate(step)) for rate in schedules(training).values() for step in range(training.length)):
        cause = "the learning rate is 0 in every step: give another --lr, or less --warmup"
    elif largest_norm == 0:
        cause = (
            "every gradient is 0: no trained parameter reaches the loss (--dry-run lists them), or no row has a label"
        )
    elif training.dev is not None:
        cause = "the best evaluation is of weights equal to base's: leave --eval-every out, or give more --lr"
    else:
        cause = "updates are smaller than the weights' dtype resolves: give more --lr or --steps, or --precision mixed"
    return f"training changed no parameter, the expert equals the base: {cause}"


def sigma_line(method: MethodConfig, training: Training, params: Params, base: Params) -> str:
    """Sigma of SMAT beside the RMS of the update that it trained, with a warning where they are far apart.

    An empty text for other methods, and where sigma is not in units of weights.
    """
    own = settings(method)
    factors = training.lora is not None and training.lora.simulate == "factors"
    if method.name != "smat" or not (sigma := own.get("sigma")) or own.get("sigma_of") or factors:
        return ""
    update = update_rms(params, base)
    if not update:
        return ""  # `still_line` says why
    line, far = beside_update(sigma, update)
    return f"warning: {line}, far from 1 for this run; `python eval.py diagnose RUN` suggests one" if far else line
