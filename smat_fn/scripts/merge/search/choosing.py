"""Search coefficients, options and sparsity of a merge in memory, on dev: no score is computed twice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .... import merge
from ....config import MergerConfig, Ties
from ....evaluate import Scorer
from ....merge.around.select import Tuned, combinations
from ....merge.parts.masked import Masked
from ....progress import say
from ....types import Params
from ..experts.inputs import Inputs
from ..provenance.searched import chosen_of, numbers_text, tuned_text
from .candidates import Models, gpu_for
from .over import Over

T = TypeVar("T")
Decode = tuple[str, int]  # task, repeat
Curve = tuple[tuple[float, float], ...]  # (value, mean dev score) of every candidate


class Tried(NamedTuple):
    """Cost of a choice."""

    candidates: int = 0
    scores: int = 0  # of one task and decode each
    kept: int = 0  # of them, known from before
    seconds_merging: float = 0.0
    seconds_scoring: float = 0.0
    seconds_saved: float = 0.0  # that the kept scores had taken


class Calibration(NamedTuple):
    """A merger with the sparsity that did best on dev."""

    config: MergerConfig
    field: str  # "keep" or "drop_prob"
    coef: float  # at which it was chosen
    curve: Curve
    tried: Tried


class Merged(NamedTuple):
    """A merged model and how its coefficient was found."""

    params: Params
    coef: float | None  # None for a merger without one
    dev: dict[str, float]  # score per task on dev, empty without a scorer
    curve: Curve  # of coefficients, empty without a search
    finals: Curve = ()  # of those that were decoded again, where answers are sampled
    tried: Tried | None = None
    calibration: Calibration | None = None
    kept: bool = False  # it was there before
    notes: tuple[str, ...] = ()  # what a user should know of the experts
    snapshot: int = 0  # its number, where one was chosen
    layers: merge.Layered | None = None  # coefficients by block, where they were chosen
    trials: merge.Selection[merge.ByExpert] | None = None  # numbers by expert, where they were chosen
    edge: str = ""  # "smallest" or "largest", where the coefficient is at the edge of those tried
    tuned: tuple[Tuned, ...] = ()  # every combination of options, where a search tries them too

    @property
    def options(self) -> dict[str, Any]:
        """The chosen values of the options that the search tried: the first of equal ones."""
        return chosen_of(self.tuned)


class Reranked(NamedTuple, Generic[T]):
    """The chosen candidate and the scores behind the choice."""

    best: T
    scores: dict[str, float]  # of the best, by task, means over its decodes
    curve: tuple[tuple[T, float], ...]  # mean over tasks of one decode, every candidate
    finals: tuple[tuple[T, float], ...]  # mean over tasks of the means over decodes, the best candidates


class Searched(NamedTuple):
    """The search of a coefficient at fixed options."""

    found: Reranked[MergerConfig]
    tried: Tried
    edge: str  # as that of `Merged`


def is_open(config: MergerConfig) -> bool:
    """Whether the merger's coefficient is left to a search."""
    return getattr(config, "coef", 0.0) is None


def merge_one(
    config: MergerConfig,
    inputs: Inputs,
    *,
    seed: int,
    scorer: Scorer | None = None,
    coefs: Sequence[float] = (),
    widen: bool = False,
    calibration: float | None = None,
    sweeps: int = 0,
    trials: int = 0,
    trials_over: Sequence[str] = ("weights",),
    over: Over = MappingProxyType({}),
    report: Callable[[str], None] = lambda line: None,
) -> Merged:
    """One merged model; with a scorer, a coefficient that is left open is searched on its dev split.

    Candidates are ``coefs``, or the merger's grid; with ``widen`` more follow as long as the best one is the smallest
    or the largest, ten at most. The score of a candidate is the mean dev score over the experts' tasks, of a model for
    one task (`Masked`) that task's; ties go to the smaller coefficient. Where the suite samples answers, the two best
    of one decode are decoded as often as its score wants (`rerank`). With ``over``, values by option, there is such a
    search for every combination of them, in their order; the best score decides, ties go to the earlier one, and
    ``report`` is called with a line for each. With ``sweeps``, every block then gets a coefficient of its own
    (`merge.select_coefs`). With ``trials``, so many models with other numbers of the experts are then tried, of the
    options ``trials_over`` (`merge.select_numbers`). With ``calibration``, a coefficient, the sparsity is chosen first
    (`calibrate`).
    """
    calibrated = None
    if calibration is not None:
        assert scorer is not None
        calibrated = calibrate(config, inputs, scorer, coef=calibration, seed=seed)
        config = calibrated.config
    models, fixed = Models(inputs, seed, gpu_for(config, inputs, scorer)), not is_open(config)
    if isinstance(config, Masked) and config.task is not None:
        models.tasks = [config.task]  # the model is for no other
    if scorer is None:
        assert fixed, "merge_run checks this"
        return Merged(models(config), getattr(config, "coef", None), {}, ())
    grid = [] if fixed else sorted(coefs or config.grid)
    (found, tried, edge), tuned = _search_over(config, over, grid, models, scorer, widen=widen, report=report)
    finals = _curve(found.finals, "coef") if scorer.suite.repeats and not fixed else ()
    curve, coef = () if fixed else _curve(found.curve, "coef"), getattr(found.best, "coef", None)
    made = Merged(None, coef, found.scores, curve, finals, tried, calibrated, edge=edge, tuned=tuned)
    if sweeps and not fixed:
        return _by_layer(made, found.best, models, scorer, [c for c, _ in curve], sweeps)
    if trials:
        return _by_expert(made, found.best, models, scorer, trials, trials_over, seed)
    params = models.home(models(found.best))
    return made._replace(params=params, tried=tried._replace(seconds_merging=models.seconds))


def _by_layer(
    made: Merged, config: MergerConfig, models: Models, scorer: Scorer, coefs: Sequence[float], sweeps: int
) -> Merged:
    """The model of a search with coefficients by block; of sampled answers one decode counts."""
    assert made.coef is not None
    spent, seen = _spending(models, scorer), dict[str, dict[str, float]]()

    def score(own: Mapping[str, float]) -> float:
        facts, name = models.facts(config, blocks=dict(own)), f"{config.name} by block"
        scorer.expect(len(models.tasks))
        found = _once(models, scorer, partial(models.by_block, config, own), facts, name)
        seen[str(dict(own))] = found
        return fmean(found.values())

    names = dict.fromkeys(models.vector(config), torch.empty(0))  # the vector itself may leave the GPU
    layers = merge.select_coefs(names, score, coefs, start=made.coef, sweeps=sweeps)
    params = models.home(models.by_block(config, layers.coefs))
    assert made.tried is not None
    dev, tried = seen[str(layers.coefs)], total(made.tried, spent(len(layers.curve) + 1))
    return made._replace(params=params, dev=dev, layers=layers, tried=tried)


def _by_expert(
    made: Merged,
    config: MergerConfig,
    models: Models,
    scorer: Scorer,
    trials: int,
    over: Sequence[str],
    seed: int,
) -> Merged:
    """The model of a search with other weights or densities of experts; of sampled answers one decode counts."""
    spent, names = _spending(models, scorer), list(models.inputs.experts)
    seen: dict[str, dict[str, float]] = {}
    best: list[float] = []

    def score(numbers: merge.ByExpert) -> float:
        own, place = merge.with_numbers(config, numbers), len(best)
        found = _once(models, scorer, partial(models, own), models.facts(own), f"{config.name}, trial {place}")
        seen[str(numbers)], value = found, fmean(found.values())
        if best and merge.exceeds(value, max(best)):
            say(f"{config.name}, trial {place} of {trials}: dev {value:.2f}, {numbers_text(numbers)}")
        best.append(value)
        return value

    scorer.expect((trials + 1) * len(models.tasks))
    chosen = merge.select_numbers(config, names, score, over=over, trials=trials, seed=seed)
    params = models.home(models(merge.with_numbers(config, chosen.best)))
    dev = made.dev if chosen.best == chosen.curve[0][0] else seen[str(chosen.best)]
    assert made.tried is not None
    tried = total(made.tried, spent(len(chosen.curve) - 1))
    return made._replace(params=params, dev=dev, trials=chosen, tried=tried)


def _once(
    models: Models, scorer: Scorer, build: Callable[[], Params], facts: Mapping[str, Any], name: str
) -> dict[str, float]:
    """The dev score of one decode by task. Args: build, facts, name: as of `Scorer.once`."""
    once = partial(scorer.once, build, model=facts, name=name)
    return {task: models.attempt(partial(once, task, "dev")) for task in models.tasks}


def _spending(models: Models, scorer: Scorer) -> Callable[[int], Tried]:
    """The function that gives the cost of a choice which begins now, among so many candidates."""
    before, merging = scorer.cost, models.seconds

    def spent(candidates: int) -> Tried:
        scores, kept, seconds, saved = (now - then for now, then in zip(scorer.cost, before, strict=True))
        return Tried(candidates, int(scores), int(kept), models.seconds - merging, seconds, saved)

    return spent


def _search_over(
    config: MergerConfig,
    over: Over,
    grid: Sequence[float],
    models: Models,
    scorer: Scorer,
    *,
    widen: bool,
    report: Callable[[str], None],
) -> tuple[Searched, tuple[Tuned, ...]]:
    """The search at the best combination of options with the cost of all searches, and the outcome of each of them."""
    searches, tuned, every = list[Searched](), list[Tuned](), combinations(over)
    scorer.expect(len(every) * _count(max(1, len(grid)), models, scorer))
    for options in every:
        found, *_ = own = _search(_with(config, **options), grid, models, scorer, widen=widen)
        coef, score = getattr(found.best, "coef", None), fmean(found.scores.values())
        searches.append(own)
        tuned.append(Tuned(options, coef, score, _curve(found.curve, "coef") if grid else ()))
        if over:
            report(tuned_text(tuned[-1], f"dev {score:.2f}"))
    best = merge.choose(range(len(every)), lambda place: tuned[place].score).best
    cost = total(*(own.tried for own in searches))
    return searches[best]._replace(tried=cost), tuple(tuned) if over else ()


def _search(config: MergerConfig, grid: Sequence[float], models: Models, scorer: Scorer, *, widen: bool) -> Searched:
    """The merger with the best coefficient of a grid; as it is, and scored, where the grid is empty."""
    spent, dev, coefs = _spending(models, scorer), _dev(models, scorer), list[float]()

    def once(coef: float) -> float:
        scorer.expect(0 if coef in grid else len(models.tasks))
        return fmean(dev(_with(config, coef=coef), [(task, 0) for task in models.tasks]))

    if grid:
        coefs = [coef for coef, _ in merge.choose_coef(once, grid, widen=widen)[0].curve]
    candidates = [_with(config, coef=coef) for coef in coefs] or [config]
    found = rerank(candidates, dev, tasks=models.tasks, repeats=scorer.suite.repeats)
    return Searched(found, spent(len(candidates)), merge.grid_edge(getattr(found.best, "coef", 0.0), coefs))


def calibrate(config: MergerConfig, inputs: Inputs, scorer: Scorer, *, coef: float, seed: int) -> Calibration:
    """The merger with the sparsity of the largest mean dev score at a fixed coefficient, ties to less pruning.

    TIES keeps 0.5, 0.3, 0.2 or 0.1; DARE and DELLA drop 0.1, 0.3, 0.5, 0.7 or 0.9 (paper, sparse-merger calibration).
    Sampled answers are decoded as in `merge_one`.
    """
    field, candidates = sparsities(config, coef)
    models = Models(inputs, seed, gpu_for(config, inputs, scorer))
    spent = _spending(models, scorer)
    scorer.expect(_count(len(candidates), models, scorer))
    found = rerank(candidates, _dev(models, scorer), tasks=models.tasks, repeats=scorer.suite.repeats)
    best = _with(config, **{field: getattr(found.best, field)})
    return Calibration(best, field, coef, _curve(found.curve, field), spent(len(candidates)))


def sparsities(config: MergerConfig, coef: float) -> tuple[str, list[MergerConfig]]:
    """The option that `calibrate` chooses, and a merger for each of its values."""
    field, values = ("keep", merge.TIES_KEEPS) if isinstance(config, Ties) else ("drop_prob", merge.DROP_PROBS)
    return field, [_with(config, **{field: value, "coef": coef}) for value in values]


def total(*parts: Tried) -> Tried:
    """The cost of several choices."""
    return Tried(*map(sum, zip(*parts, strict=True)))


def _count(candidates: int, models: Models, scorer: Scorer) -> int:
    """The number of scores that the choice among so many candidates takes (`rerank`)."""
    more = sum(scorer.suite.repeats.get(task, 1) - 1 for task in models.tasks)
    return candidates * len(models.tasks) + min(2, candidates) * more


def _dev(models: Models, scorer: Scorer) -> Callable[[MergerConfig, Sequence[Decode]], list[float]]:
    """The function that gives the dev scores of decodes of a candidate, none computed twice."""

    @cache
    def one(config: MergerConfig, task: str, repeat: int) -> float:
        facts = models.facts(config)
        name = ", ".join([config.name, *(f"{option} {value}" for option, value in facts["options"].items())])
        build = partial(models, config)
        return models.attempt(partial(scorer.once, build, task, "dev", repeat, model=facts, name=name))

    return lambda config, decodes: [one(config, *decode) for decode in decodes]


def _with(config: MergerConfig, **changes: Any) -> MergerConfig:
    return replace(config, **changes)


def _curve(points: Sequence[tuple[MergerConfig, float]], field: str) -> Curve:
    return tuple((getattr(config, field), score) for config, score in points)


def rerank(
    candidates: Sequence[T],
    score: Callable[[T, Sequence[Decode]], Sequence[float]],
    *,
    tasks: Sequence[str],
    repeats: Mapping[str, int],
) -> Reranked[T]:
    """The candidate of the largest mean score over decodes, of the two that are best in the first decode.

    All tasks count alike; a task without repeats keeps its score. Ties go to the earlier candidate in both stages.

    Args: score: ``score(candidate, decodes)``, one number a (task, repeat), repeats counted from 0; called once a
        candidate with repeat 0 of every task, and once more for the best with the other repeats; repeats: decodes of
        a task, 1 where it is not named.
    Raises: ValueError without candidates, or where a mean is NaN.
    """
    first = [(task, 0) for task in tasks]
    more = [(task, r) for task in tasks for r in range(1, repeats.get(task, 1))]
    found: dict[int, dict[str, list[float]]] = {}

    def decode(place: int, decodes: Sequence[Decode]) -> float:
        own = found.setdefault(place, {task: [] for task in tasks})
        for (task, _), value in zip(decodes, score(candidates[place], decodes) if decodes else (), strict=True):
            own[task].append(value)
        return fmean(fmean(values) for values in own.values())

    places = range(len(candidates))
    once = merge.choose(places, lambda place: decode(place, first))
    rest = [place for place in places if place != once.best]
    second = [merge.choose(rest, lambda place: once.curve[place][1]).best] if rest else []
    several = merge.choose(sorted([once.best, *second]), lambda place: decode(place, more))
    return Reranked(
        candidates[several.best],
        {task: fmean(values) for task, values in found[several.best].items()},
        tuple((candidates[place], value) for place, value in once.curve),
        tuple((candidates[place], value) for place, value in several.curve),
    )
