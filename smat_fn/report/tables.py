"""The main table: one line per method, experts and mergers side by side."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import checkpoint
from ..config import MORE_MERGERS
from ..errors import and_more, printable, raise_problems
from ..evaluate.results import EXPERT, OTHERS, Result
from ..evaluate.statistics import ROUNDING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MERGERS = ("WA", "TA", "TIES", "DARE", "DELLA")
COLUMNS = ("Expert", *MERGERS, "Avg")
JOINT = checkpoint.JOINT.upper()  # column of the multi-task model
# two merge while they look at rows, and have no options class
MORE = (*(config.name.upper() for config in MORE_MERGERS), "REG_MEAN_PLUS", "ADAMERGING")
# an underscore inside a word is a letter, a bracket one where no link follows
MARKUP = re.compile(r"[\\`*<~]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|\[(?=[^\]]*\]\()")


class Cell(NamedTuple):
    """A mean over tasks, by seed."""

    by_seed: dict[int, float]  # in order of seeds

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores, one for each seed in order."""
        return tuple(self.by_seed.values())

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.scores))

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds (n - 1), None for a single seed."""
        return float(np.std(self.scores, ddof=1)) if len(self.scores) > 1 else None

    def text(self, digits: int = 2, *, joint: str = " ") -> str:
        """``mean`` or ``mean ± sd``."""
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f"{joint}± {self.sd:.{digits}f}")


class MainTable(NamedTuple):
    """Cells by method and column of `COLUMNS`, `MORE` or `JOINT`; what was not scored is absent."""

    split: str
    cells: dict[str, dict[str, Cell]]

    @property
    def scored(self) -> set[str]:
        """The columns in which some label has a cell."""
        return {column for line in self.cells.values() for column in line}

    @property
    def columns(self) -> tuple[str, ...]:
        """`COLUMNS`; where there are other mergers too, those that were scored; `JOINT` last where it was."""
        shown = tuple(column for column in (*COLUMNS[:-1], *MORE, COLUMNS[-1]) if column in self.scored)
        shown = shown if self.scored.intersection(MORE) else COLUMNS
        return (*shown, JOINT) if JOINT in self.scored else shown

    @property
    def paper(self) -> "MainTable":
        """Without other mergers; unchanged where there are no others."""
        if not self.scored.intersection(MERGERS):
            return self
        cells = {x: {c: cell for c, cell in line.items() if c in (*COLUMNS, JOINT)} for x, line in self.cells.items()}
        return MainTable(self.split, cells)


def cell_of(by_seed: Mapping[int, float]) -> Cell:
    """A cell from scores by seed, whatever their order."""
    return Cell({seed: by_seed[seed] for seed in sorted(by_seed)})


def drop(line: Mapping[str, Cell]) -> Cell | None:
    """The cost of merging, Expert - Avg; None where one of them is not there."""
    if "Avg" not in line or "Expert" not in line:
        return None
    merged = line["Avg"].by_seed
    return cell_of({seed: score - merged[seed] for seed, score in line["Expert"].by_seed.items()})


def main_table(rows: Iterable[Result], *, split: str = "test", methods: Sequence[str] | None = None) -> MainTable:
    """Means over tasks of the rows of one split, per method and seed.

    Expert: every expert on its own task; JOINT: the multi-task model. A merger's name is matched in either case ("ta"
    is TA); models of none are left out. Avg: the mean of the paper's five mergers, where all five are there.

    Args: methods: which, in this order; None: all, in order of appearance.
    Raises: ValueError for two scores of one thing, for models that were not scored on the same tasks, for columns of
        one method that miss a seed, and for methods without rows.
    """
    return _table(((row, row.score) for row in rows), split, methods)


def _table(rows: Iterable[tuple[Result, float]], split: str, methods: Sequence[str] | None) -> MainTable:
    """`main_table` of rows and their numbers."""
    scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    problems = []
    for row, score in rows:
        expert = row.model == EXPERT + row.task
        column = "Expert" if expert else row.model.upper()
        if row.split != split or column not in (*COLUMNS, *MORE, JOINT):
            continue
        tasks = scores.setdefault((row.method, column), {}).setdefault(row.seed, {})
        if row.task in tasks:
            problems.append(f"{row.method}, {row.model}, seed {row.seed} has two scores on {row.task}")
        tasks[row.task] = score
    methods = list(dict.fromkeys(method for method, _ in scores)) if methods is None else methods
    cells = {}
    for method in methods:
        mine = {column: scores[method, column] for column in (*COLUMNS, *MORE, JOINT) if (method, column) in scores}
        problems += _gaps(method, split, mine)
        cells[method] = {
            column: cell_of({seed: float(np.mean(list(tasks.values()))) for seed, tasks in by_seed.items()})
            for column, by_seed in mine.items()
        }
    tasks_of = {method: _tasks(scores, method) for method in methods}
    if not problems and len({*tasks_of.values()}) > 1:
        each = "; ".join(f"{method} on {', '.join(sorted(tasks))}" for method, tasks in tasks_of.items())
        problems = [f"means over different tasks cannot be compared ({each}): give methods of the same tasks"]
    raise_problems(problems)
    for line in cells.values():
        if all(merger in line for merger in MERGERS):
            five = [line[merger] for merger in MERGERS]
            line["Avg"] = cell_of({s: float(np.mean([cell.by_seed[s] for cell in five])) for s in five[0].by_seed})
    return MainTable(split, cells)


def other_table(rows: Iterable[Result], *, split: str = "test") -> MainTable:
    """`main_table` of the scores on other tasks. Expert: the mean over all experts of a label, for each seed and task.

    Raises: ValueError as `main_table`, for two scores of one expert on one task too.
    """
    rows = [
        replace(row, model=row.model.removeprefix(OTHERS))
        for row in rows
        if row.split == split and row.model.startswith(OTHERS)
    ]
    experts: dict[tuple[str, int, str], dict[str, Result]] = {}
    problems = []
    for row in rows:
        if row.model.startswith(EXPERT):
            own = experts.setdefault((row.method, row.seed, row.task), {})
            if row.model in own:
                problems.append(f"{row.method}, {row.model}, seed {row.seed} has two scores on {row.task}")
            own[row.model] = row
    raise_problems(problems)
    means = [
        replace(
            next(iter(own.values())), model=EXPERT + task, score=float(np.mean([row.score for row in own.values()]))
        )
        for (_, _, task), own in experts.items()
    ]
    merged = [row for row in rows if not row.model.startswith(EXPERT)]
    return main_table([*merged, *means], split=split, methods=list(dict.fromkeys(row.method for row in rows)))


def other_tasks_of(rows: Iterable[Result]) -> list[str]:
    """The tasks of the scores that `other_table` shows."""
    return list(dict.fromkeys(row.task for row in rows if row.model.startswith(OTHERS)))


def relative_table(rows: Iterable[Result], *, split: str = "test") -> MainTable:
    """`main_table` of merged scores in % of the expert's of the same method, seed and task, as normalised accuracy.

    Raises: ValueError as `main_table`, for no merged models, and that lists experts that were not scored, or score 0.
    """
    rows = [row for row in rows if row.split == split and not row.model.startswith(OTHERS)]
    experts = {(row.method, row.seed, row.task): row.score for row in rows if row.model == EXPERT + row.task}
    merged = [row for row in rows if not row.model.startswith(EXPERT)]
    if not merged:
        raise ValueError("there is no merged model whose scores could be given in % of its experts': give one too")
    lacking = {of: experts.get(of) for row in merged if not experts.get(of := (row.method, row.seed, row.task))}
    raise_problems(
        [
            f"{method}, seed {seed}: the expert of {task} {'was not scored, give it' if s is None else 'scores 0'}: "
            "merged scores have no share of it"
            for (method, seed, task), s in lacking.items()
        ]
    )
    return _table(((row, 100 * row.score / experts[row.method, row.seed, row.task]) for row in merged), split, None)


def is_best(cell: Cell, column: Collection[Cell]) -> bool:
    """Whether no other mean over the same seeds is larger, but for rounding: equal means are all best.

    A cell whose seeds no other of its column has is best only if it is alone.
    """
    rivals = [other.mean for other in column if other.by_seed.keys() == cell.by_seed.keys()]
    return cell.mean >= max(rivals) - ROUNDING and (len(rivals) > 1 or len(column) == 1)


def seed_notes(table: MainTable, name: Callable[[str], str] = str) -> list[str]:
    """Notes on means over different seeds: of labels, and of columns that have fewer than their label."""
    own = {
        label: sorted({seed for cell in line.values() for seed in cell.by_seed}) for label, line in table.cells.items()
    }
    notes = []
    if len({*map(tuple, own.values())}) > 1:
        each = "; ".join(f"{name(label)} {', '.join(map(str, seeds))}" for label, seeds in own.items())
        notes.append(f"labels have different seeds ({each})")
    for label, line in table.cells.items():
        fewer: dict[str, list[str]] = {}
        for column, cell in line.items():
            if len(cell.by_seed) < len(own[label]):
                fewer.setdefault(seeds_text(cell.by_seed), []).append(column)
        notes += [f"{', '.join(columns)} of {name(label)}: {seeds} alone" for seeds, columns in fewer.items()]
    return notes


def seeds_text(seeds: Collection[int]) -> str:
    """``seed 0``, or ``seeds 0, 1``."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def markdown(table: MainTable, *, digits: int = 2) -> str:
    """The table in Markdown, ``mean ± sd`` where there are several seeds."""
    lines = [["Method", *table.columns], ["---", *["---:"] * len(table.columns)]]
    lines += [[plain(method), *_texts(line, table.columns, digits)] for method, line in table.cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(name: str) -> str:
    """A name as Markdown that shows it letter by letter: labels and tasks may hold any characters."""
    return MARKUP.sub(r"\\\g<0>", name).replace("|", "\\|").replace("\n", " ")


def marked(table: MainTable, mark: Callable[[str], str], *, joint: str = " ") -> dict[str, list[str]]:
    """The texts of every method's columns, the best of each column marked."""
    cells = {c: [line[c] for line in table.cells.values() if c in line] for c in table.scored}
    return {
        method: [
            mark(text) if column in line and is_best(line[column], cells[column]) else text
            for column, text in zip(table.columns, _texts(line, table.columns, joint=joint), strict=True)
        ]
        for method, line in table.cells.items()
    }


def terminal(table: MainTable, *, relative: bool = False, others: Sequence[str] = ()) -> "RichTable":
    """The table for ``rich.print``, the best of each column in bold. Args: others: the tasks of an `other_table`."""
    unit = "in % of the expert's, mean over tasks" if relative else "over tasks, 0 to 100"
    lines = marked(table, "[bold]{}[/bold]".format, joint="\n")
    from rich.markup import escape

    rows = [[escape(method), *texts] for method, texts in lines.items()]
    title = f"{table.split} score {unit}" if relative else f"mean {table.split} score {unit}"
    title = f"other tasks ({escape(and_more(others, 8))}): {title}" if others else title
    return rich_table(title, ["Method", *table.columns], rows)


def rich_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> "RichTable":
    """Texts as a table for ``rich.print``, all columns but the first to the right."""
    from rich.table import Table

    drawn = Table(title=title)
    for place, column in enumerate(columns):
        drawn.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(printable, row))
    return drawn


def show(table: "RichTable") -> None:
    """Print it, at least 100 columns wide, and as wide as it is: a number that is cut is another number."""
    from rich.console import Console

    needed = Console(width=1 << 16).measure(table).maximum
    Console(width=max(100, Console().width, needed)).print(table)


def _texts(line: dict[str, Cell], columns: Sequence[str], digits: int = 2, *, joint: str = " ") -> list[str]:
    return [line[column].text(digits, joint=joint) if column in line else "–" for column in columns]  # noqa: RUF001


def _tasks(scores: Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]], method: str) -> frozenset[str]:
    return frozenset(t for (name, _), seeds in scores.items() if name == method for own in seeds.values() for t in own)


def _gaps(method: str, split: str, mine: dict[str, dict[int, dict[str, float]]]) -> list[str]:
    if not mine:
        return [f"method {method!r} has no {split} scores of experts or mergers"]
    every_seed = {seed for column, by_seed in mine.items() if column in COLUMNS for seed in by_seed}
    every_task = {task for by_seed in mine.values() for tasks in by_seed.values() for task in tasks}
    # the paper's mergers are averaged, others may have been tried on some seeds
    five = [column for column in mine if column in COLUMNS]
    gaps = [f"{method}, {column} lacks seed {s}" for column in five for s in sorted(every_seed - set(mine[column]))]
    return gaps + [
        f"{method}, {column}, seed {seed} lacks task {task!r}, which others have: add it, or leave them out"
        for column, by_seed in mine.items()
        for seed, tasks in by_seed.items()
        for task in sorted(every_task - set(tasks))
    ]
