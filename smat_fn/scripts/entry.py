"""The commands by name: train.py, merge.py and eval.py of a clone; installed, smat-train, smat-merge and smat-eval."""

import atexit
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import __version__
from ..importing import uncollected
from ..progress import starting
from . import outcome

COMMANDS = {
    "train": "train experts with one method, run sweeps",
    "merge": "merge experts, verify and export folders, extract adapters",
    "eval": "score experts and merged models, write tables, plots and reports",
}

_NARROWEST = 20

# package that an extra of pyproject.toml installs, by the name it is imported as -> the extra
EXTRAS = {
    "huggingface_hub": "hub",
    **dict.fromkeys(("transformers", "datasets", "PIL", "einops", "sklearn", "rouge", "sacrebleu", "cma"), "train"),
    "scikit-learn": "train",  # whose version is read without importing it
    **dict.fromkeys(("tqdm", "rich"), "train"),
    **dict.fromkeys(("matplotlib", "scipy", "markdown_it"), "eval"),
    "triton": "gpu",
}


def train(script: str = "smat-train", launch: Sequence[str] = ("-m", "smat_fn", "train")) -> None:
    """Run train.py on the words of the command line.

    Args:
        script: the name that messages and ``--help`` give the command.
        launch: words after ``python`` that start the same command in another process.
    """
    run("train", script, launch)


def merge(script: str = "smat-merge", launch: Sequence[str] = ("-m", "smat_fn", "merge")) -> None:
    """Run merge.py on the words of the command line; arguments as those of `train`."""
    run("merge", script, launch)


def evaluate(script: str = "smat-eval", launch: Sequence[str] = ("-m", "smat_fn", "eval")) -> None:
    """Run eval.py on the words of the command line; arguments as those of `train`."""
    run("eval", script, launch)


def run(name: str, script: str, launch: Sequence[str]) -> None:
    """Import the code of a command and call it.

    Args:
        name: of `COMMANDS`.
        script: the name that messages and ``--help`` give the command.
        launch: words after ``python`` that start the same command in another process.

    Raises: SystemExit that names the extra to install, where a package is missing; without a word where the reader of
        the output, such as head, has ended.
    """
    if os.name == "nt":  # files are written and read by calls of POSIX
        sys.exit(f"{script}: runs on Linux and macOS; on Windows use it inside WSL")
    if sys.argv[1:] == ["--version"]:
        return print(script, __version__)
    try:
        os.getcwd()
    except FileNotFoundError:  # torch's libraries would end the process
        sys.exit(f"{script}: the current folder was removed: cd to another one")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of characters that a terminal does not have
    if (width := os.environ.get("COLUMNS", "")).isdecimal() and 0 < int(width) < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)  # in one to five columns tyro's help does not end
    atexit.register(_leave)
    try:
        try:
            _start(name, script, launch)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        # still ends by the signal, as shells expect
        sys.excepthook = partial(_interrupted, name, script, sys.excepthook)
        raise
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if not _of_output(error):
            raise
        _discard_output()
        sys.exit(f"{script}: standard output cannot be written ({error.strerror}): send it to another place")


def _of_output(error: OSError) -> bool:
    """Whether it is of a write to the output: of no file that has a name."""
    return error.errno is not None and error.filename is None


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes what is left


def _start(name: str, script: str, launch: Sequence[str]) -> None:
    if sys.stderr is not None and not sys.stderr.isatty():  # bars of transformers and the hub: a log file gets lines
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "torch" not in sys.modules and outcome.HELPS & set(sys.argv[1:]):
        from .stand_in import without_torch

        try:
            with without_torch():
                importlib.import_module(f"{__package__}.commands.{name}").command(script, launch)
        except Exception as error:
            if isinstance(error, OSError) and _of_output(error):
                raise
            # whatever else it is, it is met again with torch itself
    starting(script, sys.argv[1:])  # before the seconds that the imports take
    try:
        outcome.called(sys.argv[1:], lambda words: _command(name, script, launch, words))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = EXTRAS[error.name]
        sys.exit(
            f"{script}: the package {error.name} is missing: pip install 'smat_fn[{extra}]', or in a clone "
            f"pip install -e '.[{extra}]'"
        )


def _interrupted(
    name: str, script: str, other: Callable[..., object], kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """``sys.excepthook`` with a line in place of the traceback of Ctrl-C; ``other`` is the hook of before."""
    if not issubclass(kind, KeyboardInterrupt):
        other(kind, error, trace)
    elif sys.stderr is not None:
        command = "the command (training with --resume)" if name == "train" else "the command"
        print(f"{script}: interrupted; rerun {command}, it resumes from what is kept", file=sys.stderr)


def _leave() -> None:
    """Exit without a search for garbage among all modules, which takes up to a second."""
    gc.disable()
    if "triton" not in sys.modules:  # its bindings print a warning for each of their objects that is left
        gc.freeze()


def _command(name: str, script: str, launch: Sequence[str], words: Sequence[str]) -> None:
    sys.argv[1:] = words
    with uncollected():
        module = importlib.import_module(f"{__package__}.commands.{name}")
        gc.freeze()
    module.command(script, launch)


def listed(words: Sequence[str]) -> None:
    """``python -m smat_fn``: run the command that the first word names, or list all.

    Args:
        words: of the command line, without the program's name.
    """
    if words and words[0] in COMMANDS:
        name, *rest = words
        sys.argv = [sys.argv[0], *rest]
        return run(name, f"python -m smat_fn {name}", ("-m", "smat_fn", name))
    if words and words[0] == "--version":
        return print("smat_fn", __version__)
    print("usage: python -m smat_fn COMMAND [OPTIONS]\n")
    for name, text in COMMANDS.items():
        print(f"  {name:<6} {text} (also installed as smat-{name})")
    print("\npython -m smat_fn COMMAND --help explains a command.")
    if words and words[0] not in ("-h", "--help"):
        sys.exit(f"python -m smat_fn: {words[0]!r} is unknown, choose from {', '.join(COMMANDS)}")
    return None
