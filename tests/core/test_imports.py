"""The package stays light to import, and its public names are all there."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "smat_fn"
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in PACKAGE.rglob("*.py")
)
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"triton", "numba", "transformers", "datasets", "cma", "jax", "torch._dynamo", "torch._inductor"}

# room -> names of the contract
PUBLIC = {
    "smat_fn": [
        *("draw", "simulate", "reweight", "participation", "materialise", "Draw"),
        *("clean_loss", "simulated_loss", "mixed_loss", "value_and_grad", "ModuleLoss", "apply_fn"),
    ],
    "smat_fn.random": ["key", "split", "fold_in", "bits", "uniform"],
    "smat_fn.simulation": [
        *("draw", "simulate", "reweight", "participation", "materialise", "Draw"),
        *("clean_loss", "simulated_loss", "mixed_loss"),
    ],
    "smat_fn.grad": ["value_and_grad", "ModuleLoss", "apply_fn"],
    "smat_fn.where": ["trainable", "block_linear", "never"],
    "smat_fn.mat.finetune": ["build", "State", "Info"],
    "smat_fn.mat.smat": ["build", "State", "Info"],
    "smat_fn.optim": ["adam", "adamw", "chain", "clip_by_global_norm", "constant", "cosine"],
    "smat_fn.merge": ["weight_average", "task_arithmetic", "ties", "dare", "della", "task_vector"],
    "smat_fn.checkpoint": ["save_expert", "load_expert"],
    "smat_fn.types": ["Optimizer", "Method"],
}


def loaded(code):
    """Modules in ``sys.modules`` of a fresh Python after ``code``; warnings are errors."""
    report = "import json, os, sys; print(json.dumps(list(sys.modules)), flush=True); os._exit(0)"  # leaving is slow
    command = [sys.executable, "-W", "error", "-c", f"{code}\n{report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


NAMES = ["lora", "parallel", "analyses", "ops", "integrations", "folders", "suites", "report", "errors"]
OUTSIDE_OPS = [m for m in MODULES if not m.startswith("smat_fn.ops.") and m != "smat_fn._loops"]
AFTER_TORCH = {  # one after another, in this order
    "merger": "import smat_fn.merge.ties",
    "core": "import smat_fn.simulation, smat_fn.grad, smat_fn.mat, smat_fn.optim, smat_fn.merge",
    "attributes": f"import smat_fn; [getattr(smat_fn, name) for name in {NAMES}]",
    "all": f"import importlib; [importlib.import_module(m) for m in {OUTSIDE_OPS}]",
}


@pytest.fixture(scope="module")
def after_torch():
    """``sys.modules`` after each code, in a Python that had torch and nothing of the package."""
    code = f"""
import json, os, sys, torch
for code in {[*AFTER_TORCH.values()]}:
    exec(code)
    print(json.dumps(list(sys.modules)), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(AFTER_TORCH, map(json.loads, done.stdout.splitlines()), strict=True))


def test_packages_are_attributes_after_import(after_torch):
    assert {f"smat_fn.{name}" for name in NAMES} <= set(after_torch["attributes"])


def test_import_smat_fn_does_not_even_load_torch():
    modules = loaded("import smat_fn; dir(smat_fn); smat_fn.types")
    assert "smat_fn" in modules
    assert not {m for m in modules if m.split(".")[0] in {"torch", "numpy", "triton", "transformers"}}


def test_no_module_loads_triton_or_transformers(after_torch):
    modules = set(after_torch["all"])
    assert modules.issuperset(OUTSIDE_OPS)
    assert "torch" in modules
    assert not modules & HEAVY


def test_the_functional_core_does_not_load_einops(after_torch):
    assert "smat_fn.mat" in after_torch["core"]
    assert "einops" not in after_torch["core"]


@pytest.mark.parametrize("room", PUBLIC)
def test_every_public_name_is_there_and_explained(room):
    module = importlib.import_module(room)
    assert inspect.getdoc(module)
    missing = [name for name in PUBLIC[room] if not hasattr(module, name)]
    assert not missing
    # a NamedTuple without a docstring of its own says "Info(loss, ...)"
    silent = [n for n in PUBLIC[room] if not (d := inspect.getdoc(getattr(module, n))) or d.startswith(f"{n}(")]
    assert not silent
    assert set(PUBLIC[room]) <= set(dir(module))


@pytest.mark.parametrize("module", OUTSIDE_OPS)
def test_what_a_module_exports_exists(module):
    loaded_module = importlib.import_module(module)
    assert inspect.getdoc(loaded_module), f"{module} does not say what it is"
    exported = getattr(loaded_module, "__all__", ())
    assert [n for n in exported if not hasattr(loaded_module, n)] == []


def test_lazy_exports_are_the_rooms_own():
    import smat_fn
    from smat_fn import grad, simulation

    assert smat_fn.simulate is simulation.simulate
    assert smat_fn.value_and_grad is grad.value_and_grad
    assert smat_fn.random is importlib.import_module("smat_fn.random")
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = smat_fn.nope


def imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_only_ops_imports_triton():
    texts = {file: file.read_text(encoding="utf-8") for file in SOURCES}
    named = [file for file, text in texts.items() if "triton" in text]
    importers = {file.relative_to(PACKAGE).parts[0] for file in named if "triton" in imports(texts[file])}
    if not (PACKAGE / "ops").is_dir():
        assert not importers
        pytest.skip("smat_fn/ops is not there yet")
    assert importers == {"ops"}


def test_a_pure_merger_loads_little_and_no_folders(after_torch):
    modules = {m for m in after_torch["merger"] if m.split(".")[0] == "smat_fn"}
    assert "smat_fn.merge.ties" in modules
    assert len({m for m in modules if not m.startswith("smat_fn.merge.")}) < 16  # beside the mergers themselves
    assert not {m for m in modules if m.split(".")[1:2] in (["folders"], ["config"], ["scripts"])}


@pytest.mark.slow
def test_functions_of_mergers_are_no_modules_whatever_is_imported_first():
    names = ["weight_average", "task_arithmetic", "ties", "dare", "della", "slerp", "tsv_merge", "breadcrumbs"]
    names += ["adamerging", "reg_mean_plus"]
    firsts = [
        "smat_fn.merge.ties",
        "smat_fn.merge.adamerging",
        "smat_fn.merge.registry",
        "smat_fn.config",
        "smat_fn.folders",
    ]
    code = f"""
import importlib, os, torch
for first in {firsts}:
    if not (child := os.fork()):  # has torch, and nothing of the package
        importlib.import_module(first)
        from smat_fn import merge
        os._exit(not all(callable(getattr(merge, name)) for name in {names}))
    assert os.waitpid(child, 0)[1] == 0, first
"""
    assert not {name for name in loaded(code) if name.startswith("smat_fn")}
