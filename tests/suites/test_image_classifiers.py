"""Image tasks on models without a text tower: frozen heads from a few rows, the rest trained, merged and scored."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint, random
from smat_fn.data import pixels
from smat_fn.data.rows import load_rows
from smat_fn.evaluate.metrics import accuracy
from smat_fn.grad import value_and_grad, with_master_weights
from smat_fn.mat import smat
from smat_fn.merge import weight_average
from smat_fn.models import image_classifier
from smat_fn.optim import adam
from smat_fn.scripts.merge.experts.whole_models import suite_part, whole_base
from smat_fn.suites import clip8, heads, load_suite

NAMES = ("dark", "light", "red")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def save(folder, kind="vit"):
    """A tiny random model with a head of its own and an image processor."""
    import transformers as hf

    torch.manual_seed(0)
    common = {"image_size": 8, "patch_size": 4, "num_labels": 5}
    if kind == "vit":
        module = hf.ViTForImageClassification(hf.ViTConfig(**common, **SIZES, hidden_dropout_prob=0.5))
    elif kind == "swin":
        sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
        module = hf.SwinForImageClassification(hf.SwinConfig(**{**common, "patch_size": 2}, **sizes))
    elif kind == "resnet":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        module = hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=5, **sizes))
    elif kind in ("CLIP", "Siglip"):  # their configs have a text tower too, which is not there
        towers = {"vision_config": SIZES | common, "text_config": SIZES | {"vocab_size": 9}}
        config = getattr(hf, f"{kind}Config")(**towers, num_labels=5)
        module = getattr(hf, f"{kind}ForImageClassification")(config)
    else:
        module = hf.ViTModel(hf.ViTConfig(**common, **SIZES), add_pooling_layer=False)
    module.save_pretrained(folder)
    hf.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and images of three classes that brightness and colour tell apart."""
    root = tmp_path_factory.mktemp("classifier")
    save(root / "model")
    for seed, task in enumerate(("plain", "shapes")):
        (root / "rows" / task).mkdir(parents=True)
        for split, size in (("train", 30), ("dev", 9), ("test", 12)):
            labels = np.arange(size) % 3
            images = np.random.default_rng((seed, size)).integers(0, 90, (size, 8, 8, 3))
            images[labels == 1] += 60
            images[labels == 2, ..., 0] += 60
            arrays = {"images": images.astype(np.uint8), "labels": labels, "class_names": np.array(NAMES)}
            np.savez(root / "rows" / task / f"{split}.npz", **arrays)
    return root


@pytest.fixture(scope="module")
def load(folders, _own_cache):
    def call(seed=3, **options):
        given = {"model": str(folders / "model"), "data": str(folders / "rows"), "device": "cpu", "batch_size": 8}
        return load_suite("clip8", **{"seed": seed, **given, **options})

    return call


@pytest.fixture(scope="module")
def suite(load):
    return load()


def test_the_base_is_all_but_the_head_and_the_masked_set_that_of_blocks(suite, folders):
    from transformers import ViTForImageClassification

    whole = dict(ViTForImageClassification.from_pretrained(folders / "model").named_parameters())
    assert list(suite.base) == [name for name in whole if not name.startswith("classifier.")]
    assert all(torch.equal(leaf, whole[name]) for name, leaf in suite.base.items())
    masked = {name for name, leaf in suite.base.items() if suite.where(name, leaf)}
    assert masked == {name for name in suite.base if ".layer" in name and whole[name].ndim == 2}
    assert len(masked) == 2 * 6


def test_a_whole_model_may_have_another_head_than_base(suite):
    base = whole_base(suite)
    part = suite_part(suite, base)
    assert part.view.leaves.keys() - set(part.read) == {"classifier.weight", "classifier.bias"}
    part.check("expert", {**base, "classifier.weight": base["classifier.weight"] + 1})
    other = {path: leaf + 1 for path, leaf in base.items()}
    found = part.whole(part.of(other), base)  # under the names that the file has
    own_head = [path for path in base if path.startswith("classifier.")]
    assert part.naming is not None
    assert checkpoint.same(found, other | {path: base[path] for path in own_head})
    assert part.changed_beside([base, other]) == own_head
    assert part.changed_beside([found]) == []


def test_features_are_what_the_models_own_head_gets(folders):
    from transformers import ViTForImageClassification

    module = ViTForImageClassification.from_pretrained(folders / "model").eval()
    values, model = torch.rand(4, 3, 8, 8), image_classifier.load(folders / "model")
    with torch.no_grad():
        own = module.vit(values).last_hidden_state[:, 0]
        assert torch.equal(model.features(values), F.normalize(own, dim=-1))
        assert torch.equal(module.classifier(own), module(values).logits)


def test_a_head_is_the_logistic_regression_of_a_few_rows_and_frozen(suite, folders):
    model = image_classifier.load(folders / "model")
    train = load_rows(folders / "rows", "shapes", "train")
    places = heads.head_rows(train.labels.tolist(), 3, random.fold_in(random.key(3), "shapes"), None)
    assert sorted(train.labels[places].tolist()) == [0] * 10 + [1] * 10 + [2] * 10
    few = pixels.prepare(train.images, model.processor, places)
    values = pixels.look_up(pixels.value_table(model.processor), few)
    head = heads.fit_head(model.features(values), torch.from_numpy(train.labels[places]), c=10.0)
    batch = suite.batch("shapes", random.key(0), 0)
    loss, logits = suite.loss_fn("shapes")(suite.base, batch)
    expected = F.linear(model.features(pixels.look_up(pixels.value_table(model.processor), batch[0])), **head)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(loss, F.cross_entropy(expected, batch[1]))


def test_transformers_alone_gives_the_score_under_the_suites_head(suite, folders):
    """As docs/own_model.md does with an exported model: image by image, classes by name."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(folders / "model").eval()
    model.classifier = torch.nn.Identity()
    processor = AutoImageProcessor.from_pretrained(folders / "model", backend="pil")
    weight, bias, classes = suite.heads["shapes"]
    test, right = load_rows(folders / "rows", "shapes", "test"), 0
    for image, label in zip(test.images, test.labels, strict=True):
        with torch.no_grad():
            found = model(**processor(image, return_tensors="pt")).logits.flatten(1)
        right += classes[(F.normalize(found, dim=-1) @ weight.T + bias).argmax()] == NAMES[label]
    assert suite.score(suite.base, "shapes", "test") == 100 * right / 12
    assert right > 4  # more than chance


def test_smat_trains_experts_that_merge_and_are_scored(suite):
    settings = {"alpha_min": 0.1, "drop_prob": 0.5, "sigma": 1e-3, "period": 4}
    experts = {}
    for task in suite.tasks:
        loss_fn = suite.loss_fn(task)
        method = smat.build(loss_fn, adam(3e-3), suite.base, where=suite.where, **settings)
        state = method.init(suite.base)
        for step in range(24):
            state, _ = method.update(random.key(0), state, suite.batch(task, random.key(0), step))
        (batch, _), *_ = suite.dev_batches(task)
        assert loss_fn(state.params, batch)[0] < 0.8 * loss_fn(suite.base, batch)[0]
        experts[task] = state.params
    merged = weight_average(experts)
    parts = [suite.loss_fn("plain")(merged, micro.batch) for micro in suite.dev_batches("plain")]
    found = torch.cat([logits.argmax(1) for _, logits in parts])
    labels = torch.cat([micro.batch[1] for micro in suite.dev_batches("plain")])
    assert suite.score(merged, "plain", "dev") == accuracy(found, labels)


def test_the_recipe_rebuilds_the_suite_and_the_seed_chooses_the_rows(load, suite):
    recipe = json.loads(json.dumps(suite.recipe))
    assert recipe["templates"] == {}
    batch = suite.batch("plain", random.key(1), 0)
    again = load_suite(**recipe, device="cpu").loss_fn("plain")(suite.base, batch)[1]
    first = suite.loss_fn("plain")(suite.base, batch)[1]
    assert torch.equal(again, first)
    few = {"rows": 30}
    assert torch.equal(load(**few).loss_fn("plain")(suite.base, batch)[1], first)


@pytest.mark.parametrize(
    "kind",
    ["vit", "backbone", "CLIP", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("swin", "resnet", "Siglip"))],
)
def test_other_models_are_taken_as_they_are(kind, load, tmp_path):
    suite = load(model=str(save(tmp_path, kind)), tasks=["plain"])
    loss, logits = suite.loss_fn("plain")(suite.base, suite.batch("plain", random.key(0), 0))
    assert logits.shape == (8, 3)
    assert torch.isfinite(loss)
    assert not any("classifier" in name for name in suite.base)
    assert any(suite.where(name, leaf) for name, leaf in suite.base.items()) == (kind != "resnet")


def test_gradient_checkpointing_gives_the_same_bits_without_dropout(load, suite):
    batch = suite.batch("plain", random.key(0), 0)
    own = [load(gradient_checkpointing=on).loss_fn("plain") for on in (False, True)]
    (loss, grads), (other, others) = (value_and_grad(fn, engine="autograd")(suite.base, batch) for fn in own)
    assert loss[0] == other[0]
    assert all(torch.equal(grads[name], leaf) for name, leaf in others.items())


def test_what_does_not_fit_is_told(load, folders, tmp_path):
    from transformers import BertConfig, BertModel, ViTImageProcessorPil

    with pytest.raises(ValueError, match="has no text tower: leave them out"):
        load(templates="a photo of a {}.")
    (tmp_path / "few" / "plain").mkdir(parents=True)
    for split in ("train", "dev", "test"):
        with np.load(folders / "rows" / "plain" / f"{split}.npz") as store:
            arrays = dict(store)
        np.savez(tmp_path / "few" / "plain" / f"{split}.npz", **{**arrays, "class_names": np.array([*NAMES, "odd"])})
    with pytest.raises(ValueError, match="plain: no row of train is of class odd, and a head needs one"):
        load(data=str(tmp_path / "few"))
    save(tmp_path / "large")
    ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(tmp_path / "large")
    with pytest.raises(ValueError, match=r"Input image size \(12\*12\) doesn't match model \(8\*8\)"):
        load(model=str(tmp_path / "large"))
    BertModel(BertConfig(vocab_size=5, **SIZES)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="cannot be loaded as a CLIP or an image classifier") as error:
        load(model=str(tmp_path / "bert"))
    assert "\n" not in str(error.value)


def test_the_top_layers_alone_are_trained_with_the_gradients_of_the_whole(load, suite):
    top, options = load(train_layers=1), {"train": "*.layers.1.*"}  # chosen by name: through the whole model
    named = load(**options)
    assert list(top.base) == list(named.base) == [name for name in suite.base if ".layers.1." in name]
    for step in range(3):
        images, states = (own.batch("shapes", random.key(0), step) for own in (named, top))
        assert (images[0].dtype, states[0].dtype) == (torch.uint8, torch.float32)
        assert states[0].shape == (8, 5, 16)  # a class token and four patches
        assert torch.equal(images[1], states[1])
        (expected, wanted), (found, grads) = (
            value_and_grad(own.loss_fn("shapes"))(own.base, batch) for own, batch in ((named, images), (top, states))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
    assert top.score(top.base, "shapes", "dev") == suite.score(suite.base, "shapes", "dev")
    assert top.content("shapes", "dev") != suite.content("shapes", "dev")
    assert not top.notes


def test_states_of_frozen_layers_are_kept_and_follow_model_and_depth(load, monkeypatch):
    from transformers import ViTForImageClassification

    runs = []
    forward = ViTForImageClassification.forward
    monkeypatch.setattr(ViTForImageClassification, "forward", lambda *a, **k: runs.append(1) or forward(*a, **k))
    before = load(train_layers=2).batch("shapes", random.key(0), 0)[0]
    after = load(train_layers=1).batch("shapes", random.key(0), 0)[0]
    assert not torch.equal(before, after)
    suite = load(train_layers=1)
    runs.clear()
    assert torch.equal(suite.batch("shapes", random.key(0), 0)[0], after)
    assert len(runs) <= 1  # asked for the size of a row


@pytest.mark.parametrize("kind", [pytest.param("vit", marks=pytest.mark.slow), "resnet"])
def test_heads_and_scores_follow_what_is_no_parameter(load, tmp_path, kind):
    """An activation that config.json corrects, or statistics of batch norms: weights stay, features do not."""
    save(tmp_path, kind)
    before = load(model=str(tmp_path))
    if kind == "vit":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        shifted = {name: t + 1 if name.endswith("running_mean") else t for name, t in tensors.items()}
        save_file(shifted, tmp_path / "model.safetensors", {"format": "pt"})
    after = load(model=str(tmp_path))
    assert after.content("shapes", "dev") != before.content("shapes", "dev")
    train = load_rows(after.options.data, "shapes", "train")
    made = heads.image_heads(
        {"shapes": train}, {"shapes": NAMES}, image_classifier.load(tmp_path), random.key(3), "another device"
    )  # of this model, not from the cache
    batch = after.batch("shapes", random.key(0), 0)
    table = pixels.value_table(image_classifier.load(tmp_path).processor)
    loss = image_classifier.classify(made["shapes"], lambda values: pixels.look_up(table, values))
    assert torch.equal(
        after.loss_fn("shapes")(after.base, batch)[1], loss(image_classifier.load(tmp_path).module, batch)[1]
    )


def test_models_without_features_of_the_processors_images_are_errors(tmp_path):
    import transformers as hf

    wide = save(tmp_path / "wide")
    hf.ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(wide)
    decoder = {f"decoder_{name}": value for name, value in SIZES.items()}
    hf.ViTMAEModel(hf.ViTMAEConfig(image_size=8, patch_size=4, **SIZES, **decoder)).save_pretrained(tmp_path / "mae")
    hf.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "mae")
    for name, size, message in (
        (
            "wide",
            12,
            r"wide' gives no features of the 12 x 12 images .*12\*12.* doesn't match .*: give an image classifier",
        ),
        ("mae", 8, r"a ViTMAEModel has neither logits nor a pooled output"),
    ):
        with pytest.raises(ValueError, match=message):
            image_classifier.load(tmp_path / name).features(torch.zeros(1, 3, size, size))


def test_states_follow_the_dtype_of_the_weights(load):
    """Mixed precision rounds states as it does the weights of the layers that take them."""
    suite = load(train_layers=1)
    rows, loss = suite.batch("shapes", random.key(0), 0), suite.loss_fn("shapes")
    value, logits = with_master_weights(loss)(suite.base, rows)
    assert abs(value - loss(suite.base, rows)[0]) < 0.05
    assert logits.isfinite().all()


def test_a_split_with_many_states_is_computed_batch_by_batch(load, monkeypatch):
    kept = load(train_layers=1)
    expected = kept.batch("shapes", random.key(0), 0)[0], kept.score(kept.base, "shapes", "test")
    monkeypatch.setattr(clip8, "HELD", 3 * 8 * 8 * 11)  # the images, not their states
    suite = load(train_layers=1)
    torch.testing.assert_close(suite.batch("shapes", random.key(0), 0)[0], expected[0], rtol=1e-5, atol=1e-6)
    assert suite.score(suite.base, "shapes", "test") == expected[1]


def test_a_model_whose_layers_need_more_than_states_runs_whole(load, monkeypatch):
    monkeypatch.setattr(clip8, "top_of", lambda *args: "its layers share what the first one made")
    own = load(train_layers=1)
    assert own.notes == (
        f"the frozen layers of {own.options.model} cannot be cached (its layers share what the first one made): they "
        "run in every step",
    )
    assert own.batch("shapes", random.key(0), 0)[0].dtype == torch.uint8
    assert load(train_layers=1, gradient_checkpointing=True).batch("shapes", random.key(0), 0)[0].dtype == torch.uint8


def test_parameters_to_train_are_chosen_by_name(load, suite):
    some = load(train="*.attention.*, *layernorm.weight")
    assert list(some.base) == [n for n in suite.base if ".attention." in n or n.endswith("layernorm.weight")]
    assert len(some.base) == 2 * 8 + 1
    assert load_suite(**some.recipe, device="cpu").base.keys() == some.base.keys()
    for options, message in (
        ({"train": ("*.attention.*", "*.atention.*")}, r"train names \*\.atention\.\*, which no parameter of ViT"),
        ({"train_layers": 3}, r"train_layers is 3, ViTForImageClassification has 2 layers: choose from 1"),
        ({"train_layers": 1, "train": ("*",)}, r"train_layers is 1 and train names \*: give one of them"),
        ({"train_layers": 0}, r"train_layers is 0"),
        ({"train": ""}, r"train is '', must be patterns of parameter names"),
        ({"train": 3.0}, r"train is 3\.0, must be patterns"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**options)
