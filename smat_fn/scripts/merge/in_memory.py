"""Merge in memory: checked inputs, an optional search on dev, a folder with a model card for each merged model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from ... import checkpoint, errors, merge, random, tree
from ...config import MergerConfig, Ties, settings
from ...errors import problems_of
from ...evaluate import Records, Scorer, score_bar
from ...evaluate.scoring import shares_note
from ...folders import SHARD_SIZE
from ...folders.inputs.stacks import folders_of
from ...folders.prepare import buffers_note, skip_notes
from ...folders.writing import exclusive
from ...merge.around.select import Tuned, best_of, grid_problems
from ...suites import Suite, has_heads
from .. import outcome
from ..manifests import by_other_code
from ..recipes.own import written
from ..recipes.places import sources_text
from .experts.given import by_name
from .experts.inputs import Inputs, depth_problems, facts_of, load_inputs, missing_of, read_statistics
from .experts.suite import made_problems, of_base, row_notes, scoring_suite
from .provenance.card import CARD, card, licenses_of
from .provenance.finished import differences, is_merged, other_order, verify
from .provenance.searched import alike, chosen_text, facts_of_options, facts_of_trials, numbers_text, text_of, trials_of
from .search.candidates import about, fingerprints, with_buffers
from .search.choosing import Merged, is_open, merge_one, sparsities, total
from .search.over import Over, combined, value_problems
from .search.snapshots import choose_snapshot

SAME = "all experts equal the base: the merged model is the base, train longer or give other experts"
# facts that tell merges apart
COMPARED = "merger", "asked", "merge_seed", "suite", "base_fingerprint", "experts", "label"
_NONE: Mapping[Any, Any] = MappingProxyType({})


class Request(NamedTuple):
    """Mergers, inputs, search and output of `merge_run`."""

    configs: Sequence[MergerConfig]  # mergers with their options
    base: Path  # a folder or a hub name
    experts: Sequence[Path]
    out: Path  # folder for the merged models
    search: bool  # choose open coefficients on dev, and score every merged model there
    seed: int  # of random masks
    calibration: Mapping[str, float] = _NONE  # first choose the sparsity of these mergers on dev, at this coefficient
    overwrite: bool = False  # merge again where a folder exists
    options: Mapping[str, Any] = _NONE  # of the suite, instead of those in the experts' manifests
    implied: Mapping[str, Any] = _NONE  # name and options of the suite of experts that name none; its model is base
    coefs: Sequence[float] = ()  # that a search tries; none: the merger's own, `Merger.grid`
    widen: bool = False  # try more as long as the best one is at an edge of those, ten at most
    over: Over = _NONE  # values to try by option, in a search by one merger: ``configs`` may hold any of them
    snapshots: Mapping[int, Sequence[Path]] = _NONE  # of a search: folders by number, ``experts`` the last
    sweeps: int = 0  # over the blocks, after a search, to choose a coefficient for each (`merge.select_coefs`)
    trials: int = 0  # models with other numbers of the experts, tried after a search (`merge.select_numbers`)
    trials_over: Sequence[str] = ("weights",)  # which numbers: "weights", "densities" or both
    lines: tuple[float, float] | None = None  # factors of coefficients at the first and the last block (LiNeS)

    def of(self, config: MergerConfig) -> dict[str, Any]:
        """The request for one merger, as its manifest has it."""
        given = {name: value for name, value in settings(config).items() if name not in self.over}
        own: dict[str, Any] = {"settings": given, "calibration": self.calibration.get(config.name)}
        own |= {"over": {name: list(values) for name, values in self.over.items()}} if self.over else {}
        tried = self.coefs or (config.grid if self.search and config.grid != merge.COEFS else ())
        own |= {"coefs": sorted(tried)} if tried else {}
        own |= {"sweeps": self.sweeps} if self.sweeps else {}
        own |= {"trials": self.trials} if self.trials else {}
        own |= {"trials_over": list(self.trials_over)} if self.trials and [*self.trials_over] != ["weights"] else {}
        own |= {"snapshots": _prints(self.snapshots)} if self.snapshots else {}
        own |= {"search": self.search, "suite": dict(self.options), **({"widen": True} if self.widen else {})}
        return own | ({} if self.lines is None else {"lines": list(self.lines)})


def merge_run(asked: Request, report: Callable[[str], None] = lambda line: None) -> dict[Path, Merged]:
    """Merge by each merger into ``out/<merger>``.

    Scores of a search are kept in ``out/scores.jsonl`` as they come: an interrupted search resumes from there, and the
    next one on the same inputs finds them (`Scorer`). A folder that holds this very merge, by its manifest and its
    bytes, stays as it is.

    Args: report: called with a line for each combination of ``over``, and those of `summary`, as soon as they are
        known.
    Returns: merged models by folder.
    Raises: ValueError that lists all problems of inputs, options and outputs before any merging.
    """
    inputs, suite, facts, kept = _checked(asked)
    note = ""
    if len(kept) < len(asked.configs):
        sizes = merge.norms(inputs.base, inputs.experts)
        note = merge.norms_note(sizes) if any(sizes.values()) else SAME
        for said in suite.notes if suite is not None else ():
            report(f"note: {said}")
    folders = {asked.out / config.name: config for config in asked.configs}
    with score_bar() as bar:
        scorer = None if suite is None else Scorer(suite, Records(asked.out), about=about(inputs), bar=bar)
        for folder, config in folders.items():
            if folder not in kept:
                with exclusive(folder):
                    kept |= _finished_meanwhile(folder, asked, facts)
                    if folder not in kept:
                        own = facts[config.name]
                        kept[folder] = _merged(config, asked, inputs, scorer, note=note, facts=own, report=report)
            for line in summary({folder: kept[folder]}):
                report(line)
    return {folder: kept[folder] for folder in folders}


def _checked(asked: Request) -> tuple[Inputs, Suite | None, dict[str, dict[str, Any]], dict[Path, Merged]]:
    """Inputs, the suite that scores, the facts of each merger, and merged models that are there already.

    Raises: ValueError that lists all problems of inputs, options and outputs.
    """
    base, experts, configs, lines = asked.base, asked.experts, asked.configs, asked.lines
    problems, sources, names = list[str](), dict[str, Any](), [str(place) for place in range(max(1, len(experts)))]
    early = _early_problems(asked)
    if asked.over and (wrong := _over_problems(asked)):
        errors.raise_problems([*early, *wrong])
    with errors.collected(problems):
        implied = of_base(asked.implied, base)
        named = {**implied, **asked.options}.get("name")
        based, heads = any(config.based for config in configs), named is not None and has_heads(named)
        inputs = load_inputs(base, experts, heads=heads, based=based)._replace(lines=lines)
        names, scored = list(inputs.experts), (asked.search or asked.calibration) and not early  # suites load slowly
        suite = scoring_suite(inputs, asked.options, implied) if scored else None
        if suite is not None:
            others = [name for name, manifest in inputs.manifests.items() if not manifest]
            errors.raise_problems(made_problems(suite, others, "dev"))
            inputs = inputs._replace(notes=(*inputs.notes, *row_notes(suite, inputs.manifests)))
        sources = sources_of(base, experts, inputs, asked.seed, suite)
    wrong = [] if asked.over else _option_problems(configs, names, asked.search, asked.calibration)
    problems = [*early, *wrong, *problems]
    if lines is not None:
        problems += depth_problems(configs, lines)
        problems += problems_of(lambda: merge.lines_coefs(inputs.base, low=0.0, high=1.0)) if sources else []
    if sources and suite is not None and suite.content is not None:
        sources |= {"dev_content": {task: suite.content(task, "dev") for task in names}}
    facts = dict[str, dict[str, Any]]()
    for config in configs:
        own = asked.of(config)
        kinds = {one.statistics(): one for one in combined(config, asked.over)} if sources else {}
        for kind, one in kinds.items():
            if kind is not None:
                with errors.collected(problems):
                    found = fingerprints(read_statistics(one, inputs) or {})
                    own["statistics"] = found if len(kinds) == 1 else {**own.get("statistics", {}), kind: found}
                    errors.raise_problems(missing_of(one, asked.snapshots))
        facts[config.name] = {"merger": config.name, "asked": own, **sources}
    kept = {} if asked.overwrite or early else _finished(asked.out, facts, problems)
    errors.raise_problems(list(dict.fromkeys(problems)))
    return inputs, suite, facts, kept


def _merged(
    config: MergerConfig,
    asked: Request,
    inputs: Inputs,
    scorer: Scorer | None,
    *,
    note: str,
    facts: dict[str, Any],
    report: Callable[[str], None],
) -> Merged:
    """The model of one merger, in its folder. Args: note: on all experts; facts: of its manifest; report: a line."""
    merge_at = partial(
        merge_one, config, seed=asked.seed, coefs=asked.coefs, widen=asked.widen,
        calibration=asked.calibration.get(config.name), sweeps=asked.sweeps, trials=asked.trials,
        trials_over=asked.trials_over, over=asked.over, report=report,
    )  # fmt: skip
    if asked.snapshots:
        assert scorer is not None
        # scores of one snapshot's experts are kept with those of the others
        model, inputs, chosen = choose_snapshot(
            asked.base, asked.snapshots, inputs, lambda own: merge_at(own, scorer=scorer.of(about(own)))
        )
        model, folders = model._replace(snapshot=chosen["index"]), asked.snapshots[chosen["index"]]
        facts |= sources_of(asked.base, folders, inputs, asked.seed, scorer.suite) | {"snapshot": chosen}
    else:
        model = merge_at(inputs, scorer=scorer)
    notes = [*inputs.notes, *notes_of(config, inputs), note if config.based else "", *tied(model)]
    model = model._replace(notes=tuple(filter(None, [*notes, shares_note(model.dev.values())])))
    _write(asked.out / config.name, config, model, asked.base, inputs, overwrite=asked.overwrite, facts=facts)
    return model


def notes_of(config: MergerConfig, inputs: Inputs) -> list[str]:
    """The notes of a merge of these inputs on disk by one merger: buffers, and globs without a match."""
    floating = [path for path, leaf in inputs.base.items() if leaf.is_floating_point()]
    notes = skip_notes(config, floating)
    if not config.based:
        return [*notes, *filter(None, [with_buffers(inputs)[1]])]
    unlike = {
        path
        for path, leaf in inputs.base.items()
        if not leaf.is_floating_point() and not path.endswith("num_batches_tracked")
        if any(other[path].dtype != leaf.dtype or not leaf.equal(other[path]) for other in inputs.experts.values())
    }
    return notes + ([buffers_note(unlike, "differs from base's in an expert")] if unlike else [])


def by_depth(coefs: Mapping[str, float], inputs: Inputs) -> Mapping[str, float]:
    """Coefficients by block times the factors of depth that their vector was multiplied by, if there are any."""
    if inputs.lines is None:
        return coefs
    floating = [path for path, leaf in inputs.base.items() if leaf.is_floating_point()]
    factors = merge.lines_coefs(floating, low=inputs.lines[0], high=inputs.lines[1])
    of_block = {block: factors[path] for path, block in merge.blocks_of(floating).items()}
    return {block: coef * of_block[block] for block, coef in coefs.items()}


def globs(coefs: Mapping[str, float]) -> dict[str, float]:
    """Coefficients by block as --coefs takes them; that of leaves outside of blocks is the last."""
    every = {f"{block}.*": coef for block, coef in coefs.items() if block}
    return every | ({"*": coefs[""]} if "" in coefs else {})


def _prints(snapshots: Mapping[int, Sequence[Path]]) -> dict[str, list[str]]:
    """The fingerprints of snapshots, by number."""
    return {
        str(index): [checkpoint.load_manifest(folder)["fingerprint"] for folder in folders]
        for index, folders in snapshots.items()
    }


def summary(merged: Mapping[Path, Merged]) -> Iterable[str]:
    """A line for each merged model: its folder, its coefficient and its mean dev score."""
    for folder, model in merged.items():
        coef = "" if model.coef is None or "coef" in model.options else f", coef {model.coef:g}"
        coef += f" ({model.edge} of those tried: --widen or --grid tries more)" if model.edge else ""
        coef += ", then by block" if model.layers else ""
        coef += f", {numbers_text(model.trials.best)}" if model.trials else ""
        coef += f", snapshot {model.snapshot}" if model.snapshot else ""
        score = f", dev {fmean(model.dev.values()):.2f}" if model.dev else ""
        yield f"{'kept' if model.kept else 'merged'}: {folder}{chosen_text(model.tuned)}{coef}{score}"
        facts = {"folder": folder, "coef": model.coef, "dev": dict(model.dev), "kept": model.kept}
        facts |= {"options": model.options} if model.tuned else {}
        outcome.add("merged", facts | (model.trials.best if model.trials else {}))
        yield from (f"note: {note}" for note in model.notes)


def tied(model: Merged) -> list[str]:
    """Notes where all coefficients of a search have one dev score, and where all combinations of options have."""
    notes, way = list[str](), "give more dev rows, another metric"
    if alike([score for _, score in model.curve]):
        same = f"all {len(model.curve)} coefficients have the same dev score, {model.curve[0][1]:.2f}"
        notes.append(f"{same}: {model.coef:g} is only the smallest; {way}, or --coef")
    if alike([own.score for own in model.tuned]):
        same = f"all {len(model.tuned)} combinations of options have the same dev score, {model.tuned[0].score:.2f}"
        notes.append(f"{same}: {text_of(model.options)} is only the first; {way}, or other values")
    return notes


def _early_problems(asked: Request) -> list[str]:
    """Errors for coefficients to search, and for folders that hold no merge, which need no suite to be found."""
    folders = [asked.out / config.name for config in asked.configs]
    taken = [folder for folder in folders if not asked.overwrite and not is_merged(folder)]
    existing = [text for f in taken for text in problems_of(checkpoint.refuse_existing, f, overwrite=False)]
    return grid_problems(asked.coefs) + existing


def _option_problems(
    configs: Sequence[MergerConfig], experts: Sequence[str], search: bool, calibration: Mapping[str, float]
) -> list[str]:
    problems = list[str]()
    for config in configs:
        if not search and is_open(config):
            problems.append(f"{config.name} needs a coefficient: give --coef, or --search for one on dev")
        coef = 0.0 if is_open(config) else None
        if own := problems_of(merge.check_options, config, experts, key=random.key(0), coef=coef):
            problems += own
        elif config.name in calibration:
            for one in sparsities(config, calibration[config.name])[1]:
                found = problems_of(merge.check_options, one, experts, key=random.key(0), coef=None)
                problems += [f"calibration of {config.name}: {text}" for text in found]
    return problems


def _over_problems(asked: Request) -> list[str]:
    """Errors for combinations of options that a search cannot try; no weights are read."""
    problems = list[str]()
    with errors.collected(problems):
        names = [name for name, *_ in by_name(asked.base, asked.experts, None)[0]]
        problems += [text for config in asked.configs for text in value_problems(config, asked.over, names)]
    return problems


def _finished(out: Path, facts: Mapping[str, Mapping[str, Any]], problems: list[str]) -> dict[Path, Merged]:
    """Merged models of these facts that are there. Adds a problem for every folder that holds something else."""
    kept = {}
    for name, wanted in facts.items():
        folder = out / name
        compared = {fact: wanted[fact] for fact in COMPARED if fact in wanted}
        complete = len(compared) == len(COMPARED)
        if "snapshots" in wanted["asked"]:
            compared.pop("experts", None)  # those of the snapshot that was chosen
        known = complete and is_merged(folder)  # less where the inputs have problems
        others = list[str]()
        if known:
            others = differences(folder, compared) or other_order(folder, wanted["experts"])
            others = others or _other_rows(folder, wanted.get("dev_content", {})) or verify(folder)[1]
        if known and not others:
            params, manifest = checkpoint.load_leaves(folder)
            coef, dev = manifest["hyperparameters"].get("coef"), manifest["dev"]
            curve, finals = (tuple((x, y) for x, y in manifest.get(key, ())) for key in ("dev_curve", "dev_finals"))
            edge = merge.grid_edge(coef, [tried for tried, _ in curve]) if curve else ""
            notes = tuple(manifest.get("notes", ()))
            if other := by_other_code(manifest):
                notes = (*notes, f"it was merged before{other}{': its dev score is of that code' if dev else ''}")
            at = manifest.get("snapshot", {}).get("index", 0)
            blocks = tuple((block, tried, score) for block, tried, score in manifest.get("dev_blocks", ()))
            layers = merge.Layered({}, fmean(dev.values()), blocks) if blocks else None  # the folder has the coefs
            tried = trials_of(manifest, "dev")
            trials = merge.Selection(*best_of(tried), tried) if tried else None
            tuned = tuple(
                Tuned(own["options"], own["coef"], own["dev"], tuple((x, y) for x, y in own["curve"]))
                for own in manifest.get("dev_options", ())
            )
            kept[folder] = Merged(
                params, coef, dev, curve, finals, kept=True, notes=notes, edge=edge, snapshot=at, layers=layers,
                trials=trials, tuned=tuned,
            )  # fmt: skip
        else:
            problems += [f"{folder} holds another merge: {other}" for other in others[:1]]
            problems += problems_of(checkpoint.refuse_existing, folder, overwrite=False)
    return kept


def _finished_meanwhile(folder: Path, asked: Request, facts: Mapping[str, Mapping[str, Any]]) -> Mapping[Path, Merged]:
    """The model of one merger, if another process has written it since. Raises: ValueError for another model."""
    if asked.overwrite or not folder.exists():
        return {}
    problems = list[str]()
    found = _finished(asked.out, {folder.name: facts[folder.name]}, problems)
    errors.raise_problems(problems)
    return found


def _other_rows(folder: Path, content: Mapping[str, str]) -> list[str]:
    """An error for tasks whose dev rows, or what scores them, are others than those of the search that wrote a folder.

    A folder of earlier code does not say which they were.
    """
    made = checkpoint.load_manifest(folder).get("dev_content", {})
    changed = [task for task, own in content.items() if made.get(task, own) != own]
    if not changed:
        return []
    return [f"the dev rows of {', '.join(changed)}, or the tokenizer, device or version that scores them, changed"]


def sources_of(base: Path, experts: Sequence[Path], inputs: Inputs, seed: int, suite: Suite | None) -> dict[str, Any]:
    """Facts of a merged model beside its settings; ``suite`` is the one it was searched on."""
    facts = facts_of(base, experts, inputs.manifests, seed)
    prints = {name: known or inputs.print_of(inputs.experts[name]) for name, known in facts["experts"].items()}
    return facts | {
        "suite": facts["suite"] if suite is None else dict(suite.recipe),
        "base_fingerprint": inputs.print_of(inputs.base),
        "experts": prints,
    }


def _write(
    folder: Path,
    config: MergerConfig,
    merged: Merged,
    base: Path,
    inputs: Inputs,
    *,
    overwrite: bool,
    facts: Mapping[str, Any],
) -> None:
    """Save a merged model with its manifest, which includes ``facts``, its model card and its recipe.

    Raises: ValueError for values that are not finite: squares of the experts' may exceed their dtype.
    """
    tree.check_finite(tree.flatten(merged.params), f"the model merged by {config.name}")
    config = replace(merged.calibration.config if merged.calibration else config, **merged.options)
    if merged.trials is not None:
        config = merge.with_numbers(config, merged.trials.best)
    facts = {
        **facts,
        "hyperparameters": {
            **settings(config),
            **({} if merged.coef is None else {"coef": merged.coef}),
            **({} if merged.layers is None else {"coefs": globs(by_depth(merged.layers.coefs, inputs))}),
            **({"lines": list(inputs.lines)} if inputs.lines and config.based else {}),
        },
        "dev": merged.dev,
        "dev_curve": [list(point) for point in merged.curve],
        **({"dev_finals": [list(point) for point in merged.finals]} if merged.finals else {}),
        **({"dev_blocks": [list(point) for point in merged.layers.curve]} if merged.layers else {}),
        **(facts_of_trials(merged.trials.curve, "dev") if merged.trials else {}),
        **({"dev_edge": merged.edge} if merged.edge else {}),
        **facts_of_options(merged.tuned, "dev"),
        **({"notes": list(merged.notes)} if merged.notes else {}),
        **licenses_of(base, inputs.places),
    }
    if isinstance(config, Ties):
        options = {name: value for name, value in settings(config).items() if name in ("keep", "scope", "densities")}
        facts["density"] = merge.ties_density(inputs.base, inputs.experts, **options)
    if (found := merged.calibration) is not None:
        curve = [list(point) for point in found.curve]
        facts["calibration"] = {"field": found.field, "coef": found.coef, "curve": curve}
    if merged.tried is not None:
        tried = total(merged.tried, *([found.tried] if found else []))
        facts["tried"] = {name: round(value, 3) for name, value in tried._asdict().items()}
    manifest, places = checkpoint.without_places(checkpoint.describe(merged.params, **facts))
    files = {CARD: card(manifest), checkpoint.SOURCES: sources_text(_files_of(base, inputs), places)}
    if inputs.lines is None:  # LiNeS on disk multiplies coefficients, here vectors: the last bits differ
        files[checkpoint.RECIPE] = _recipe(config, merged, base, inputs, facts["merge_seed"])
    checkpoint.save_expert(folder, merged.params, manifest, overwrite=overwrite, files=files)


def _recipe(config: MergerConfig, merged: Merged, base: Path, inputs: Inputs, seed: int) -> str:
    """The recipe from which `merge.py` repeats the merge that was chosen, in one file too."""
    if merged.coef is not None and merged.layers is None:
        config = replace(config, coef=merged.coef)  # type: ignore[call-arg]
    coefs = None if merged.layers is None else globs(merged.layers.coefs)
    size = max(SHARD_SIZE, sum(leaf.nbytes for leaf in merged.params.values()))
    heads = {"heads": "keep"} if inputs.stand_ins else {}
    return written(config, base, inputs.places, coefs, {"seed": seed, "shard_size": size, **heads})


def _files_of(base: Path, inputs: Inputs) -> dict[str, list[Path]]:
    """A file in every folder that was merged, for `SOURCES`; a repository has its name in the recipe."""
    given = {"base": base, **{f"expert {name!r}": path for name, path in inputs.places.items()}}
    return {
        label: [
            file
            for folder in folders_of(path)
            for file in ([folder] if folder.is_file() else sorted(filter(Path.is_file, folder.glob("*"))))[:1]
        ]
        for label, path in given.items()
    }
