"""Checks of a merge of folders before any work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ... import checkpoint, tree
from ...config import Dare, Della, MergerConfig, Ties, WeightAverage
from .._inputs import _fit_problems, _short, coef_problems, drop_problems, key_problems, problems_of
from ..della import _problems as della_problems
from ..ties import _problems as ties_problems
from .pieces import Job, target
from .reading import Folder, open_folder
from .writing import Shard, layout

OutDtype: TypeAlias = Literal["same", "float32", "bfloat16", "float16", "float64"]
_OUT: dict[str, torch.dtype | None] = {
    "same": None,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def prepare(
    config: MergerConfig,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    coef: float | None,
    key: Tensor | None,
    out_dtype: str,
    shard_size: int,
    chunk: int,
    overwrite: bool,
) -> tuple[Job, list[Shard]]:
    """The job and the files of its output. Raises: ValueError that lists every problem of options and headers."""
    coef = getattr(config, "coef", None) if coef is None else coef
    problems = _option_problems(config, coef, key, out_dtype, shard_size, chunk)
    problems += problems_of(lambda: checkpoint.refuse_existing(out, overwrite=overwrite))
    problems += [
        f"out is {out}, which is, holds or lies in {path}: choose another folder"
        for path in map(Path, (base, *experts.values()))
        if _overlap(out, path)
    ]
    if not experts:
        problems.append("experts is empty: pass at least one")
    opened: dict[str, Folder] = {}
    for label, path in {"base": base, **{f"expert {name!r}": path for name, path in experts.items()}}.items():
        try:
            opened[label] = open_folder(label, Path(path))
        except ValueError as error:
            problems.append(str(error))
    start = opened.get("base")
    found = {name: opened[f"expert {name!r}"] for name in experts if f"expert {name!r}" in opened}
    if start is not None:
        problems += _fit_problems(start.leaves, "base", {name: folder.leaves for name, folder in found.items()})
        if isinstance(config, WeightAverage):
            problems += _buffer_problems(start, found)
    tree.raise_problems(problems)
    assert start is not None
    masks = key if isinstance(config, (Dare, Della)) else None
    gamma = 1.0 if isinstance(config, WeightAverage) or coef is None else float(coef)
    job = Job(config, gamma, masks, start, found, _OUT[out_dtype], chunk)
    like = {path: leaf.to(target(job, path)) for path, leaf in start.leaves.items()}
    return job, layout(like, shard_size)


def _option_problems(
    config: MergerConfig, coef: float | None, key: Tensor | None, out_dtype: str, shard_size: int, chunk: int
) -> list[str]:
    sizes = {"shard_size": shard_size, "chunk": chunk}
    problems = [f"{name} is {value}, must be at least 1" for name, value in sizes.items() if value < 1]
    if out_dtype not in _OUT:
        problems.append(f"out_dtype is {out_dtype!r}, must be one of {', '.join(_OUT)}")
    if isinstance(config, WeightAverage):
        return problems + ([] if coef is None else [f"coef is {coef}, but the average has none: leave it out"])
    problems += ["coef is not set: pass one"] if coef is None else coef_problems(coef)
    unset = [name for name, value in vars(config).items() if value is None and name != "coef"]
    problems += [f"{name} of {config.name} is not set: smat_fn.config.resolve takes it from a preset" for name in unset]
    if isinstance(config, (Dare, Della)):
        problems += ["key is not set: make one by smat_fn.random.key(seed)"] if key is None else key_problems(key)
    if unset:
        return problems
    match config:
        case Dare():
            problems += drop_problems(config.drop_prob)  # type: ignore[arg-type]
        case Della():
            problems += della_problems(config.drop_prob, config.window)  # type: ignore[arg-type]
        case Ties():
            problems += ties_problems(config.keep, config.aggregate, config.scope)  # type: ignore[arg-type]
    return problems


def _overlap(out: Path, path: Path) -> bool:
    a, b = out.resolve(), path.resolve()
    return a == b or a in b.parents or b in a.parents


def _buffer_problems(start: Folder, experts: Mapping[str, Folder]) -> list[str]:
    """WA takes non-floating leaves from the experts."""
    return [
        f"leaf {path!r} is {_short(folder.leaves[path])} in {folder.label} but {_short(leaf)} in base: cast one of them"
        for folder in experts.values()
        for path, leaf in start.leaves.items()
        if not leaf.is_floating_point() and path in folder.leaves
        if not folder.leaves[path].is_floating_point() and folder.leaves[path].dtype != leaf.dtype
    ]
