"""Push a merged model to the hub, without files that hold local paths."""

from collections.abc import Callable, Iterable
from pathlib import Path

from ... import checkpoint, errors
from ...folders.inputs import hub


def pushed(repository: str | None, *, public: bool, count: int) -> Callable[[Path], Iterable[str]]:
    """Function that pushes a finished folder and yields a line about it; it does nothing without a repository.

    Args: count: merged models of this call.
    Raises: ValueError for a name, a token or a number of models that cannot be pushed, before anything is merged.
    """
    if repository is None:
        errors.raise_problems(["--public requires --push-to-hub"] if public else [])
        return lambda folder: ()
    problems = hub.push_problems(repository)
    problems += [f"--push-to-hub takes one merged model, here are {count}: give one merger"] if count != 1 else []
    errors.raise_problems(problems)

    def push(folder: Path) -> Iterable[str]:
        yield f"pushed: {hub.push(folder, repository, private=not public, without=[checkpoint.SOURCES])}"

    return push
