"""The first rows of a folder of tasks: a study that must end within minutes scores no more."""

import json
from pathlib import Path

ROWS = {"dev": 100, "eval": 200}  # at most, of train all
LONGEST = 2000  # characters of a prompt that is scored


def write_rows(source: str, folder: Path) -> Path:
    """Write the tasks of a folder in the layout of the suite ``trace``: all of train, of dev and test the first rows.

    Args:
        source: a folder with files train, dev and eval (.json) of every task.
        folder: for the rows; files that are there are written again.

    Returns:
        The folder.
    """
    for file in sorted(Path(source).glob("*/*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        if file.stem in ROWS:
            rows = [row for row in rows if len(row["prompt"]) <= LONGEST][: ROWS[file.stem]]
        made = folder / file.parent.name / file.name
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return folder
