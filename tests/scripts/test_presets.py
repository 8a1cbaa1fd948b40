"""Configuration: every mapping complete, every option explained, every name backed by code."""

import ast
import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

import smat_fn.config
from smat_fn import mat, merge
from smat_fn.config import (
    MERGERS,
    METHODS,
    MORE_MERGERS,
    MORE_METHODS,
    PRESETS,
    Dare,
    DareTies,
    Smat,
    Ties,
    preset_of,
    resolve,
    settings,
)
from smat_fn.report import tables
from smat_fn.suites import SUITES, task_names

ROOT = Path(__file__).parents[2]
CONFIG = Path(smat_fn.config.__file__).parent
PACKAGE = CONFIG.parent
PRESET = pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))


@PRESET
def test_a_preset_has_an_entry_for_every_method_and_merger(preset):
    assert preset.suite in SUITES
    assert preset.family in merge.CALIBRATION_COEFS
    assert {name: type(config) for name, config in preset.methods.items()} == {c.name: c for c in METHODS}
    assert {name: type(config) for name, config in preset.mergers.items()} == {c.name: c for c in MERGERS}
    assert set(preset.lr) == set(preset.methods)
    assert set(preset.lr.values()) <= set(preset.lr_grid)
    open_ = {
        (name, f.name)
        for name, config in {**preset.methods, **preset.mergers}.items() for f in fields(config)
        if getattr(config, f.name) is None
    }  # fmt: skip
    searched = {(name, "coef") for name in ("ta", "ties", "dare", "della")}
    assert open_ == {
        *(("smat", name) for name in ("alpha_max", "sigma_of", "climb", "rho", "lam", "alpha_depth", "antithetic")),
        *searched,
        *({("mergopt", "k_max")} if preset.epochs else ()),  # of your own data: the number of its tasks
    }


def test_mergers_stand_in_the_order_of_the_tables():
    assert [c.name for c in MERGERS] == [name.lower() for name in tables.MERGERS]


def test_the_digits_learning_rates_are_those_that_the_study_chose():
    result = json.loads((ROOT / "benchmarks/results/digits.json").read_text())
    assert {name: PRESETS["digits"].lr[name] for name in result["lr"]} == result["lr"]
    assert sorted(PRESETS["digits"].lr_grid) == sorted(map(float, result["dev"]["ft"]))


@pytest.mark.parametrize(
    ("name", "chosen_there"),
    [("digits", {"asam", "mergopt", "orthoreg"}), ("minilm", {"ft", "smat", "asam", "mergopt", "orthoreg"})],
)
def test_methods_are_tuned_as_the_studies_chose(name, chosen_there):
    stored = json.loads((ROOT / f"benchmarks/results/{name}_methods_tuning.json").read_text())["chosen"]
    by_adam = {own["method"]: own for label, own in stored.items() if not label.endswith("-Muon")}
    preset = PRESETS[name]
    assert chosen_there <= set(by_adam)
    for method in chosen_there:
        assert settings(preset.methods[method]) == by_adam[method]["hyperparameters"]
        assert preset.lr[method] == by_adam[method]["training"]["lr"]


def test_methods_correspond_to_files_and_their_options_to_arguments():
    folder = Path(mat.__file__).parent
    files = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")}
    assert files - {"ascent", "step", "simulated", "sigma_units", "weights"} == {
        c.__module__.rpartition(".")[2] for c in (*METHODS, *MORE_METHODS)
    }
    shared = {*inspect.signature(mat.finetune.build).parameters, "offload"}  # a run's: no result depends on it
    for method in (*METHODS, *MORE_METHODS):
        build = mat.build_of(method())
        assert {f.name for f in fields(method)} == set(inspect.signature(build).parameters) - shared


def test_mergers_correspond_to_files_and_their_options_to_arguments():
    folder = Path(merge.__file__).parent
    shared = {"registry", "statistics", "adamerging", "reg_mean_plus"}
    files = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")} - shared
    assert {config.__module__.rpartition(".")[2] for config in (*MERGERS, *MORE_MERGERS)} == files
    for config in (*MERGERS, *MORE_MERGERS):
        function = getattr(merge, config.__module__.rpartition(".")[2])
        given = {"key", "base", "experts", "fishers", "grams"}
        taken = set(inspect.signature(function).parameters) - given
        assert {f.name for f in fields(config)} - {*config.selects} == taken
        own = set(inspect.signature(config.function).parameters) - given
        assert own == taken - ({"coef"} if config.based else set())
        assert config.random == ("key" in inspect.signature(config.function).parameters)


COMMANDS = {"Verify", "Export", "ExtractLora", "FromRecipe", "Statistics", "ByData", "AdaMerging", "RegMeanPlus"}
COMMANDS |= {"MergeAdapters", "Moe"}


@pytest.mark.parametrize(
    ("file", "names"),
    [
        *((Path(inspect.getfile(c)), {c.__name__}) for c in (*METHODS, *MORE_METHODS)),
        *((Path(inspect.getfile(c)), {c.__name__}) for c in (*MERGERS, *MORE_MERGERS)),
        (PACKAGE / "scripts/commands/train.py", {"Train"}),
        (PACKAGE / "scripts/commands/merge.py", {"All", "Inputs", "Choices", "Outputs", "Machine", "Merge"}),
        (PACKAGE / "scripts/merge/settings.py", COMMANDS),
        (PACKAGE / "scripts/commands/eval.py", {"Eval", "Report"}),
        (
            PACKAGE / "scripts/train/settings.py",
            {"DataSettings", "OptimizerSettings", "AdapterSettings", "ProcessSettings", "RunSettings"},
        ),
        (PACKAGE / "scripts/train/settings.py", {"Sweep", "Status"}),
        (PACKAGE / "scripts/analyse/commands.py", {"Shared", "OfSuite", "Batched"}),
        (PACKAGE / "scripts/analyse/scores.py", {"ExpertsCurve", "Replacement", "Gains"}),
        (PACKAGE / "scripts/analyse/weights.py", {"Landscape", "Diagnose"}),
    ],
    ids=[
        *(c.name for c in (*METHODS, *MORE_METHODS)),
        *(c.name for c in (*MERGERS, *MORE_MERGERS)),
        "train",
        "merge",
        "groups of merge",
        "eval",
        "groups of train",
        "sweep",
        "analyses",
        "scores",
        "weights",
    ],
)
def test_every_option_has_the_text_that_help_prints(file, names):
    classes = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    assert names <= set(classes)
    bare = []
    for name in names:
        assert ast.get_docstring(classes[name])
        body = classes[name].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
                continue
            text = after.value if isinstance(after, ast.Expr) else None
            if not (isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.endswith(".")):
                bare.append(f"{name}.{node.target.id}")
    # the choice of a subcommand has texts of its own, groups are described by their classes
    assert {name for name in bare if not name.startswith(("Train.", "Merge."))} <= {"RunSettings._"}


@pytest.mark.parametrize(("name", "suite"), [("lm", "trace"), ("text", "short_text"), ("images", "clip8")])
def test_presets_for_ones_own_model_find_sigma_and_say_that_nothing_is_tuned(name, suite):
    preset = PRESETS[name]
    assert (preset.suite, preset.methods["smat"].sigma, preset.training.steps) == (suite, "auto", None)
    assert preset.epochs >= 1
    assert not {"model", "data"} & set(preset.options)
    assert preset.note.endswith(", not tuned on this model")
    assert {other.note for key, other in PRESETS.items() if key not in ("lm", "text", "images")} == {""}


def test_options_left_out_take_the_presets_values():
    preset = PRESETS["digits"]
    assert resolve(Smat(), preset.methods) == preset.methods["smat"]
    given = resolve(Smat(sigma=0.0, period=1), preset.methods)
    assert settings(given) == settings(preset.methods["smat"]) | {"sigma": 0.0, "period": 1}
    plain = resolve(Smat(alpha_max=1.0, sigma_of="weights", antithetic=False), preset.methods)
    assert settings(plain) == settings(preset.methods["smat"])  # given or left out, it is the same run
    # lam replaces the period
    mixed = settings(resolve(Smat(lam=0.25), preset.methods))
    assert mixed == {k: v for k, v in settings(preset.methods["smat"]).items() if k != "period"} | {"lam": 0.25}
    assert resolve(Ties(coef=0.0, scope="tensor"), preset.mergers) == Ties(0.0, 0.5, "sum", "tensor")
    assert settings(Dare(drop_prob=0.0)) == {"drop_prob": 0.0}
    assert resolve(DareTies(0.2), preset.mergers) == DareTies(0.2)  # no preset holds it


def test_an_unknown_preset_names_the_known_ones():
    assert preset_of("digits") is PRESETS["digits"]
    with pytest.raises(ValueError, match=r"'digit' is unknown, did you mean 'digits'\? choose one of digits"):
        preset_of("digit")


@pytest.mark.parametrize(
    ("name", "rho", "b", "lambda_reg", "optimizer", "muon_lr"),
    [
        ("llama-3.2-1b", 2, 5e-4, 0.03, "adamw", None),
        ("llama-3.2-1b-muon", 2, 5e-4, 0.03, "muon", 4e-4),
        ("llama-3.1-8b", 0.25, 2.5e-4, 0.01, "adamw", None),
    ],
)
def test_the_llama_presets_are_the_papers(name, rho, b, lambda_reg, optimizer, muon_lr):
    preset = PRESETS[name]
    assert vars(preset.training) == {
        **{"steps": None, "lr": 2e-5, "optimizer": optimizer, "muon_lr": muon_lr, "schedule": "constant"},
        **{
            "weight_decay": 1e-3,
            "max_grad_norm": 1.0,
            "accumulate": 1,
            "precision": None,
            "lora": None,
            "independent_draws": False,
            "warmup": 0,
            "decay_matrices": False,
            "average": None,
            "dropout": False,
            "compiled": False,
            "shard": False,
            "dev": None,
        },
        "epochs": dict(zip(task_names("trace"), (5, 3, 7, 3, 5, 5, 7), strict=True)),
    }
    assert {method: settings(config) for method, config in preset.methods.items()} == {
        "ft": {},
        "smat": {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3, "period": 4, "noise": "uniform"},
        "asam": {"rho": rho, "adaptive": True},
        "mergopt": {"b": b, "k_max": 7},
        "orthoreg": {"lambda_reg": lambda_reg, "block_only": False},
    }
    assert {merger: settings(config) for merger, config in preset.mergers.items()} == {
        "wa": {},
        "ta": {},
        "ties": {"keep": 0.5, "aggregate": "sum", "scope": "global"},
        "dare": {"drop_prob": 0.3},
        "della": {"drop_prob": 0.5, "window": 0.14},
    }
    assert set(preset.lr.values()) == {2e-5}
    wanted = {"dtype": "bfloat16", "max_length": 512, "batch_size": 8, "data": "yanggangu/SMAT-TRACE"}
    assert preset.options == wanted | {"model": "meta-llama/" + name.removesuffix("-muon").title() + "-Instruct"}


@pytest.mark.parametrize(
    ("name", "model", "rho", "b", "lambda_reg"),
    [
        ("clip-vit-b32", "openai/clip-vit-base-patch32", 0.25, 2e-4, 0.1),
        ("clip-vit-l14", "openai/clip-vit-large-patch14", 0.125, 5e-5, 0.05),
    ],
)
def test_the_clip_presets_are_the_papers(name, model, rho, b, lambda_reg):
    preset = PRESETS[name]
    assert (preset.suite, preset.family) == ("clip8", "vision")
    assert vars(preset.training) == {
        **{"steps": 4000, "lr": 1e-5, "optimizer": "adam", "muon_lr": None, "schedule": "cosine"},
        **{
            "weight_decay": 0.0,
            "max_grad_norm": None,
            "accumulate": 1,
            "precision": None,
            "lora": None,
            "independent_draws": False,
            "warmup": 0,
            "decay_matrices": False,
            "average": None,
            "dropout": False,
            "compiled": False,
            "shard": False,
            "dev": None,
            "epochs": {},
        },
    }
    assert {method: settings(config) for method, config in preset.methods.items()} == {
        "ft": {},
        "smat": {"alpha_min": 0.1, "drop_prob": 0.5, "sigma": 1e-3, "period": 4, "noise": "uniform"},
        "asam": {"rho": rho, "adaptive": True},
        "mergopt": {"b": b, "k_max": 8},
        "orthoreg": {"lambda_reg": lambda_reg, "block_only": False},
    }
    assert {merger: settings(config) for merger, config in preset.mergers.items()} == {
        "wa": {},
        "ta": {},
        "ties": {"keep": 0.5, "aggregate": "sum", "scope": "global"},
        "dare": {"drop_prob": 0.3},
        "della": {"drop_prob": 0.1, "window": 0.14},
    }
    assert set(preset.lr.values()) == {1e-5}
    wanted = {"model": model, "data": "yanggangu/SMAT-CLIP8", "dtype": "float32", "batch_size": 128}
    assert preset.options == wanted
