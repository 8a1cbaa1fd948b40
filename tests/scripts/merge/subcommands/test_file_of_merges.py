"""A file with several merges, as of mergekit-multi, against the same merges one by one."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from smat_fn import checkpoint
from smat_fn.folders.files import Hashing
from smat_fn.scripts.merge import commands, settings
from smat_fn.scripts.recipes.several import placed, steps_of

_spec = importlib.util.spec_from_file_location("make_recipes", Path(__file__).parent / "make_recipes.py")
make_recipes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_recipes)
ROOT = Path(__file__).parents[4]
LINEAR = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 1}} for name in "AB"]}
ONE = LINEAR | {"name": "one"}
TWO = {
    "name": "two",
    "merge_method": "slerp",
    "base_model": "one",
    "models": [{"model": "C"}],
    "parameters": {"t": 0.3},
}
LAST = {
    "merge_method": "task_arithmetic",
    "base_model": "BASE",
    "models": [
        {"model": "two", "parameters": {"weight": 0.7}},
        {"model": "BASE+ADAPTER", "parameters": {"weight": 0.5}},
        {"model": "one", "parameters": {"weight": -0.2}},
    ],
    "tokenizer_source": "one",
}
NAMES = {"one", "two"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_recipes.write_models(folder)
    return folder


def at(recipe, models, names=NAMES):
    """A recipe with its models in a folder, apart from names of merges."""
    kept = {str(models / name): name for name in names}
    text = yaml.safe_dump(make_recipes.at(recipe, models), sort_keys=False)
    for path, name in kept.items():
        text = re.sub(f"{re.escape(path)}$", name, text, flags=re.MULTILINE)
    return text


def write(file, recipes, models, names=NAMES):
    file.write_text("---\n".join(at(recipe, models, names) for recipe in recipes))
    return file


def alone(recipe, models, made, folder):
    """A recipe by itself, with the folders of earlier merges in place of their names."""
    folder.mkdir()
    text = at({key: value for key, value in recipe.items() if key != "name"}, models)
    for name, path in made.items():
        text = re.sub(f"(: ){name}$", rf"\1{path}", text, flags=re.MULTILINE)
    (folder / "asked.yml").write_text(text)
    commands.from_recipe(settings.FromRecipe(folder / "asked.yml", folder))
    (found,) = (own for own in folder.iterdir() if own.is_dir())
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_merges_of_a_file_are_those_of_single_files(order, models, tmp_path):
    recipes = [ONE, TWO, LAST]
    file = write(tmp_path / "all.yml", [recipes[place] for place in order], models)
    commands.from_recipe(settings.FromRecipe(file, tmp_path / "out"))
    one = alone(ONE, models, {}, tmp_path / "first")
    two = alone(TWO, models, {"one": one}, tmp_path / "second")
    last = alone(LAST, models, {"one": one, "two": two}, tmp_path / "third")
    out = tmp_path / "out"
    for made, wanted in (
        (out / "merges/one/weighted_average", one), (out / "merges/two/slerp", two), (out / "ta", last),
    ):  # fmt: skip
        found, leaves = load_file(made / "model.safetensors"), load_file(wanted / "model.safetensors")
        assert found.keys() == leaves.keys()
        assert all(torch.equal(found[path], leaf) for path, leaf in leaves.items())
    assert (out / "ta/tokenizer_config.json").read_text() == (one / "tokenizer_config.json").read_text()
    assert {path.name for path in out.iterdir()} == {"merges", "ta"}


def test_a_finished_merge_is_kept_and_a_missing_one_is_made_again(models, tmp_path, capsys):
    file, out = write(tmp_path / "all.yml", [ONE, TWO], models), tmp_path / "out"
    commands.from_recipe(settings.FromRecipe(file, out))
    made = [out / "merges/one/weighted_average/model.safetensors", out / "merges/two/slerp/model.safetensors"]
    bytes_, first = made[1].read_bytes(), made[0].stat().st_mtime_ns
    made[1].parent.rename(tmp_path / "gone")
    capsys.readouterr()
    commands.from_recipe(settings.FromRecipe(file, out))
    assert "kept" in capsys.readouterr().out
    assert made[1].read_bytes() == bytes_
    assert made[0].stat().st_mtime_ns == first


def test_each_file_is_hashed_once_also_by_a_rerun(models, tmp_path, monkeypatch):
    """A file is checked by the plan of all merges, by its own merge, and as an input of later ones."""
    file, out, hashed = write(tmp_path / "all.yml", [ONE, TWO, LAST], models), tmp_path / "out", list[Path]()
    digest = Hashing._digest
    monkeypatch.setattr(Hashing, "_digest", lambda self, path: (hashed.append(path.absolute()), digest(self, path))[1])
    weights = {models / name / "model.safetensors" for name in ("A", "B", "C", "BASE")}
    for _ in range(2):
        hashed.clear()
        commands.from_recipe(settings.FromRecipe(file, out))
        assert len(hashed) == len(set(hashed))
        assert weights <= set(hashed)


def test_the_first_merge_is_not_made_if_another_one_cannot_be(models, tmp_path):
    """Also what a header alone shows: C has other rows than base."""
    other = LINEAR | {
        "name": "two",
        "models": [*LINEAR["models"], {"model": "B_OTHER_VOCABULARY", "parameters": {"weight": 1}}],
    }
    file = write(tmp_path / "all.yml", [ONE, other], models)
    with pytest.raises(ValueError, match="merge 'two': ") as error:
        commands.from_recipe(settings.FromRecipe(file, tmp_path / "out"))
    assert "merge 'one'" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_nothing_and_says_what_it_cannot_check(models, tmp_path, capsys):
    file = write(tmp_path / "all.yml", [TWO, ONE], models)
    commands.from_recipe(settings.FromRecipe(file, tmp_path / "out", dry_run=True))
    told = capsys.readouterr().out
    assert "weighted_average: all checks passed" in told
    assert "merge 'two': checked once one is merged" in told
    assert not (tmp_path / "out").exists()


REFUSALS = {
    "2 merges have no name: give name to all but the last": [LINEAR, LINEAR, ONE],
    "name one is given to several merges: each needs its own": [ONE, ONE],
    "name is 'a/b': must be a name of a folder": [LINEAR | {"name": "a/b"}, ONE],
    "name is '..': must be a name of a folder": [LINEAR | {"name": ".."}, ONE],
    "merges that need each other: one is merged from two; two is merged from one": [
        TWO | {"name": "one", "base_model": "two"}, TWO,
    ],
    "merge 'two': model ones: not a folder, a hub name, or a merge of this file (one, two), did you mean 'one'?": [
        ONE, TWO | {"base_model": "ones"},
    ],
    "merge 'two': merge_method 'slurp' is unknown": [ONE, TWO | {"merge_method": "slurp"}],
    "the merge without a name: merger is a field of recipe.yml": [ONE, {"merger": "ta", "base": "A"}],
    "name is '': must be a name of a folder": [LINEAR | {"name": ""}, LINEAR],
    "name is 'a\\nb': must be a name of a folder, without / and +, in one line": [LINEAR | {"name": "a\nb"}, ONE],
    "name is 'a ': must be a name of a folder": [LINEAR | {"name": "a "}, ONE],
    "name is 5, not text: write name: '5'": [LINEAR | {"name": 5}, ONE],
    "mixture of experts: write this document to a file of its own and run merge.py moe FILE": [
        ONE, {"base_model": "A", "experts": [{"source_model": "B"}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSALS)
def test_what_a_file_of_merges_cannot_say_is_an_error_before_any_merge(text, models, tmp_path):
    file = write(tmp_path / "bad.yml", REFUSALS[text], models, NAMES | {"ones"})
    with pytest.raises(ValueError, match=re.escape(text)):
        commands.from_recipe(settings.FromRecipe(file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_merge_may_be_called_base(models, tmp_path, monkeypatch):
    """As a model it is the merge; as the source of a tokenizer the word keeps its meaning."""
    monkeypatch.chdir(models)
    two = TWO | {"base_model": "base", "tokenizer_source": "base"}
    first, second = steps_of([two, ONE | {"name": "base"}], tmp_path / "all.yml", [])
    assert (first.name, second.name, second.needs) == ("base", "two", ("base",))
    found = placed(second, {"base": tmp_path})
    assert (found["base_model"], found["tokenizer_source"]) == (str(tmp_path), "base")


def test_a_folder_with_a_plus_in_its_path_is_one_model(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    (tmp_path / "c++").symlink_to(models)
    there, adapter = str(tmp_path / "c++/BASE"), str(models / "ADAPTER")
    recipe = TWO | {"base_model": there, "models": [{"model": "one"}, {"model": f"one+{adapter}"}]}
    first, second = steps_of([ONE, recipe], tmp_path / "all.yml", [])
    assert (first.name, second.needs) == ("one", ("one",))
    found = placed(second, {"one": tmp_path})
    assert found["base_model"] == there
    assert [entry["model"] for entry in found["models"]] == [str(tmp_path), f"{tmp_path}+{adapter}"]


def test_the_source_of_a_tokenizer_may_be_written_as_in_older_versions_of_mergekit(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    for source, found in ("model:one", f"model:{tmp_path}"), ("model:A", "model:A"):
        steps = steps_of([ONE, TWO | {"tokenizer_source": source}], tmp_path / "all.yml", [])
        assert placed(steps[1], {"one": tmp_path})["tokenizer_source"] == found


def test_all_problems_of_a_file_are_one_error(models, tmp_path):
    file = write(tmp_path / "bad.yml", [ONE | {"dtype": "int3"}, TWO | {"parameter": 1}], models)
    for option, value in ("part", "1/2"), ("push_to_hub", "me/model"):
        with pytest.raises(ValueError, match="dtype") as error:
            commands.from_recipe(settings.FromRecipe(file, tmp_path / "out", **{option: value}))
        spoken = f"--{option.replace('_', '-')} is for one"
        for text in ("merge 'one': dtype", "merge 'two': parameter is not a field", spoken):
            assert text in str(error.value)


def test_a_dry_run_notes_what_later_merges_ignore(models, tmp_path, capsys):
    file = write(tmp_path / "all.yml", [ONE, TWO | {"author": "me"}], models)
    commands.from_recipe(settings.FromRecipe(file, tmp_path / "out", dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    told = lines.index("merge 'two': checked once one is merged")
    assert lines[told + 1] == "note: author is not a field of a recipe: ignored, as in mergekit"


def test_an_expert_is_named_by_its_merge(models, tmp_path):
    file = write(tmp_path / "all.yml", [LAST, TWO, ONE], models)
    commands.from_recipe(settings.FromRecipe(file, tmp_path / "out"))
    (made,) = (folder for folder in (tmp_path / "out").iterdir() if folder.name != "merges")
    assert [*checkpoint.load_manifest(made)["experts"]] == ["two", "ADAPTER", "one"]
    recipe = yaml.safe_load((made / "recipe.yml").read_text())
    assert [*recipe["experts"].values()] == ["two/slerp", "ADAPTER", "one/weighted_average"]
    commands.from_recipe(settings.FromRecipe(made / "recipe.yml", tmp_path / "again"))
    again = tmp_path / "again" / made.name / "model.safetensors"
    assert again.read_bytes() == (made / "model.safetensors").read_bytes()


def test_the_command_reads_such_a_file(models, tmp_path):
    file = write(tmp_path / "all.yml", [TWO, ONE], models)
    words = [sys.executable, "merge.py", str(file), str(tmp_path / "out")]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("merged")]
    assert [path in line for path, line in zip(("one/weighted_average", "two/slerp"), lines, strict=True)] == [
        True,
        True,
    ]
    manifest = checkpoint.load_manifest(tmp_path / "out/merges/two/slerp")
    assert manifest["experts"]
