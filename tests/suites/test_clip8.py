"""Vision tasks on a tiny CLIP: images as batches, heads from prompts, all problems before any training."""

import gc
import json
import runpy
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smat_fn import checkpoint, random, tree
from smat_fn.config import PRESETS, Finetune, TaskArithmetic, Training
from smat_fn.data import batch_indices, pixels
from smat_fn.evaluate.metrics import macro_f1
from smat_fn.mat import finetune, smat
from smat_fn.models import clip
from smat_fn.optim import adam
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.settings import AdaMerging, RegMeanPlus
from smat_fn.scripts.merge.subcommands.by_data import adapt, regress
from smat_fn.scripts.merge.subcommands.exporting import export
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train.joint import joint_run
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import clip8, load_suite, task_names
from smat_fn.suites.templates import DEFAULT, TEMPLATES, prompts

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/clip_tiny.py"))
NAMES = {"MNIST": ("0", "1", "2"), "shapes": ("square", "round thing")}
EIGHT = ("Cars", "DTD", "EuroSAT", "GTSRB", "MNIST", "RESISC45", "SUN397", "SVHN")
SIZES = {"train": 11, "dev": 5, "test": 7}


def write_task(folder, task, names, sizes=SIZES, side=9, shift=0):
    """``folder/task/{train,dev,test}.npz``: noise whose mean brightness tells the class."""
    (folder / task).mkdir(parents=True)
    for split, size in sizes.items():
        noise = np.random.default_rng(len(split) + shift).integers(0, 60, (size, side, side + 1, 3))
        labels = np.arange(size) % len(names)
        images = (noise + 60 * labels[:, None, None, None]).astype(np.uint8)
        np.savez(folder / task / f"{split}.npz", images=images, labels=labels, class_names=np.array(names))
    return folder


def arrays(folder, task, split):
    with np.load(folder / task / f"{split}.npz") as store:
        return dict(store)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and images of a task of the paper and of one of the user's."""
    root = tmp_path_factory.mktemp("clip8")
    for task, names in NAMES.items():
        write_task(root / "rows", task, names)
    texts = [text for task, names in NAMES.items() for text in prompts(TEMPLATES.get(task, DEFAULT), names)]
    EXAMPLE["write_model"](root / "model", texts, width=16, layers=1, image=8, patch=4, seed=0)
    return root


@pytest.fixture(scope="module")
def load(folders):
    def call(seed=3, **options):
        given = {"model": str(folders / "model"), "data": str(folders / "rows"), "device": "cpu", "batch_size": 4}
        return load_suite("clip8", **{"seed": seed, **given, **options})

    return call


@pytest.fixture(scope="module")
def suite(load):
    return load()


@pytest.fixture(scope="module")
def model(folders):
    return clip.load(folders / "model")


def moved(params, size=0.3):
    generator = torch.Generator().manual_seed(1)
    return {name: leaf + size * torch.randn(leaf.shape, generator=generator) for name, leaf in params.items()}


def test_the_base_is_the_vision_tower_and_the_masked_set_its_blocks(suite, model):
    assert list(suite.base) == list(model.params)
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in model.params.items())
    masked = {name for name, leaf in suite.base.items() if suite.where(name, leaf)}
    assert masked == {n for n in suite.base if n.endswith(("proj.weight", "fc1.weight", "fc2.weight"))}
    assert len(masked) == 6


def test_the_papers_tasks_stand_in_the_papers_order_and_others_after_them(folders, tmp_path):
    assert task_names("clip8", data="some/dataset") == clip8.TASKS == EIGHT
    for task in ("zebra", "SVHN", "apple", "Cars"):
        write_task(tmp_path, task, ("a",), {"train": 1})
    (tmp_path / "folders" / "dev" / "a").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert task_names("clip8", data=tmp_path) == ("Cars", "SVHN", "apple", "folders", "zebra")
    assert task_names("clip8", data=tmp_path, tasks=["zebra"]) == ("zebra",)
    with pytest.raises(ValueError, match="holds no task, but nothing: make a folder for each task, with train"):
        task_names("clip8", data=tmp_path / "notes")
    with pytest.raises(ValueError, match=r"\['a', 'a'\]: name at least one, each once"):
        task_names("clip8", tasks=["a", "a"])


def test_the_usual_prompts_name_the_class_once():
    assert {task: len(own) for task, own in TEMPLATES.items()} == dict(
        zip(EIGHT, (8, 8, 3, 3, 1, 18, 2, 1), strict=True)
    )
    for own in (*TEMPLATES.values(), DEFAULT):
        assert len(set(own)) == len(own)
        assert all(template.count("{}") == 1 and template.count("{") == 1 for template in own)
    assert prompts(["a {}", "the {}."], ["x", "{} y"]) == ["a x", "the x.", "a {} y", "the {} y."]


def test_batches_are_a_function_of_the_run_key_and_the_step(suite, folders, model):
    key = random.key(8)
    stored = arrays(folders / "rows", "MNIST", "train")
    for step in (5, 0, 1):
        images, labels = suite.batch("MNIST", key, step)
        chosen = batch_indices(key, 11, 4, step)
        assert torch.equal(labels, torch.from_numpy(stored["labels"])[chosen])
        assert images.dtype == torch.uint8
        own = model.processor(list(stored["images"][chosen]), return_tensors="pt")["pixel_values"]
        assert torch.equal(pixels.look_up(pixels.value_table(model.processor), images), own)
    # 11 rows: two batches of 4 and the last one of 3
    assert suite.epoch_steps("MNIST") == 3
    assert [len(suite.batch("MNIST", key, step)[1]) for step in range(3)] == [4, 4, 3]


def test_the_loss_is_that_of_transformers_zero_shot_classifier(folders, load, model):
    from transformers import CLIPModel

    suite = load(templates={"shapes": ["one {}"]})
    images, labels = suite.batch("shapes", random.key(0), 0)
    loss, logits = suite.loss_fn("shapes")(suite.base, (images, labels))
    whole = CLIPModel.from_pretrained(folders / "model").eval()
    with torch.no_grad():
        values = pixels.look_up(pixels.value_table(model.processor), images)
        expected = whole(**model.tokens(["one square", "one round thing"]), pixel_values=values).logits_per_image
        unit = torch.nn.functional.normalize(whole.get_image_features(pixel_values=values).pooler_output, dim=-1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    head = suite.heads["shapes"]
    torch.testing.assert_close(unit @ head.weight.T + head.bias, expected, rtol=1e-5, atol=1e-5)
    assert head.classes == NAMES["shapes"]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(expected, labels), rtol=1e-5, atol=1e-5)


def test_a_score_is_top_1_accuracy_over_the_split(suite, load, folders):
    params = moved(suite.base)
    small, scores = load(eval_batch=2), []
    for task, split in (("MNIST", "dev"), ("MNIST", "test"), ("shapes", "test")):
        stored = arrays(folders / "rows", task, split)
        images = pixels.prepare(stored["images"], clip.load(folders / "model").processor)
        right = 0
        for image, label in zip(images, torch.from_numpy(stored["labels"]), strict=True):
            right += suite.loss_fn(task)(params, (image[None], label[None]))[1].argmax() == label
        score = suite.score(params, task, split)
        assert score == pytest.approx(100 * right.item() / len(images))
        assert small.score(params, task, split) == score
        scores.append(score)
    assert {*scores} - {0, 100}  # the tokens of the heads differ from run to run: a task may have none right
    predicted = suite.predictions(params, "MNIST", suite._parts("MNIST", "test", 4))
    score = load(metric="macro-f1").score(params, "MNIST", "test")
    assert score == macro_f1(predicted, suite._labels("MNIST", "test"))


def test_scoring_leaves_the_model_as_it_was(suite):
    kept = tree.clone(suite.base)
    suite.score({name: torch.zeros_like(leaf) for name, leaf in kept.items()}, "MNIST", "dev")
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in kept.items())
    with pytest.raises(ValueError, match=r"lacks parameter 'post_layernorm\.weight'"):
        suite.score({n: leaf for n, leaf in kept.items() if n != "post_layernorm.weight"}, "MNIST", "dev")


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_methods_learn_the_rows(load, checkpointing):
    suite, key = load(gradient_checkpointing=checkpointing), random.key(0)
    loss_fn, where = suite.loss_fn("MNIST"), suite.where
    strengths = {"alpha_min": 0.1, "drop_prob": 0.5, "sigma": 1e-3, "period": 4, "where": where}
    everything = suite.batch("MNIST", key, 0), suite.batch("MNIST", key, 1), suite.batch("MNIST", key, 2)
    before = fmean(loss_fn(suite.base, batch)[0].item() for batch in everything)
    for method in (
        finetune.build(loss_fn, adam(3e-3), suite.base),
        smat.build(loss_fn, adam(3e-3), suite.base, **strengths),
    ):
        state = method.init(suite.base)
        for step in range(48):
            state, _ = method.update(key, state, suite.batch("MNIST", key, step))
        after = fmean(loss_fn(state.params, batch)[0].item() for batch in everything)
        assert after < 0.9 * before


def test_a_second_load_makes_no_head_and_prepares_no_split(load, suite, folders, monkeypatch):
    first, prepare = suite.score(suite.base, "MNIST", "test"), pixels.prepare

    def few(images, processor, places=None):
        return prepare(images, processor, places) if places == [0] else pytest.fail("it is in the cache")

    monkeypatch.setattr(pixels, "prepare", few)
    monkeypatch.setattr(clip, "zero_shot_head", lambda *args: pytest.fail("it is in the cache"))
    assert load().score(suite.base, "MNIST", "test") == first


def test_heads_and_scores_follow_the_config(load, folders, tmp_path):
    """Weights with another activation, which config.json corrects, give other heads and scores."""
    shutil.copytree(folders / "model", tmp_path / "model")
    before = load(model=str(tmp_path / "model"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"]["hidden_act"] = "relu"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    after = load(model=str(tmp_path / "model"))
    batch = after.batch("shapes", random.key(0), 0)
    assert not torch.equal(*(own.loss_fn("shapes")(own.base, batch)[1] for own in (before, after)))
    assert after.content("shapes", "dev") != before.content("shapes", "dev")


def test_the_text_tower_is_not_kept(load, monkeypatch):
    seen = []

    def spy(*args, **options):
        bundle = real(*args, **options)
        seen.append(weakref.ref(bundle.head))
        return bundle

    real = clip.load
    monkeypatch.setattr(clip, "load", spy)
    suite = load()
    gc.collect()
    # the head's maker holds the whole model, nothing else does
    assert [ref() for ref in seen] == [None]
    assert suite.tasks == tuple(NAMES)


def test_the_recipe_is_json_and_rebuilds_the_suite(load, suite, folders, monkeypatch):
    monkeypatch.chdir(folders)
    assert load(model="model", data="./rows").recipe == suite.recipe
    recipe = json.loads(json.dumps(suite.recipe))
    assert (recipe["model"], recipe["data"]) == (str(folders / "model"), str(folders / "rows"))
    assert recipe["tasks"] == ["MNIST", "shapes"]
    assert recipe["templates"] == {"MNIST": ['a photo of the number: "{}".'], "shapes": ["a photo of a {}."]}
    twin = load_suite(**recipe, device="cpu")
    assert twin.recipe == suite.recipe
    assert checkpoint.fingerprint(twin.base) == checkpoint.fingerprint(suite.base)
    assert twin.content("shapes", "dev") == suite.content("shapes", "dev") != suite.content("shapes", "test")


def test_templates_are_by_task_for_all_tasks_or_in_a_file(load, suite, tmp_path):
    given = {"shapes": ["the {}", "my {}"]}
    (tmp_path / "templates.json").write_text(json.dumps(given))
    one, from_file = load(templates=given), load(templates=str(tmp_path / "templates.json"))
    assert one.recipe["templates"] == from_file.recipe["templates"] == suite.recipe["templates"] | given
    assert load(templates="a {}").recipe["templates"] == {task: ["a {}"] for task in NAMES}
    batch = suite.batch("shapes", random.key(0), 0)
    logits = [each.loss_fn("shapes")(suite.base, batch)[1] for each in (suite, one, from_file)]
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[0], logits[1])
    assert one.content("shapes", "dev") != suite.content("shapes", "dev")
    assert one.content("MNIST", "dev") == suite.content("MNIST", "dev")
    for bad, complaint in (
        ("a photo", "is not a prompt with {} for the class or a JSON file"),
        ({"MNIST": "a {}"}, "must be lists of prompts by task"),
        ({"SVHN": ["a {}"]}, r"templates name \['SVHN'\], the tasks are \['MNIST', 'shapes'\]"),
        ({"MNIST": ["a {}", "b"], "shapes": []}, r"do not: \['b'\].*shapes: the list is empty"),
        ({"shapes": ["a" + 100 * " {}"]}, "shapes: 2 prompts have more tokens than the 77"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load(templates=bad)


def test_rows_and_dtype_reach_the_suite(load, suite):
    few = load(rows=3, dtype="bfloat16")
    assert few.epoch_steps("MNIST") == 1
    assert sorted(few.batch("MNIST", random.key(0), 0)[1].tolist()) == [0, 1, 2]
    assert {leaf.dtype for leaf in few.base.values()} == {torch.bfloat16}
    assert few.score(few.base, "MNIST", "test") in (0, pytest.approx(100 / 3), pytest.approx(200 / 3), 100)


def test_folders_of_classes_and_encoded_images_give_the_same_suite(load, suite, folders, tmp_path):
    from PIL import Image

    for split in SIZES:
        stored = arrays(folders / "rows", "shapes", split)
        for i, (image, label) in enumerate(zip(stored["images"], stored["labels"], strict=True)):
            # by name: square is label 1
            path = tmp_path / "shapes" / split / NAMES["shapes"][label] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    other = load(data=str(tmp_path))
    images, labels = other.batch("shapes", random.key(2), 0)
    ready = pixels.prepare(
        arrays(folders / "rows", "shapes", "train")["images"], clip.load(folders / "model").processor
    )
    for image, label in zip(images, labels, strict=True):
        (place,) = [i for i, one in enumerate(ready) if torch.equal(one, image)]
        assert place % 2 == 1 - label
    params = moved(suite.base)
    assert other.score(params, "shapes", "test") == suite.score(params, "shapes", "test")


def test_the_hub_is_asked_by_task_and_split_and_one_split_may_name_the_classes(load, monkeypatch):
    import datasets

    asked = []

    def load_dataset(source, name, split):
        asked.append((source, name, split))
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES["shapes"])}
        if split != "train":
            features["label"] = datasets.Value("int64")
        from PIL import Image

        images = [Image.fromarray(np.full((9, 9, 3), 99 * i, dtype=np.uint8)) for i in range(2)]
        rows = {"image": images, "label": [0, 1]}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    suite = load(data="someone/eight", tasks=["SVHN"], templates="a {}")
    assert asked == [("someone/eight", "SVHN", split) for split in ("train", "dev", "test")]
    assert suite.recipe["data"] == "someone/eight"
    assert suite.score(suite.base, "SVHN", "test") in (0, 50, 100)


def test_class_names_with_underscores_are_a_note(load, tmp_path):
    write_task(tmp_path, "places", ("train_station", "bus_stop", "beach"))
    note = "2 class names of places have underscores ('train_station'), also in prompts: write them with spaces"
    assert load(data=str(tmp_path)).notes == (note,)


@pytest.mark.parametrize("encoded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_images_in_two_splits_or_with_two_labels_are_a_note(load, folders, tmp_path, encoded):
    assert load().notes == ()
    names = ("square", "round", "thing")
    images = arrays(folders / "rows", "shapes", "train")["images"]
    for split, chosen, labels in (("train", [0, 1, 2, 0], [0, 1, 0, 1]), ("dev", [3, 2], [1, 0]), ("test", [4], [2])):
        file = tmp_path / "rows" / "shapes" / f"{split}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not encoded:
            np.savez(file, images=images[chosen], labels=labels, class_names=np.array(names))
            continue
        from PIL import Image

        for place, (i, label) in enumerate(zip(chosen, labels, strict=True)):
            (folder := file.with_suffix("") / names[label]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[i]).save(folder / f"{place}.png")
    assert load(data=str(tmp_path / "rows")).notes == (
        "1 of the 2 dev rows of shapes are training rows too: scores on them are too high",
        "shapes trains on 1 row with two labels or more",
        "no train row of shapes is of class thing, which dev or test have",
    )


def test_splits_that_a_task_lacks_are_made_from_train(load, folders, tmp_path):
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 255, (40, 9, 9, 3), dtype=np.uint8)
    for place, image in enumerate(images):
        home = tmp_path / "rows/mine/train" / ("even", "odd")[place % 2]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(home / f"{place}.png")
    suite = load(data=str(tmp_path / "rows"), templates="a {}")
    assert suite.notes == ("mine has no test and no dev split, made from train: 26 train, 6 dev, 8 test rows",)
    assert [suite._rows["mine", split].labels.tolist().count(0) for split in ("train", "dev", "test")] == [13, 3, 4]
    few = load(data=str(tmp_path / "rows"), templates="a {}", rows=4)
    assert few.notes[0] == "mine has no test and no dev split, made from train: 4 train, 4 dev, 4 test rows"
    alone = tmp_path / "rows/mine/train/alone"  # a class of one image keeps it in train
    alone.mkdir()
    Image.fromarray(images[0] // 2).save(alone / "0.png")
    kept = load(data=str(tmp_path / "rows"), templates="a {}")
    assert [kept._rows["mine", split].labels.tolist().count(0) for split in ("train", "dev", "test")] == [1, 0, 0]


def test_a_hub_that_fails_is_asked_once(load, monkeypatch):
    asked = []

    def fails(source, task, split, columns):
        asked.append((source, task, split))
        raise ValueError("cannot be had")

    monkeypatch.setattr(clip8, "load_rows", fails)
    with pytest.raises(ValueError, match=r"^cannot be had$"):
        load(data="nobody/none")
    assert asked == [("nobody/none", "Cars", "train")]


def test_data_problems_are_told_together_before_the_model_is_loaded(load, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(clip, "load", lambda *a, **k: pytest.fail("the model is not needed"))
    shutil.copytree(folders / "rows", tmp_path / "rows")
    stored = arrays(folders / "rows", "MNIST", "dev")
    np.savez(tmp_path / "rows" / "MNIST" / "dev.npz", **stored | {"labels": stored["labels"] + 1})
    np.savez(tmp_path / "rows" / "MNIST" / "test.npz", images=stored["images"][0], labels=stored["labels"])
    np.savez(tmp_path / "rows" / "shapes" / "train.npz", **stored | {"images": stored["images"][0]})
    (tmp_path / "rows" / "shapes" / "dev.npz").unlink()
    (tmp_path / "rows" / "shapes" / "test.npz").unlink()
    (tmp_path / "rows" / "shapes" / "test.json").write_text('[{"prompt": "a", "answer": "b"}]')
    with pytest.raises(ValueError, match="the label of row 2 is outside 0 to 2") as error:
        load(data=str(tmp_path / "rows"), model=str(tmp_path / "none"), eval_batch=0)
    message = str(error.value)
    for part in (
        "dev.npz: the label of row 2 is outside 0 to 2",
        "lacks ['class_names']",
        "images are uint8 (9, 10, 3), must be uint8 (N, H, W, 3)",
        "(shapes, test) holds texts, this suite takes images and labels: give some",
        f"no folder {tmp_path / 'none'}",
        "eval_batch is 0",
    ):
        assert part in message
    assert "\n" not in message


def test_class_names_that_do_not_fit_are_told_together(load, folders, tmp_path):
    import pyarrow
    import pyarrow.parquet

    stored = arrays(folders / "rows", "MNIST", "dev")
    for task in ("none", "other", "few"):
        shutil.copytree(folders / "rows" / "MNIST", tmp_path / task)
    np.savez(tmp_path / "other" / "test.npz", **stored | {"class_names": np.array(["0", "1", "two"])})
    picture = (folders / "rows").parent / "picture.png"
    from PIL import Image

    Image.fromarray(stored["images"][0]).save(picture)
    for split in SIZES:
        (tmp_path / "none" / f"{split}.npz").unlink()
        pyarrow.parquet.write_table(
            pyarrow.table({"image": [picture.read_bytes()], "label": [5]}), tmp_path / "none" / f"{split}.parquet"
        )
    (tmp_path / "few" / "dev.npz").unlink()
    shutil.copy(tmp_path / "none" / "dev.parquet", tmp_path / "few" / "dev.parquet")
    alone = stored | {"labels": stored["labels"] * 0, "class_names": np.array(["0"])}
    for split in SIZES:
        (tmp_path / "one").mkdir(exist_ok=True)
        np.savez(tmp_path / "one" / f"{split}.npz", **alone)
    odd = stored | {"labels": stored["labels"] % 3, "class_names": np.array(["0", " ", "0"])}
    for split in SIZES:
        (tmp_path / "twice").mkdir(exist_ok=True)
        np.savez(tmp_path / "twice" / f"{split}.npz", **odd)
    with pytest.raises(ValueError, match="none names no classes, but a head needs them") as error:
        load(data=str(tmp_path))
    assert "the class names of other in test are not those in train" in str(error.value)
    assert "few has label 5 in dev and 3 class names" in str(error.value)
    assert "twice has two classes '0': rename one, or merge their labels" in str(error.value)
    assert "twice has a class without a name: give it one" in str(error.value)
    assert "all images of one are of class '0': give two or more" in str(error.value)


def test_bad_options_are_told_together(load):
    with pytest.raises(ValueError, match=r"metric 'mcc' is unknown.*'balanced-accuracy'"):
        load(metric="mcc")
    with pytest.raises(ValueError, match="batch_size is 0") as error:
        load(batch_size=0, rows=2.5, gradient_checkpointing=1)
    for part in ("rows is 2.5", "gradient_checkpointing is 1"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"no options \['epochs'\].*'device', 'eval_batch'"):
        load(epochs=3)
    with pytest.raises(ValueError, match="clip8 needs model and data"):
        load_suite("clip8", seed=0)
    for odd in ("gpu", "meta", "mps", "xpu"):
        with pytest.raises(ValueError, match=f"device '{odd}' is unknown, or not here: cpu, cuda, or cuda:1"):
            load(device=odd)
    with pytest.raises(ValueError, match="device 'gpu' is unknown"):
        load(device="gpu")


def test_unknown_tasks_and_splits_are_refused(suite):
    for call in (suite.loss_fn, suite.epoch_steps, lambda task: suite.batch(task, random.key(0), 0)):
        with pytest.raises(ValueError, match=r"clip8 task 'SVHN' is unknown.*'MNIST'"):
            call("SVHN")
    with pytest.raises(ValueError, match=r"split 'train' is unknown"):
        suite.score(suite.base, "MNIST", "train")


def test_classes_that_no_prompt_tells_apart_are_an_error(load, folders, tmp_path):
    for split in SIZES:
        names = {"class_names": np.array(["square", "Square"])}  # CLIP's tokenizer knows no case
        (tmp_path / "shapes").mkdir(exist_ok=True)
        np.savez(tmp_path / "shapes" / f"{split}.npz", **arrays(folders / "rows", "shapes", split) | names)
    with pytest.raises(
        ValueError, match="shapes: the prompts of classes 0 and 1, 'square' and 'Square', have the same"
    ):
        load(data=str(tmp_path))


def test_a_processor_of_another_size_is_told(load, folders, tmp_path):
    shutil.copytree(folders / "model", tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    values = json.loads(file.read_text()) | {"crop_size": {"height": 8, "width": 6}}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"makes images of \(8, 6\) \(task MNIST, train\), the model takes \(8, 8\)"):
        load(model=str(tmp_path / "model"))


def test_the_presets_name_the_papers_data():
    for name in ("clip-vit-b32", "clip-vit-l14"):
        assert PRESETS[name].suite == "clip8"
        assert task_names("clip8", **PRESETS[name].options) == EIGHT


def test_training_rows_are_named_by_file_and_told_apart_by_content(load, suite, tmp_path):
    write_task(tmp_path, "shapes", NAMES["shapes"])
    file = tmp_path / "shapes" / "train.npz"
    own = load(data=str(tmp_path)).train_rows("shapes")
    assert own == {**suite.train_rows("shapes"), "from": str(file)}
    assert own["count"] == SIZES["train"]
    found = arrays(tmp_path, "shapes", "train")
    found["images"][3, 0, 0, 0] ^= 1
    np.savez(file, **found)
    edited = load(data=str(tmp_path)).train_rows("shapes")
    assert edited["hash"] != own["hash"]


def test_tasks_that_come_later_join_a_run_and_other_class_names_do_not(load, tmp_path):
    rows, out, told = tmp_path / "rows", tmp_path / "run", list[str]()

    def train(**options):
        suite, run = load(data=str(rows), **options), RunOptions(out, (), 3, resume=out.exists())
        training = Training(steps=1, lr=1e-3)
        train_run(suite, Finetune(), training, replace(run, tasks=suite.tasks), report=told.append)
        return suite

    write_task(rows, "shapes", NAMES["shapes"])
    train()
    suite = (write_task(rows, "MNIST", NAMES["MNIST"]), train())[1]
    assert "shapes: already finished" in told
    found = find_inputs(out)
    merge_run(Request([TaskArithmetic(coef=0.5)], *found, out=tmp_path / "merged", search=True, seed=0))
    recipe = checkpoint.load_manifest(tmp_path / "merged/ta")["suite"]
    assert recipe == {**suite.recipe, "tasks": recipe["tasks"]}
    with pytest.raises(
        ValueError, match=r"shapes in .* other settings: suite\.templates\.shapes was .*, is \['a {}'\]"
    ):
        train(templates={"shapes": ["a {}"]})
    for split in SIZES:
        stored = arrays(rows, "shapes", split)
        np.savez(rows / "shapes" / f"{split}.npz", **stored | {"class_names": np.array(["square", "disc"])})
    with pytest.raises(ValueError, match=r"class names of shapes changed .* of them: 'round thing' is now 'disc'"):
        train()


@pytest.fixture(scope="module")
def exported(load, folders, tmp_path_factory):
    """A run, and its experts as models of another tool: a whole CLIP, and its vision tower alone."""
    from transformers import CLIPVisionModel

    root, suite = tmp_path_factory.mktemp("exported"), load()
    train_run(suite, Finetune(), Training(steps=2, lr=0.01), RunOptions(root / "run", suite.tasks, 3))
    for task in NAMES:
        export(root / "run" / task, folders / "model", root / task)
    shutil.copytree(root / "MNIST", root / "whole").joinpath(checkpoint.MANIFEST).unlink()
    CLIPVisionModel.from_pretrained(root / "shapes").save_pretrained(root / "tower")
    return root


BY_DATA = [
    (adapt, AdaMerging, {"steps": 3, "lr": 0.01, "batch": 3}),
    (regress, RegMeanPlus, {"rows": 8}),
]


@pytest.mark.parametrize(("make", "asked", "options"), BY_DATA, ids=["adamerging", "reg_mean_plus"])
def test_experts_of_other_tools_are_merged_by_data_as_those_of_a_run(
    make, asked, options, exported, folders, suite, tmp_path
):
    local = {"device": "cpu", "batch_size": 4}
    list(make(asked(run=exported / "run", out=tmp_path / "run", suite_options=local, **options)))
    (place,) = (tmp_path / "run").iterdir()
    wanted, facts = checkpoint.load_leaves(place)
    base, whole = folders / "model", load_file(folders / "model" / "model.safetensors")
    named = f"MNIST={exported / 'whole'}", f"shapes={exported / 'tower'}"
    of_others = {"base": base, "preset": "images", "data": str(folders / "rows"), "suite_options": local}
    for kind, experts in (("others", named), ("exported", (exported / "MNIST", exported / "shapes"))):
        given = of_others | {"experts": tuple(map(Path, experts)), "out": tmp_path / kind}
        lines = list(make(asked(**given, **options)))
        note = f"suite 'clip8' does not train {len(whole) - len(wanted)} parameters of base: they stay base's"
        assert f"note: {note}" in lines
        found, manifest = checkpoint.load_leaves(tmp_path / kind / place.name)
        assert checkpoint.same(found, whole | {f"vision_model.{path}": leaf for path, leaf in wanted.items()})
        same = ("hyperparameters", "dev", "data", "coefs", "entropy")
        assert {name: manifest.get(name) for name in same} == {name: facts.get(name) for name in same}
        assert manifest["base_fingerprint"] == checkpoint.fingerprint(whole)
        assert manifest["notes"][-1] == note
    rows = evaluate([tmp_path / "others" / place.name])
    assert {row.task: row.score for row in rows} == {task: suite.score(wanted, task, "test") for task in NAMES}
    export(tmp_path / "others" / place.name, base, tmp_path / "out")
    assert checkpoint.same(load_file(tmp_path / "out" / "model.safetensors"), found)


def test_what_mergers_by_data_cannot_have_of_other_tools_is_told(exported, folders, tmp_path):
    base, data, local = folders / "model", str(folders / "rows"), {"device": "cpu"}
    whole, tower = exported / "whole", exported / "tower"

    def told(*experts, make=adapt, asked=AdaMerging, **changes):
        given = {"base": base, "preset": "images", "data": data, "suite_options": local, "out": tmp_path / "out"}
        with pytest.raises(ValueError, match=" ") as error:
            list(make(asked(**{**given, "experts": tuple(map(Path, experts)), **changes})))
        assert not (tmp_path / "out").exists()
        return str(error.value)

    either = "give either --run FOLDER of train.py, or --base FOLDER with --experts FOLDER..."
    assert told(run=exported / "run") == told(tower, run=exported / "run", base=None) == either
    assert told(base=None) == told() == either
    assert told(tower, base=None) == f"{either}; the base, which the experts were trained from, is missing"
    both = f"MNIST={whole}", f"shapes={tower}"
    assert "expert 'tower' has no task of suite 'clip8': name it as its task, NAME=FOLDER, of" in told(both[0], tower)
    assert "no expert names a suite: pass --preset lm, text or images with --data" in told(
        *both, preset=None, data=None
    )
    assert told(*both, preset="lm") == "adamerging requires classifiers: suite 'trace' has none, choose another merger"
    assert told(f"MNIST={whole}@0.5").startswith("adamerging takes no weights by expert, as MNIST=")
    write_task(tmp_path / "rows", "MNIST", NAMES["MNIST"])
    write_task(tmp_path / "rows", "shapes", NAMES["shapes"], {"train": 30})
    for make, asked in ((adapt, AdaMerging), (regress, RegMeanPlus)):
        text = told(*both, make=make, asked=asked, data=str(tmp_path / "rows"))
        assert "shapes has no dev split, and one made of its training rows may hold rows that expert 'shapes'" in text
        assert "MNIST" not in text


def test_a_joint_step_has_the_loss_of_its_task(suite, joint_of):
    together = joint_of(suite)
    rows = together.train_rows("joint")
    assert rows["count"] == sum(suite.train_rows(task)["count"] for task in suite.tasks)
    assert rows["hash"] not in {suite.train_rows(task)["hash"] for task in suite.tasks}


def test_a_joint_model_is_scored_on_all_tasks_and_exported(suite, folders, tmp_path):
    given = joint_run(suite, Training(2, 1e-3), RunOptions(tmp_path, ("joint",), 0, joint=suite.tasks))
    (folder,) = train_run(given[0], Finetune(), *given[1:])
    assert {(row.model, row.task) for row in evaluate([folder])} == {("joint", task) for task in suite.tasks}
    export(folder, folders / "model", tmp_path / "exported")
    trained, whole = checkpoint.load_leaves(folder)[0], load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(whole[f"vision_model.{name}"], leaf) for name, leaf in trained.items())
    assert f"# FT on all of {', '.join(suite.tasks)}\n" in (tmp_path / "exported" / "README.md").read_text()
