"""The weights of a checkpoint as its suite takes them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import checkpoint, errors, lora, tree
from ...folders.inputs.adapters.peft import is_adapter
from ...folders.inputs.opening import read_inputs
from ...folders.multi_task import is_several, task_params
from ...suites import Suite
from ...types import Params
from ..manifests import check_weights
from ..merge.experts.whole_models import lacking_problems, suite_part, whole_base
from .models import FOREIGN, Model


def weights_of(model: Model, report: Callable[[str], None]) -> Iterator[tuple[tuple[str, ...], Params, str]]:
    """The weights in a folder, their tasks, and their fingerprint if it is known; of several models one for each task.

    Raises: ValueError for weights that are not those of the manifest.
    """
    folder, manifest, suite, *_ = model
    base = suite.base
    if manifest["kind"] == "merged" and manifest["base_fingerprint"] != model.base:
        base = whole_base(suite) or base  # merged from whole models, as `suited` has checked
    if is_several(folder):
        check_weights(folder, manifest)
        for task in model.tasks:
            yield (task,), _of_suite(folder, task_params(folder, task, base), suite, base), ""
        return
    known = ""
    if FOREIGN in manifest:
        leaves = _foreign_leaves(Path(manifest[FOREIGN]), manifest["task"], suite, report)
    elif manifest["kind"] == "merged":
        read = checkpoint.load_leaves(folder)[0]
        known = _checked(folder, manifest, read)
        leaves = _of_suite(folder, read, suite, base)
        known = known if leaves is read else ""
    else:
        params = lora.load_expert(folder, suite.base)[0]
        yield model.tasks, params, _checked(folder, manifest, params)
        return
    if narrow := _narrower(leaves, suite.base):
        names = ", ".join(sorted({tree.dtype_name(leaf) for leaf in narrow.values()}))
        report(f"note: {folder} has parameters in {names}: scored in the wider dtype of its suite")
    leaves |= {path: leaf.to(suite.base[path].dtype) for path, leaf in narrow.items()}
    tree.check_same(suite.base, "the base", **{str(folder): leaves})
    for path, leaf in leaves.items():
        if leaf.dtype != (dtype := suite.base[path].dtype):
            raise ValueError(f"{folder} has {path!r} in {leaf.dtype}, its suite in {dtype}: merge again in that dtype")
    yield model.tasks, leaves, "" if narrow else known


def _checked(folder: Path, manifest: Mapping[str, Any], params: Params) -> str:
    """The fingerprint of weights that were read. Raises: ValueError for others than those of the manifest."""
    found = checkpoint.fingerprint(params)
    check_weights(folder, manifest, None if is_adapter(folder) else found)
    return found


def _foreign_leaves(folder: Path, task: str, suite: Suite, report: Callable[[str], None]) -> dict[str, Tensor]:
    """The leaves of an expert of another tool, as a merge in memory reads them. Raises: ValueError as `read_inputs`."""
    if "model" not in suite.recipe:
        raise ValueError(f"{folder} cannot be read as an expert of suite {suite.name!r}, which has no model's folder")
    notes = list[str]()
    stand_ins: dict[str, list[str]] | None = {} if getattr(suite, "OWN_HEADS", False) else None
    so = "it is scored with base's tokenizer"
    start, found = read_inputs(Path(suite.recipe["model"]), {task: folder}, notes, stand_ins=stand_ins, so=so)
    part = None if start.keys() == suite.base.keys() else suite_part(suite, start)
    errors.raise_problems(lacking_problems(str(folder), (stand_ins or {}).get(task, ()), suite, part))
    leaves = _of_suite(folder, found[task], suite, start)
    rounded = {
        tree.dtype_name(suite.base[path])
        for path, leaf in leaves.items()
        if leaf.is_floating_point() and path in suite.base
        if torch.promote_types(leaf.dtype, suite.base[path].dtype) != suite.base[path].dtype
    }
    notes += [f"{folder} is rounded to {', '.join(sorted(rounded))}, the dtype of its suite"] if rounded else []
    for line in notes:
        report(f"note: {line}")
    return {
        path: leaf.to(suite.base[path].dtype) if leaf.is_floating_point() and path in suite.base else leaf
        for path, leaf in leaves.items()
    }


def _of_suite(folder: Path, leaves: dict[str, Tensor], suite: Suite, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves that a suite takes of a model. Raises: ValueError as `suite_part` and `SuitePart.check` do."""
    if base.keys() == suite.base.keys():
        return leaves
    part = suite_part(suite, base)
    part.check(str(folder), leaves)
    return part.of(leaves)


def _narrower(leaves: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point leaves that base's dtype holds exactly and that have another, as --out-dtype writes them."""
    return {
        path: leaf
        for path, leaf in leaves.items()
        if leaf.is_floating_point() and path in base and leaf.dtype != base[path].dtype
        if torch.promote_types(leaf.dtype, base[path].dtype) == base[path].dtype
    }
