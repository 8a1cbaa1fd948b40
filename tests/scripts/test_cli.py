"""Errors of scripts in words of the command line."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from smat_fn.config import PRESETS, Della, Mergopt, Smat, Ties
from smat_fn.mat.msam import Msam
from smat_fn.scripts import cli
from smat_fn.scripts.cli import mistyped, spoken
from smat_fn.scripts.commands import eval as evaluation
from smat_fn.scripts.commands import train
from smat_fn.scripts.other_names import spelled_otherwise
from smat_fn.scripts.train.settings import OptimizerSettings
from smat_fn.where import mask_problems


@dataclass(frozen=True)
class Own:
    """Options."""

    method: Smat | Ties
    threads: int = 1
    """Threads."""


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Options."""

    out: Path
    """A folder."""
    more: tuple[Path, ...] = ()
    """Folders."""


def helped(capsys, words, shown):
    with pytest.raises(SystemExit):
        cli.parse(Own, description=None, args=[*words, "--help"], prog="own", shown=shown)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_shows_the_values_of_a_preset_as_defaults(capsys):
    sigma = "from the size of updates. (default: {})"
    assert sigma.format("preset") in helped(capsys, ["smat"], [])
    mergers, methods = PRESETS["clip-vit-b32"].mergers, PRESETS["clip-vit-b32"].methods
    text = helped(capsys, ["smat"], [methods["smat"]])
    assert sigma.format("0.001") in text
    assert "preset" not in text, "an option that the preset leaves open is none"
    assert "(default: 0.5)" in helped(capsys, ["ties"], [mergers["ties"]])


def test_help_shows_the_defaults_of_a_method_where_a_preset_has_none():
    shown = {type(own): own for own in train.shown(["msam", "--preset", "lm"])}
    assert shown[Msam] == Msam(rho=0.5, adaptive=True, along="momentum")
    assert (shown[Smat].noise, shown[Smat].climb, shown[Smat].sigma) == ("uniform", None, "auto")
    assert shown[Mergopt].k_max is None, "it is the number of the data's tasks"


def test_help_shows_the_learning_rate_that_a_run_of_the_method_takes():
    rates = PRESETS["minilm"].lr | {"msam": PRESETS["minilm"].training.lr}
    assert rates["msam"] != rates["ft"]
    for method, rate in rates.items():
        (found,) = [own.lr for own in train.shown([method, "--preset", "minilm"]) if isinstance(own, OptimizerSettings)]
        assert found == rate


def test_a_flag_that_switches_off_is_not_given_by_default(capsys):
    with pytest.raises(SystemExit):
        cli.parse(Della, description=None, args=["--help"], prog="own")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--no-elect Take all entries, whatever their sign. (default: not given)" in text
    assert "(default: True)" not in text


def test_values_shown_are_not_those_that_are_parsed():
    words = ["smat", "--threads", "3"]
    assert cli.parse(Own, description=None, args=words, prog="own") == Own(Smat(), 3)


def test_the_last_value_of_an_option_counts():
    assert cli.value_of("--preset", ["smat", "--preset", "a", "--preset=b"], "c") == "b"
    assert cli.value_of("--preset", ["smat", "--out", "x"], "c") == "c"


def test_several_values_are_given_once(monkeypatch, capsys):
    """argparse takes the last ones without a word, so that experts would be left out."""

    def run(*words, **options):
        monkeypatch.setattr(sys, "argv", ["own", *words])
        cli.run("own", lambda args: None, Paths, description=None, **options)

    run("--out", "a", "--out", "b", "--more", "x", "y")
    with pytest.raises(SystemExit, match=r"^own: --more is given twice: give all its values after one --more$"):
        run("--out", "a", "--more", "x", "--more=y")
    with pytest.raises(SystemExit, match=r"^2$"):
        run("linear", elsewhere={"linear": "wa"})
    assert capsys.readouterr().err.startswith("own: 'linear' is unknown, it is called wa here")


def test_an_output_below_a_file_is_an_error_before_anything_is_loaded(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    main = lambda args: pytest.fail(f"{args} ran")  # noqa: E731
    for out, what in (
        ("file", "file is a file"),
        ("file/x", "file is a file"),
        ("nowhere/x", "nowhere is a link"),
    ):
        monkeypatch.setattr(sys, "argv", ["own", "--out", str(tmp_path / out)])
        with pytest.raises(SystemExit, match=rf"^own: --out is {tmp_path / out}, but {tmp_path}/{what}"):
            cli.run("own", main, Paths, description=None)


def test_control_characters_of_an_error_do_not_reach_the_terminal(monkeypatch):
    def main(args):
        raise ValueError("the activation is \x1b]0;title\x07")

    monkeypatch.setattr(sys, "argv", ["own", "--out", "a"])
    with pytest.raises(SystemExit, match=r"^own: the activation is \\x1b\]0;title\\x07$"):
        cli.run("own", main, Paths, description=None)


def test_a_full_gpu_is_a_line_and_other_faults_keep_their_traceback(monkeypatch):
    def run(error):
        def main(args):
            raise error

        cli.run("own", main, Paths, description=None)

    monkeypatch.setattr(sys, "argv", ["own", "--out", "a"])
    with pytest.raises(SystemExit, match=r"^own: the GPU is out of memory \(Tried to allocate 2 GiB\): take less at a"):
        run(torch.OutOfMemoryError("Tried to allocate 2 GiB"))
    with pytest.raises(RuntimeError, match="another"):
        run(RuntimeError("another"))


def test_options_of_several_words_are_said_as_the_command_line_has_them(monkeypatch):
    names = "config_from", "shard_size", "eval_every", "steps"
    assert spoken("say whose the output has, by config_from", names).endswith("by --config-from")
    assert spoken("eval_every is 0, with shard_size", names) == "--eval-every is 0, with --shard-size"
    for text in ("'shard_size' is 5", "training.eval_every was 5", "my_eval_every", "a/shard_size", "eval_every=5"):
        assert spoken(text, names) == text
    for text in ("steps is 0, must", " steps is 0, must", "\n  steps is 0, must\n  smat: steps is 0"):
        assert spoken(text, names) == text.replace("steps", "--steps")
    for text in ("the steps is 0", "steps are 0", "a/steps is 0", "--steps is 0", "steps_is is 0"):
        assert spoken(text, names) == text

    @dataclass(frozen=True)
    class Several:
        """Options."""

        eval_every: int = 0

    def main(args):
        raise ValueError("eval_every is 0, must be at least 1")

    monkeypatch.setattr(sys, "argv", ["own"])
    with pytest.raises(SystemExit, match=r"^own: --eval-every is 0, must be at least 1$"):
        cli.run("own", main, Several, description=None)


def test_options_of_trainers_and_of_suites_are_said_as_they_are_written_here():
    words = "--learning-rate 1e-4 --bf16 --num_train_epochs=3 --truncate left --batch-size 4 --sigma 1 --strange 2"
    assert spelled_otherwise(words.split(), train.Train) == [
        "--learning-rate is --lr here",
        "--bf16 is --precision bf16 here",
        "--num-train-epochs is --epochs here",
        "--truncate is an option of a suite: write --suite-options truncate VALUE",
    ]
    (scored,) = spelled_otherwise(["--batch-size", "4", "--learning-rate", "1"], evaluation.Eval)
    assert scored == "--batch-size is --suite-options decode_batch N (language models) or eval_batch N here"
    assert spelled_otherwise(["--truncate", "left"], Own) == []


def test_an_option_of_a_suite_is_given_once():
    assert cli.with_named({"truncate": "left"}, device="cpu", rows=None) == {"truncate": "left", "device": "cpu"}
    said = "--batch-size is also given as --suite-options batch_size: leave one of them out"
    with pytest.raises(ValueError, match=f"^{said}$"):
        cli.with_named({"batch_size": 8}, batch_size=4)
    assert spoken(said, ["batch_size", "suite_options"]) == said


def test_arguments_are_said_as_the_command_line_has_them():
    names = "heads", "coef", "overwrite", "threads", "out_dtype", "suite_options", "drop_prob"
    for text, said in {
        "pass `heads='keep'`, which merges": "pass --heads keep, which merges",
        "`heads` requires one model": "--heads requires one model",
        "`out_dtype='bfloat16'` and out_dtype": "--out-dtype bfloat16 and --out-dtype",
        "choose another folder or pass `overwrite=True`": "choose another folder or pass --overwrite",
        "by `coef={'*running_*': 0}`, or": "by --coef '*running_*=0', or",
        "use fewer `workers` or": "use fewer --threads or",
        "by `truncate='prompt-middle'`": "by --suite-options truncate prompt-middle",
        "`max_length=128` is more than 64": "--suite-options max_length 128 is more than 64",
    }.items():
        assert spoken(text, names) == said
    assert spoken("`max_length=128` is more", ["max_length"]) == "--max-length 128 is more"
    for text in "set `torch_dtype=torch.float16` or `pad_token`", "`heads=NAME`, `a=1 b`":  # of other libraries
        assert spoken(text, names) == text
    nothing = mask_problems(lambda path, leaf: False, {"w": torch.zeros(2)}, 0.5)[0]
    assert ". Pass --drop-prob 0 to switch Mask off" in spoken(nothing, names)


def test_an_argument_without_an_option_is_said_as_the_recipe_has_it():
    union = "or merge by token (`tokenizer_from='union'`)"
    assert spoken(union, ["tokenizer_from"]) == "or merge by token (--tokenizer-from union)"
    assert spoken(union, ["file"]) == "or merge by token (tokenizer_source: union in the recipe)"
    assert spoken("leave out `tokenizer_from`", ["file"]) == "leave out tokenizer_source in the recipe"


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--out=~/x y", "--more", "~/a@0.5", "NAME=b", "~nobody-of-this-name/c", "./~/d"]
    found = cli.parse(Paths, description=None, args=words, prog="own")
    assert found.out == Path("/home/me/x y")
    assert [*map(str, found.more)] == ["/home/me/a@0.5", "NAME=b", "~nobody-of-this-name/c", "~/d"]


def test_a_name_that_is_too_long_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["own", "--out", str(tmp_path / ("n" * 300))])
    with pytest.raises(SystemExit, match=r"^own: --out holds a name of 300 bytes, n{20}\.\.\.: give at most 230"):
        cli.run("own", lambda args: pytest.fail("ran"), Paths, description=None)


def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda place, mode: place != tmp_path
    )  # the superuser may write to all but a disk
    monkeypatch.setattr(sys, "argv", ["own", "--out", str(tmp_path / "a" / "b")])
    with pytest.raises(
        SystemExit, match=rf"^own: --out is {tmp_path}/a/b, but {tmp_path} cannot be written to: choose"
    ):
        cli.run("own", lambda args: pytest.fail("ran"), Paths, description=None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "a/scores.jsonl"), "a/scores.jsonl cannot be written (No space left"),
        (OSError(28, "No space left on device"), "a file cannot be written (No space left on device): free disk space"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (PermissionError(13, "denied", "a/b"), "a/b cannot be read or written by this user: ask its owner (chmod), or"),
        (RuntimeError("Could not determine home directory."), "a path begins with ~ or lies in the home folder, but"),
        (MemoryError("6 GB"), "the system gives no more memory or address space (6 GB): end other programs, or raise"),
        (RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"), "the system gives no more"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "the system gives no more"),
    ],
    ids=repr,
)
def test_what_the_machine_lacks_ends_a_command_with_one_line(error, said, monkeypatch, tmp_path):
    def fail(args):
        raise error

    monkeypatch.setattr(sys, "argv", ["own", "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as ended:
        cli.run("own", fail, Paths, description=None)
    assert str(ended.value).startswith(f"own: {said}")
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("a bug")], ids=repr)
def test_a_closed_output_and_bugs_are_not_errors_of_the_user(error, monkeypatch, tmp_path):
    def fail(args):
        raise error

    monkeypatch.setattr(sys, "argv", ["own", "--out", str(tmp_path / "x")])
    with pytest.raises(type(error), match=str(error.args[-1])):
        cli.run("own", fail, Paths, description=None)


@pytest.mark.parametrize("words", [["--out", ""], ["--out="], ["--out", "o", "--more", "a", ""]])
def test_an_empty_path_is_not_the_current_folder(words, capsys):
    with pytest.raises(SystemExit):
        cli.parse(Paths, description=None, args=words, prog="own")
    assert ("--more" if "--more" in words else "the path is empty: is a variable") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["samt"], "'samt' is unknown, did you mean 'smat'?"),
        (["landscap", "--out", "x"], "'landscap' is unknown, did you mean 'landscape'?"),
        (["smat"], ""),
        (["--out", "x"], ""),
        ([], ""),
        (["runs/ft"], ""),
    ],
)
def test_a_mistyped_subcommand_is_suggested(words, said):
    assert mistyped(words, ["ft", "smat", "landscape"]) == said


def test_a_subcommand_that_is_needed_is_asked_for():
    assert mistyped([], ["ft", "smat", "sweep"], needed=["ft", "smat"]) == "give one of ft, smat first"
    said = mistyped(["nothing"], ["ft", "smat", "sweep"], needed=["ft", "smat"])
    assert said == "'nothing' is unknown, the first word is one of ft, smat"
    assert mistyped(["sweep"], ["ft", "smat", "sweep"], needed=["ft", "smat"]) == ""
    said = "no subcommand among the options: give one of ft first"
    assert mistyped(["--out", "x"], ["ft"], needed=["ft"]) == said
    for words in (["--out", "x", "ft"], ["--help"], ["--out", "x", "--help-all"]):
        assert mistyped(words, ["ft"], needed=["ft"]) == ""
    many = [f"m{i}" for i in range(cli.SHOWN + 1)]
    assert mistyped([], many, needed=many).endswith("m9, ... first")


def test_a_path_that_is_there_is_no_subcommand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    assert mistyped(["reports"], ["report"]) == ""
    assert mistyped(["report5"], ["report"]) != ""
