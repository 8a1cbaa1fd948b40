"""Short texts on a tiny random BERT: features, heads, frozen states, splits, and all problems before any work."""

import json
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from smat_fn import checkpoint, grad, random, tree
from smat_fn.config import PRESETS, Finetune, Fisher, RegMean, TaskArithmetic, Training
from smat_fn.data import batch_indices, labelled
from smat_fn.errors import check_member
from smat_fn.evaluate.metrics import accuracy, macro_f1
from smat_fn.mat import finetune, smat
from smat_fn.merge.adamerging import adamerging
from smat_fn.merge.reg_mean_plus import reg_mean_plus
from smat_fn.merge.statistics import input_grams
from smat_fn.models import encoder, packing
from smat_fn.optim import adam
from smat_fn.scripts import entry
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.merge.experts.inputs import load_inputs, read_statistics
from smat_fn.scripts.merge.experts.whole_models import suite_part, whole_base
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.settings import AdaMerging, RegMeanPlus, Statistics
from smat_fn.scripts.merge.subcommands.by_data import adapt, regress
from smat_fn.scripts.merge.subcommands.statistics import batches_of, length, make_statistics, without_padding
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import heads, load_suite, short_text, task_names

SHARED = Path(__file__).parents[3] / "shared" / "data" / "text"
WORDS = [f"w{i}" for i in range(24)]
SIZES = {"train": 30, "dev": 9, "test": 11}
CLASSES = {"tone": 2, "topic": 3}


def rows(task, split):
    """Texts of 1 to 9 words, no two alike, whose first word tells the class."""
    generator = torch.Generator().manual_seed(len(task) * 10 + len(split))
    found = []
    for i in range(SIZES[split]):
        rest = torch.randint(3, 24, (i % 9,), generator=generator).tolist()
        words = [f"w{i % CLASSES[task]}", *(WORDS[j] for j in rest)]
        found.append({"text": " ".join(words) + f" {split}{i}", "label": i % CLASSES[task]})
    return found


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in content.items():
        (folder / name).write_text(json.dumps(rows))


def write_model(folder, kind="bert", **options):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    texts = [row["text"] for task in CLASSES for row in rows(task, "train")]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    wrapped.save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    config = AutoConfig.for_model(
        kind, vocab_size=len(wrapped), max_position_embeddings=24, pad_token_id=0, **sizes | options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config)
        for p in model.parameters():
            p.data += 0.2 * torch.randn(p.shape)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("short_text")
    for task in CLASSES:
        write(root / "rows" / task, {f"{split}.json": rows(task, split) for split in SIZES})
    write_model(root / "model")
    return root


@pytest.fixture(scope="module")
def load(folders):
    def call(seed=3, **options):
        given = {"model": str(folders / "model"), "data": str(folders / "rows"), "device": "cpu", "batch_size": 4}
        given |= {"train_layers": 2, "max_length": 16, "progress": False}
        return load_suite("short_text", **{"seed": seed, **given, **options})

    return call


@pytest.fixture(scope="module")
def suite(load):
    return load()


def moved(params, size=0.1):
    generator = torch.Generator().manual_seed(1)
    return {name: leaf + size * torch.randn(leaf.shape, generator=generator) for name, leaf in params.items()}


def whole_model(folders):
    from transformers import AutoModel, AutoTokenizer

    return AutoModel.from_pretrained(folders / "model").eval(), AutoTokenizer.from_pretrained(folders / "model")


def features_one_by_one(model, tokenizer, texts, longest=16):
    found = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"]
        mean = model(input_ids=ids).last_hidden_state[0].mean(0)
        found.append(mean / mean.norm())
    return torch.stack(found)


def test_the_base_is_the_top_layers_alone_and_the_masked_set_their_matrices(suite, folders):
    model, _ = whole_model(folders)
    expected = {n: p for n, p in model.named_parameters() if n.startswith(("encoder.layer.1.", "encoder.layer.2."))}
    assert list(suite.base) == list(expected)
    assert all(torch.equal(suite.base[name], p) for name, p in expected.items())
    assert {n for n, p in suite.base.items() if suite.where(n, p)} == {n for n, p in expected.items() if p.ndim == 2}


@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.slow), None])
def test_features_heads_and_losses_are_those_of_the_whole_model_text_by_text(load, folders, layers):
    suite = load(train_layers=layers)
    model, tokenizer = whole_model(folders)
    params, key = moved(suite.base), random.key(7)
    chosen = batch_indices(key, SIZES["train"], 4, 2).tolist()
    own = [rows("topic", "train")[i] for i in chosen]
    labels = torch.tensor([row["label"] for row in own])

    # heads come from the base: 16 rows a class are more than there are, so all rows
    texts = [row["text"] for row in rows("topic", "train")]
    with torch.no_grad():
        train = labelled.Labelled(tuple(texts), tuple(i % 3 for i in range(30)))
        order = heads.head_rows(train.labels, 3, random.fold_in(random.key(3), "topic"), None)
        features = features_one_by_one(model, tokenizer, [texts[i] for i in order])
        head = heads.fit_head(features, torch.tensor([i % 3 for i in order]), c=10.0)
        model.load_state_dict(params, strict=False)
        logits = features_one_by_one(model, tokenizer, [row["text"] for row in own]) @ head["weight"].T + head["bias"]
    loss, got = suite.loss_fn("topic")(params, suite.batch("topic", key, 2))
    torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels), rtol=1e-3, atol=1e-3)

    test = rows("topic", "test")
    with torch.no_grad():
        tested = features_one_by_one(model, tokenizer, [r["text"] for r in test]) @ head["weight"].T + head["bias"]
    right = [guess == row["label"] for guess, row in zip(tested.argmax(1).tolist(), test, strict=True)]
    assert suite.score(params, "topic", "test") == pytest.approx(100 * sum(right) / len(right))
    found = dict(zip(("weight", "bias"), suite.heads["topic"], strict=False))
    torch.testing.assert_close(found, head, rtol=1e-4, atol=1e-4)  # where the solver stops depends on the processor
    assert len(suite.heads["topic"].classes) == 3


def test_texts_in_several_rows_have_the_features_they_have_in_one(suite, monkeypatch):
    batch, loss_fn = suite.batch("topic", random.key(5), 1), suite.loss_fn("topic")
    params = moved(suite.base)
    whole = loss_fn(params, batch)[1]
    for room in (1, 9, 20):
        monkeypatch.setattr(packing, "ROOM", room)
        torch.testing.assert_close(loss_fn(params, batch)[1], whole, rtol=1e-4, atol=1e-4)


def test_rows_are_about_equally_long():
    lengths = [7, 3, 9, 4, 4, 1, 8]
    for room, rows in ((100, 1), (18, 2), (12, 3), (1, 7)):
        packed = packing.pack(lengths, room)
        assert sorted(place for row in packed for place in row) == list(range(7))
        assert len(packed) == rows
        sums = [sum(lengths[place] for place in row) for row in packed]
        assert max(sums) - min(sums) <= max(lengths)
    assert packing.pack([5, 1, 4, 2], 6) == [[0, 1], [2, 3]]


def test_a_head_is_where_its_penalised_loss_has_no_slope():
    generator = torch.Generator().manual_seed(0)
    for classes, count in ((2, 12), (4, 20)):
        features = F.normalize(torch.randn(count, 5, generator=generator, dtype=torch.float64), dim=1)
        labels = torch.arange(count) % classes
        head = {name: leaf.double() for name, leaf in heads.fit_head(features, labels, c=3.0).items()}
        error = (features @ head["weight"].T + head["bias"]).softmax(1) - F.one_hot(labels, classes)
        weight = head["weight"]
        if classes == 2:  # one vector w is penalised, the difference of the two
            torch.testing.assert_close(weight[0], -weight[1])
            weight = torch.stack((torch.zeros_like(weight[0]), 2 * weight[1]))
            error = torch.stack((torch.zeros_like(error[:, 0]), error[:, 1]), 1)
        torch.testing.assert_close(weight / 3.0 + error.T @ features, torch.zeros_like(weight), rtol=0, atol=5e-3)
        torch.testing.assert_close(error.sum(0), torch.zeros(classes, dtype=torch.float64), rtol=0, atol=5e-3)


def test_the_error_of_a_head_that_cannot_be_fitted_names_an_option_where_there_is_one(monkeypatch):
    def warns(*_):
        warnings.warn("lbfgs failed", ConvergenceWarning, stacklevel=1)

    monkeypatch.setattr(LogisticRegression, "fit", warns)
    values, labels = torch.eye(2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"not converge with c = 3 \(lbfgs failed\): choose a smaller head_c"):
        heads.fit_head(values, labels, c=3.0)
    pixels = SimpleNamespace(value_table=lambda _: None, look_up=lambda _, part: part)
    monkeypatch.setattr(heads, "pixels", pixels)
    with pytest.raises(ValueError, match=r"with c = 10 \(lbfgs failed\): give other training rows, or another encoder"):
        heads._of_images(SimpleNamespace(processor=None, features=lambda part: part), values, labels)


def test_a_head_takes_the_first_rows_of_every_class_in_a_random_order():
    many = labelled.Labelled(("x",) * 90, tuple(i % 30 for i in range(90)))
    few = labelled.Labelled(("x",) * 90, tuple(i % 3 for i in range(90)))
    key = random.key(0)
    for own, classes, given, number in ((few, 3, None, 16), (many, 30, None, 3), (few, 3, 5, 5), (many, 30, 9, 3)):
        places = heads.head_rows(own.labels, classes, key, given)
        assert [own.labels[i] for i in places] == [label for label in range(classes) for _ in range(number)]
        assert len(set(places)) == len(places)
    assert heads.head_rows(few.labels, 3, random.key(1), 5) != heads.head_rows(few.labels, 3, key, 5)


def test_gradients_reach_every_leaf_and_both_engines_agree(suite):
    loss_fn, batch = suite.loss_fn("tone"), suite.batch("tone", random.key(0), 0)
    (loss, _), grads = grad.value_and_grad(loss_fn, engine="autograd")(suite.base, batch)
    assert all(g.abs().sum() > 0 for name, g in grads.items() if not name.endswith("key.bias"))
    (other, _), others = grad.value_and_grad(loss_fn)(suite.base, batch)
    torch.testing.assert_close(other, loss)
    for name, g in grads.items():
        torch.testing.assert_close(others[name], g, rtol=1e-4, atol=1e-6)


def test_methods_train_on_it_and_leave_the_base_alone(suite):
    kept, key = tree.clone(suite.base), random.key(0)
    strengths = {"alpha_min": 0.5, "drop_prob": 0.2, "sigma": 0.01, "period": 2}
    for build, own in ((finetune.build, {}), (smat.build, {"where": suite.where, **strengths})):
        method = build(suite.loss_fn("topic"), adam(3e-3), suite.base, donate=True, **own)
        state, losses = method.init(suite.base), []
        for step in range(40):
            state, info = method.update(key, state, suite.batch("topic", key, step))
            losses.append(float(info.loss))
        assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in kept.items())


def test_frozen_layers_run_once_for_a_row(load, suite, monkeypatch):
    key = random.key(1)
    first, score = suite.batch("tone", key, 3), suite.score(suite.base, "tone", "dev")
    suite.batch("topic", key, 3)
    monkeypatch.setattr(encoder, "_not_alone", lambda *a, **k: "")
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_states", lambda *a, **k: pytest.fail("computed again"))
        patch.setattr(encoder, "_features", lambda *a, **k: pytest.fail("computed again"))
        again = load()
        assert all(torch.equal(a, b) for a, b in zip(again.batch("tone", key, 3), first, strict=True))
        assert again.score(again.base, "tone", "dev") == score
    monkeypatch.setattr(short_text, "HELD", 0)
    for got, wanted in zip(load().batch("tone", key, 3), first, strict=True):
        torch.testing.assert_close(got, wanted)


def test_micro_batches_weigh_as_much_as_they_have_texts(suite):
    batch, loss_fn = suite.batch("topic", random.key(0), 1), suite.loss_fn("topic")
    for parts in (1, 3, 9):
        micros = suite.split(batch, parts)
        assert [own.weight for own in micros] == [len(own.batch.labels) for own in micros]
        assert sum(own.weight for own in micros) == 4
        mean = sum(own.weight * loss_fn(suite.base, own.batch)[0] for own in micros) / 4
        torch.testing.assert_close(mean, loss_fn(suite.base, batch)[0])
    dev = suite.dev_batches("topic")
    assert sum(own.weight for own in dev) == SIZES["dev"]


@pytest.mark.parametrize("layers", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_gram_matrices_count_no_token_that_fills_a_text_up(layers, load, monkeypatch):
    monkeypatch.setattr(packing, "ROOM", 16)
    own = load(train_layers=layers)
    batch, loss = own.batch("topic", random.key(0), 1), own.loss_fn("topic")
    with pytest.raises(ValueError, match=r"the \d+ texts of a batch are filled up to one length inside the loss: give"):
        input_grams(loss, own.base, [batch])
    found = input_grams(loss, own.base, without_padding(own, "topic", [batch]))
    seen = []
    path = next(path for path in found if path.endswith("query.weight"))
    layer = loss.module.get_submodule(path.removesuffix(".weight"))
    with layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])):
        for text, _ in own.split(batch, len(batch.labels)):
            loss(own.base, text)
    tokens = torch.cat(seen)
    assert len(tokens) == len(batch.tokens)
    torch.testing.assert_close(found[path], tokens.T @ tokens / len(tokens))


def test_the_recipe_rebuilds_the_suite_and_the_seed_chooses_head_rows_alone(load, suite):
    recipe = json.loads(json.dumps(suite.recipe))
    twin = load_suite(**recipe, device="cpu", eval_batch=2, progress=False)
    assert twin.recipe == suite.recipe
    params, key = moved(suite.base), random.key(2)
    assert [twin.score(params, t, s) for t in CLASSES for s in ("dev", "test")] == [
        suite.score(params, t, s) for t in CLASSES for s in ("dev", "test")
    ]
    assert twin.content("tone", "dev") == suite.content("tone", "dev") != suite.content("tone", "test")
    one, other = load(seed=4, per_class=2), load(seed=5, per_class=2)
    assert checkpoint.fingerprint(one.base) == checkpoint.fingerprint(other.base)
    assert all(torch.equal(a, b) for a, b in zip(one.batch("tone", key, 0), other.batch("tone", key, 0), strict=True))
    assert not torch.equal(*(s.loss_fn("tone")(s.base, s.batch("tone", key, 0))[1] for s in (one, other)))


def test_a_metric_of_classes_scores_the_same_predictions_and_has_a_key_of_its_own(load, suite):
    other = load(metric="macro-f1")
    params = {path: leaf + 0.3 * torch.randn(leaf.shape) for path, leaf in suite.base.items()}
    predicted = suite.predictions(params, "topic", suite._scored("topic", "test"))
    labels = suite._rows("topic", "test")[1]
    assert suite.score(params, "topic", "test") == accuracy(predicted, labels)
    assert other.score(params, "topic", "test") == macro_f1(predicted, labels) != accuracy(predicted, labels)
    assert "metric" not in suite.recipe  # scores from before the option stay known
    assert other.recipe == {**suite.recipe, "metric": "macro-f1"}
    assert load_suite(**other.recipe).score(params, "topic", "dev") == other.score(params, "topic", "dev")


def test_few_rows_are_the_first_of_each_split_with_the_same_heads(load, suite):
    few, key = load(rows=5), random.key(0)
    assert few.epoch_steps("tone") == 2
    assert {row for step in (0, 1) for row in few.batch_rows("tone", key, step)} == set(range(5))
    assert sum(own.weight for own in few.dev_batches("tone")) == 5
    batch = suite.batch("tone", key, 0)
    assert torch.equal(few.loss_fn("tone")(few.base, batch)[1], suite.loss_fn("tone")(suite.base, batch)[1])


def test_splits_that_are_not_there_are_made_from_train(tmp_path):
    own = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(200)]
    write(tmp_path / "a", {"train.json": [*own, own[0]]})
    task = labelled.load_task(str(tmp_path / "a"))
    sets = {split: set(rows.texts) for split, rows in task.splits.items()}
    assert (list(sets), task.classes) == (["train", "dev", "test"], ("a", "b"))
    assert (len(sets["test"]), len(sets["dev"]), len(sets["train"])) == (40, 32, 128)
    assert task.made == ("test", "dev")
    assert sets["train"] | sets["dev"] | sets["test"] == {row["text"] for row in own}
    assert all(rows.labels.count(0) in (20, 16, 64, 65) for rows in task.splits.values())
    write(tmp_path / "a", {"test.json": own[:20]})
    other = labelled.load_task(str(tmp_path / "a"))
    assert other.splits["test"].texts == tuple(row["text"] for row in own[:20])
    assert not set(other.splits["test"].texts) & {*other.splits["train"].texts, *other.splits["dev"].texts}
    assert labelled.load_task(str(tmp_path / "a")) == other
    assert other.made == ("dev",)


@pytest.mark.parametrize(
    ("count", "sizes"), [(6, (4, 1, 1)), (103, (67, 16, 20)), (299, (200, 49, 50)), (300, (200, 50, 50))]
)
def test_splits_that_are_made_of_few_rows_leave_most_of_them_to_train(tmp_path, count, sizes):
    write(tmp_path / "a", {"train.json": [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(count)]})
    task = labelled.load_task(str(tmp_path / "a"))
    assert tuple(len(own.texts) for own in task.splits.values()) == sizes  # from 300 rows, those of the paper's rule


def test_a_note_counts_the_rows_of_splits_that_are_made(load, tmp_path):
    write(tmp_path / "tone", {"train.json": rows("tone", "train")})
    write(tmp_path / "topic", {f"{split}.json": rows("topic", split) for split in ("train", "dev", "test")})
    made = [note for note in load(data=str(tmp_path)).notes if "made from train" in note]
    assert made == ["tone has no test and no dev split, made from train: 20 train, 4 dev, 6 test rows"]
    few = [note for note in load(data=str(tmp_path), rows=5).notes if "made from train" in note]
    assert few == ["tone has no test and no dev split, made from train: 5 train, 4 dev, 5 test rows"]


def test_a_note_counts_the_rows_that_a_made_split_leaves_out(load, tmp_path):
    own = rows("tone", "train")
    two = [{**own[0], "label": next(row["label"] for row in own if row["label"] != own[0]["label"])}]
    write(tmp_path / "tone", {"train.json": [*own, *two], "test.json": own[5:8]})
    made, trained = (
        [note for note in load(data=str(tmp_path)).notes if part in note] for part in ("made from train", "two labels")
    )
    counts = "23 train, 5 dev, 3 test rows; 3 rows of train are left out, for they are test rows too"
    assert made == [f"tone has no dev split, made from train: {counts}"]
    assert trained == ["tone trains on 1 row with two labels or more"]


def test_other_files_and_spellings_give_the_same_rows(tmp_path, folders):
    import pyarrow
    import pyarrow.parquet

    expected = labelled.load_task(str(folders / "rows" / "topic"))
    names = ["x", "y", "z"]
    write(tmp_path, {"labels.json": names})
    lines = [json.dumps({"sentence": r["text"], "intent": names[r["label"]]}) for r in rows("topic", "train")]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows("topic", "dev")), tmp_path / "validation.parquet")
    write(tmp_path, {"test.json": rows("topic", "test")})
    assert labelled.load_task(str(tmp_path)) == expected._replace(classes=("x", "y", "z"))


def test_the_class_label_of_tables_names_the_classes(tmp_path):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    for split in ("train", "dev", "test"):
        own = Dataset.from_dict({"text": [f"{split} a", f"{split} b"], "label": [0, 1]}, features=features)
        own.to_parquet(tmp_path / f"{split}.parquet")
    assert labelled.load_task(str(tmp_path)).classes == ("neg", "pos")
    (tmp_path / "test.parquet").unlink()
    own.save_to_disk(tmp_path / "test")
    assert labelled.load_task(str(tmp_path)).classes == ("neg", "pos")
    write(tmp_path, {"labels.json": ["negativ", "positiv"]})  # a translation
    assert labelled.load_task(str(tmp_path)).classes == ("negativ", "positiv")


def test_numbers_that_are_names_at_other_places_are_an_error(tmp_path):
    stars = list("12345")
    write(tmp_path, {"labels.json": stars})
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text("text,label\n" + "".join(f"{split} {star},{star}\n" for star in stars))
    write(tmp_path, {"test.json": [{"text": f"test {star}", "label": star} for star in (1, 2, 3, 4)]})
    with pytest.raises(ValueError, match=r"labels\.json: test: the label of rows 0, 1, 2 and 3 \(1 the first\) may"):
        labelled.load_task(str(tmp_path))
    write(tmp_path, {"test.json": [{"text": f"test {star}", "label": star} for star in stars]})
    assert labelled.load_task(str(tmp_path)).splits["test"].labels == (0, 1, 2, 3, 4)
    write(tmp_path, {"labels.json": list("01234"), "test.json": [{"text": "test", "label": 4}]})
    for split in ("train", "dev"):
        rows = "".join(f"{split} {place},{place}\n" for place in range(5))
        (tmp_path / f"{split}.csv").write_text("text,label\n" + rows)
    assert labelled.load_task(str(tmp_path)).splits["test"].labels == (4,)


def test_a_csv_names_its_classes(tmp_path):
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.csv").write_text("text,label\nx,2\ny,1\n", encoding="utf-8-sig")
    found = labelled.load_task(str(tmp_path))
    assert found.classes == ("1", "2")
    assert found.splits["dev"] == labelled.Labelled(("x", "y"), (1, 0))
    (tmp_path / "labels.json").write_text(json.dumps(["none", "one", "two"]))
    with pytest.raises(ValueError, match="no row of train is of class none"):
        labelled.load_task(str(tmp_path))
    (tmp_path / "labels.json").write_text(json.dumps(["none", "one"]))
    with pytest.raises(ValueError, match=r"row 0 is none of the 2 classes \('2' the first\)"):
        labelled.load_task(str(tmp_path))
    write(tmp_path / "users", {"train.json": [{"text": "x", "label": 0}, {"text": "y", "label": 9_000_000_000}]})
    with pytest.raises(ValueError, match=r"users: labels go up to 9000000000 in 2 rows, .* write labels as texts$"):
        labelled.load_task(str(tmp_path / "users"))  # and no list of so many names is made
    (tmp_path / "train.csv").write_text("text,label\nx,2\ny,1\nz,0\n")
    (tmp_path / "labels.json").write_text(json.dumps(["none", "one", "two"]))
    assert labelled.load_task(str(tmp_path)).splits["dev"].labels == (2, 1)


@pytest.mark.parametrize(
    ("train", "test", "complaint"),
    [
        (["1", "2"], [1, 2], r"some labels are numbers and some are texts \(train: str; dev: str; test: int\)"),
        (["pos", "Pos ", "neg"], ["neg"], r"classes \['Pos ', 'pos'\] differ only by case, spaces or the coding"),
        (["caf\u00e9", "cafe\u0301", "bar"], ["bar"], "differ only by case, spaces or the coding of characters"),
        ([1, 2], [1], "no row of train is of class 0, .* number classes from 0 without gaps, or write labels as texts"),
        (["", "a"], ["a"], r"train: the label of row 0 is none of the 1 classes \('' the first\)"),
        ([0, 1.0], [0], r"row 1 is not a label \(1.0 the first\): write whole numbers from 0"),
        ([False, True], [False], r"is not a label \(False the first\): write whole numbers from 0, or the classes' n"),
        (
            [0, 1],
            [-1],
            r"test: .*2 classes \(-1 the first\): .*, and leave out a split whose labels are wit",
        ),
        (["a"], ["a"], "all rows are of class 'a': give two or more"),
    ],
)
def test_labels_that_could_mean_two_classes(tmp_path, train, test, complaint):
    for split, labels in (("train", train), ("dev", train), ("test", test)):
        write(tmp_path, {f"{split}.json": [{"text": f"{split} {i}", "label": x} for i, x in enumerate(labels)]})
    with pytest.raises(ValueError, match=complaint):
        labelled.load_task(str(tmp_path))


def test_the_hub_is_asked_by_task_or_by_the_names_of_a_mapping(load, monkeypatch, tmp_path):
    import datasets

    asked = []

    def load_dataset(source, name):
        asked.append((source, name))
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y"])})
        parts = {split: rows("tone", split) for split in ("train", "test")} | {"validation": rows("tone", "dev")}
        return datasets.DatasetDict({n: datasets.Dataset.from_list(own, features=features) for n, own in parts.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    suite = load(data="someone/many", tasks=["tone"])
    assert suite.recipe["data"] == "someone/many"
    write(tmp_path, {"sources.json": {"a": "someone/one", "b": "someone/two:small"}})
    mapped = load(data=str(tmp_path / "sources.json"))
    assert asked == [("someone/many", "tone"), ("someone/one", None), ("someone/two", "small")]
    assert mapped.tasks == ("a", "b")
    assert load_suite(**json.loads(json.dumps(mapped.recipe)), device="cpu", progress=False).recipe == mapped.recipe


def test_problems_of_data_and_model_are_told_together_before_any_work(load, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "load", lambda *a, **k: pytest.fail("the model is not needed"))
    good = rows("tone", "train")
    write(
        tmp_path / "a",
        {"train.json": [{"text": " ", "label": 0}, {"text": "x", "label": True}, {"text": 5, "label": 0}, *good]},
    )
    write(tmp_path / "b", {"train.json": good, "test.json": [{"text": "x", "label": 7}], "labels.json": ["n", "p"]})
    write(tmp_path / "c", {"train.json": [{"body": "x", "label": 0}]})
    write(tmp_path / "d", {"train.json": good, "dev.json": good, "test.json": good, "labels.json": ["n", "p", "q"]})
    write(tmp_path / "e", {"train.json": {"text": "x"}, "test.json": []})
    (tmp_path / "f").mkdir()
    tasks = [*"abcdef", "g"]
    with pytest.raises(ValueError, match="the text of row 0 is empty") as error:
        load(data=str(tmp_path), tasks=tasks, model=str(tmp_path / "none"), eval_batch=0)
    for part in (
        "the text of row 2 is not text",
        "the label of row 1 is not a label (True the first)",
        "test: the label of row 0 is none of the 2 classes (7 the first)",
        "no column text or sentence, there are ['body', 'label']",
        "no row of train is of class q",
        f"{tmp_path / 'e' / 'train.json'}: it holds one dict, not a list of objects",
        f"{tmp_path / 'e' / 'test.json'}: there are no rows",
        "f: there is no split train",
        f"there is no file or folder {tmp_path / 'g'}",
        f"there is no folder {tmp_path / 'none'}: give a model",
        "eval_batch is 0",
    ):
        assert part in str(error.value)
    with pytest.raises(
        ValueError, match="few has no test and no dev split, and none can be made of its 2 rows of train: "
    ):
        labelled.load_task(str(_few(tmp_path)))


def _few(folder):
    write(folder / "few", {"train.json": rows("tone", "train")[:2]})
    return folder / "few"


def test_bad_options_are_told_together(load, folders):
    with pytest.raises(ValueError, match=r"metric 'mcc' is unknown.*'balanced-accuracy'"):
        load(metric="mcc")
    with pytest.raises(ValueError, match="batch_size is 0") as error:
        load(batch_size=0, rows=2.5, train_layers=0, head_c=0, normalize=1, max_length=2, tasks=["tone", "a/b"])
    for part in ("rows is 2.5", "train_layers is 0", "head_c is 0", "normalize is 1", "max_length is 2", "['a/b']"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"no options \['epochs'\]"):
        load(epochs=3)
    with pytest.raises(ValueError, match="short_text needs model and data"):
        load_suite("short_text", seed=0)
    with pytest.raises(ValueError, match=r"`max_length=25` is more than the 24 positions of .*model: pass 24"):
        load(max_length=25)
    with pytest.raises(ValueError, match=r"data has no tone, it has a"):
        load(data={"a": str(folders / "rows" / "tone")}, tasks=["tone"])
    with pytest.raises(ValueError, match=r"data is 7, must be a folder"):
        load(data=7)
    with pytest.raises(ValueError, match="short_text task 'x' is unknown"):
        load().loss_fn("x")
    with pytest.raises(ValueError, match="split 'train' is unknown"):
        load().score(load().base, "tone", "train")
    check_member("task", "tone", load().tasks)


def test_models_that_cannot_be_trained_that_way_say_so(load, folders, tmp_path):
    with pytest.raises(ValueError, match="train_layers is 4, BertModel has 3 layers"):
        load(train_layers=4)
    with pytest.raises(ValueError, match="cannot be loaded as an encoder with a tokenizer"):
        load(model=str(folders / "rows"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of DeBERTa in transformers
@pytest.mark.parametrize(
    "kind",
    ["mpnet", "modernbert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("deberta-v2", "eurobert"))],
)
def test_top_layers_that_need_more_than_states_run_with_the_whole_model(kind, load, tmp_path):
    options = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]} if kind == "deberta-v2" else {}
    write_model(tmp_path / "model", kind, **options)
    suite, whole = (load(model=str(tmp_path / "model"), train_layers=layers) for layers in (2, None))
    assert len(suite.notes) == 1 > len(whole.notes)
    assert "cannot be cached" in suite.notes[0]
    assert 0 < len(suite.base) < len(whole.base)
    assert {name.partition("layer")[2].split(".")[1] for name in suite.base} == {"1", "2"}
    params = moved(suite.base)
    batch = suite.batch("tone", random.key(7), 2)
    loss, logits = suite.loss_fn("tone")(params, batch)
    expected = whole.loss_fn("tone")({**whole.base, **params}, whole.batch("tone", random.key(7), 2))
    assert torch.equal(logits, expected[1])
    grads = grad.value_and_grad(suite.loss_fn("tone"), engine="autograd")(params, batch)[1]
    assert all(bool(grads[name].any()) for name in suite.base if name.endswith("weight"))
    assert not torch.equal(loss, suite.loss_fn("tone")(suite.base, batch)[0])


@pytest.mark.parametrize("kind", ["distilbert", "squeezebert"])
def test_models_with_other_names_for_their_width_and_a_pooler_that_is_always_called(kind, load, tmp_path):
    sizes = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24}
    write_model(tmp_path / "model", kind, **sizes if kind == "distilbert" else {"embedding_size": 16})
    suite, whole = (load(model=str(tmp_path / "model"), train_layers=layers) for layers in (2, None))
    params = moved(suite.base)
    got = suite.loss_fn("tone")(params, suite.batch("tone", random.key(7), 2))
    expected = whole.loss_fn("tone")({**whole.base, **params}, whole.batch("tone", random.key(7), 2))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    said = "\n".join(suite.notes)
    assert ("SqueezeBertModule is not called as a module" in said) if kind == "squeezebert" else not said
    assert suite.score(params, "tone", "dev") == whole.score({**whole.base, **params}, "tone", "dev")


def test_a_model_that_keeps_the_parts_of_its_layers_in_lists_of_their_own_has_no_top_layers(load, tmp_path):
    write_model(tmp_path / "model", "xlm", emb_dim=16, n_layers=3, n_heads=2)
    with pytest.raises(ValueError, match="train_layers is 1, XLMModel has no list of layers"):
        load(model=str(tmp_path / "model"), train_layers=1)


def test_the_preset_is_short_text_with_five_experts():
    preset = PRESETS["minilm"]
    assert preset.suite == "short_text"
    assert preset.methods["mergopt"].k_max == len(short_text.TASKS) == len(task_names("short_text"))
    assert set(preset.methods) == {"ft", "smat", "asam", "mergopt", "orthoreg"}
    assert set(preset.lr.values()) <= set(preset.lr_grid)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared with data/text")
def test_the_five_tasks_have_their_rows_and_classes():
    assert task_names("short_text", data=str(SHARED)) == short_text.TASKS
    for task, classes in zip(short_text.TASKS, (2, 4, 6, 77, 150), strict=True):
        found = labelled.load_task(str(SHARED / task))
        assert {split: len(own.texts) for split, own in found.splits.items()} == {
            "train": 2000,
            "dev": 200,
            "test": 500,
        }
        assert len(found.classes) == classes
        sets = [set(own.texts) for own in found.splits.values()]
        assert len(set.union(*sets)) == 2700
        places = heads.head_rows(found.splits["train"].labels, classes, random.key(0), None)
        assert len(places) == classes * (3 if classes > 20 else 16)


def test_columns_of_other_names_are_named(tmp_path):
    renamed = [{"review": row["text"], "stars": row["label"]} for row in rows("tone", "train")]
    write(tmp_path / "tone", {"train.json": renamed, "validation.json": renamed[:4], "eval.json": renamed[4:9]})
    names = {"text": "review", "label": "stars"}
    found = labelled.load_task(str(tmp_path / "tone"), columns=names)
    assert [len(found.splits[split].texts) for split in ("train", "dev", "test")] == [30, 4, 5]
    with pytest.raises(ValueError, match=r"no column text or sentence.*--suite-options columns text=NAME,label=NAME"):
        labelled.load_task(str(tmp_path / "tone"))
    with pytest.raises(ValueError, match=r"columns renames \['prompt'\]"):
        labelled.load_task(str(tmp_path / "tone"), columns={"prompt": "review"})


def test_rows_and_images_of_other_presets_are_recognised(tmp_path):
    write(tmp_path / "a", {"train.json": [{"prompt": "x", "answer": "y"}]})
    with pytest.raises(ValueError, match="these look like prompt/answer rows, for which there is --preset lm") as error:
        labelled.load_task(str(tmp_path / "a"))
    assert "no column text or sentence, and no column label or " in str(error.value)
    assert "rows count from 0" not in str(error.value)
    (tmp_path / "b" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="these look like images, for which there is --preset images"):
        labelled.load_task(str(tmp_path / "b"))


@pytest.mark.parametrize(("layers", "frozen"), [(None, []), (2, ["embeddings.word_embeddings.weight"])])
def test_a_whole_model_may_differ_from_base_in_what_no_score_depends_on(load, layers, frozen):
    suite = load(train_layers=layers)
    base = whole_base(suite)
    part = suite_part(suite, base)
    assert part.view.leaves.keys() - set(part.read) == {"pooler.dense.weight", "pooler.dense.bias"}
    for name in ("pooler.dense.weight", "encoder.layer.2.output.dense.weight"):
        part.check("expert", {**base, name: base[name] + 1})
    for name in frozen:
        with pytest.raises(ValueError, match=f"expert differs from its base in '{name}', which suite 'short_text'"):
            part.check("expert", {**base, name: base[name] + 1})


@pytest.mark.slow
def test_classifiers_with_heads_of_their_own_are_searched_and_scored_as_their_encoders(folders, tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    def classifier(name, classes):
        model = AutoModelForSequenceClassification.from_pretrained(folders / "model", num_labels=classes)
        model.save_pretrained(tmp_path / name)
        return model

    classifier("base", 2)
    AutoTokenizer.from_pretrained(folders / "model").save_pretrained(tmp_path / "base")
    for task, classes in CLASSES.items():
        own = classifier(task, classes)
        for leaf in own.base_model.parameters():
            leaf.data += 0.1 * torch.ones(leaf.shape)
        own.save_pretrained(tmp_path / task)
        own.base_model.save_pretrained(tmp_path / f"{task}-encoder")
    implied = {"name": "short_text", "data": str(folders / "rows"), "max_length": 24}

    def searched(base, kind=""):
        experts = [Path(f"{task}={tmp_path / task}{kind}") for task in CLASSES]
        out, told = tmp_path / f"{base.name}{kind}-merged", list[str]()
        given = {"search": True, "seed": 0, "implied": implied, "coefs": [0.5]}
        merge_run(Request([TaskArithmetic()], base, experts, out=out, **given), told.append)
        return *checkpoint.load_leaves(out / "ta"), "; ".join(told), [out / "ta", *experts]

    wanted, plain, told, _ = searched(folders / "model", "-encoder")
    assert "is left out" not in told
    found, manifest, told, _ = searched(folders / "model")
    assert found.keys() == wanted.keys()
    assert all(found[path].equal(leaf) for path, leaf in wanted.items())
    assert "the head of expert 'tone' (classifier.bias, classifier.weight) is left out" in told
    assert manifest["dev"] == plain["dev"]
    found, manifest, _, scored = searched(tmp_path / "base")
    assert all(found[f"bert.{path}"].equal(leaf) for path, leaf in wanted.items())
    whole = load_file(
        tmp_path / "base/model.safetensors"
    )  # where a head has another shape, one of base's is not merged
    assert found["classifier.weight"].equal(whole["classifier.weight"])
    assert "heads: keep" in (scored[0] / "recipe.yml").read_text()
    assert manifest["dev"] == plain["dev"]
    assert [row.task for row in evaluate(scored)] == ["tone", "topic", "tone", "topic"]
    inputs = ["--base", folders / "model", "--experts", *scored[1:], "--search", "--grid", "0.5", "--preset", "text"]
    rest = ["--data", folders / "rows", "--suite-options", "max_length", "24", "--plot", tmp_path / "blocks.png"]
    monkeypatch.setattr(sys, "argv", ["merge.py", "ta", *map(str, [*inputs, *rest, "--out", tmp_path / "by-command"])])
    entry.merge()
    assert checkpoint.load_leaves(tmp_path / "by-command/ta")[1]["dev"] == plain["dev"]
    lacking = load_file(tmp_path / "tone/model.safetensors")
    del lacking["bert.embeddings.LayerNorm.bias"]
    save_file(lacking, tmp_path / "tone/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tone lacks 'embeddings.LayerNorm.bias' of its base, or has it in another"):
        searched(folders / "model", "")


def test_an_encoder_without_token_embeddings_is_refused_by_name(tmp_path):
    sizes = {"num_hash_buckets": 8, "downsampling_rate": 2, "local_transformer_stride": 4}
    write_model(tmp_path / "model", "canine", **sizes)
    with pytest.raises(ValueError, match="CanineModel has no table of token embeddings"):
        encoder.load(tmp_path / "model")


def test_an_encoder_decoder_is_refused_by_name(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    write_model(tmp_path / "model", "t5", **sizes)
    with pytest.raises(ValueError, match=r"model' is an encoder-decoder \(T5Model\), not a text encoder: take"):
        encoder.load(tmp_path / "model")


@pytest.mark.parametrize("layers", [None, 2])
def test_statistics_of_an_encoder_of_another_tool_are_those_of_its_suite_and_none_of_its_pooler(
    layers, folders, tmp_path
):
    expert = shutil.copytree(folders / "model", tmp_path / "expert")
    trained = {
        name: leaf + 0.01 if "layer.2" in name or "pooler" in name else leaf
        for name, leaf in load_file(expert / "model.safetensors").items()
    }
    save_file(trained, expert / "model.safetensors", metadata={"format": "pt"})
    options = {"name": "short_text", "model": str(folders / "model"), "data": str(folders / "rows"), "device": "cpu"}
    options |= {"max_length": 16, "batch_size": 4} | ({} if layers is None else {"train_layers": layers})
    given = [Path(f"tone={expert}")]
    asked = Statistics(tuple(given), ("fisher", "gram"), rows=8, base=folders / "model", suite_options=options)
    list(make_statistics(asked))
    suite = load_suite(**options, seed=0)
    own = {path: trained[path] for path in suite.base}
    key = random.fold_in(random.fold_in(random.key(0), "statistics"), "tone")
    batches = batches_of(suite, "tone", "train", 8, key)
    grams = input_grams(suite.loss_fn("tone"), own, without_padding(suite, "tone", batches))
    assert checkpoint.same(load_file(expert / "gram.safetensors"), grams)
    found = load_file(expert / "fisher.safetensors")
    assert found.keys() == trained.keys()
    unread = found.keys() - own.keys()
    assert {"pooler.dense.weight", "pooler.dense.bias"} <= unread
    assert not any(found[name].any() for name in unread)
    assert all(found[name].any() for name in own if name.endswith("output.dense.weight"))
    inputs = load_inputs(folders / "model", given)
    assert read_statistics(Fisher(coef=1.0), inputs)["tone"].keys() == trained.keys()
    assert set(read_statistics(RegMean(coef=1.0), inputs)["tone"]) < trained.keys()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("adamerging", {"steps": 2, "lr": 0.1, "start": 0.25, "batch": 4}),
        ("adamerging", {"steps": 2, "lr": 0.1, "start": 0.25, "batch": 4, "layer_wise": False}),
        ("reg_mean_plus", {"rows": 8}),
    ],
    ids=["by_leaf", "by_task", "regression"],
)
def test_mergers_by_data_merge_what_no_score_depends_on_too(kind, options, load, folders, tmp_path):
    base, experts = load_file(folders / "model" / "model.safetensors"), {}
    for task, size in (("tone", 0.1), ("topic", -0.2)):
        expert = shutil.copytree(folders / "model", tmp_path / task)
        changes = {p: torch.randn(leaf.shape) * ("layer.2" in p or "pooler" in p) for p, leaf in base.items()}
        trained = {p: leaf + size * changes[p] for p, leaf in base.items()}
        save_file(trained, expert / "model.safetensors", metadata={"format": "pt"})
        experts[task] = trained
    own = {"train_layers": 2, "max_length": 16, "batch_size": 4, "device": "cpu"}
    given = {"base": folders / "model", "experts": (tmp_path / "tone", tmp_path / "topic"), "out": tmp_path / "out"}
    given |= {"preset": "text", "data": str(folders / "rows"), "suite_options": own, **options}
    make, asked = (adapt, AdaMerging) if kind == "adamerging" else (regress, RegMeanPlus)
    *_, note = make(asked(**given))
    found, manifest = checkpoint.load_leaves(tmp_path / "out" / kind)
    suite = load(seed=0)
    part = {task: {path: leaf[path] for path in suite.base} for task, leaf in experts.items()}
    losses = {task: suite.loss_fn(task) for task in experts}
    if kind == "adamerging":
        coefs = {task: found.get("*", 0.25) for task, found in manifest["coefs"].items()}
        assert options.get("layer_wise", True) or all(abs(coef - 0.25) > 0.05 for coef in coefs.values())
        how = "the sum of their changes, each times " + (
            "0.25 (start)" if options.get("layer_wise", True) else "the coefficient of each expert"
        )
        key = random.fold_in(random.key(0), "adamerging")
        rows = {
            task: [b for whole, _ in suite.dev_batches(task) for b, _ in suite.split(whole, -(-length(whole) // 4))]
            for task in experts
        }
        chosen = {name: value for name, value in options.items() if name != "batch"}
        wanted = adamerging(losses, suite.base, part, rows, key, **chosen).params
    else:
        coefs, how = dict.fromkeys(experts, 0.5), "the mean of their changes"
        key = random.fold_in(random.key(0), "statistics")
        rows = {task: batches_of(suite, task, "train", 8, random.fold_in(key, task)) for task in experts}
        rows = {task: without_padding(suite, task, own) for task, own in rows.items()}
        wanted = reg_mean_plus(losses, suite.base, part, rows)
    pooler = [path for path in base if "pooler" in path]
    for path in pooler:
        change = sum(coef * (experts[task][path] - base[path]) for task, coef in coefs.items())
        torch.testing.assert_close(found[path], base[path] + change)
        assert change.abs().max() > 0.01
    for path, leaf in wanted.items():
        if "key.bias" not in path:  # its gradient is rounding, whose sign Adam follows
            torch.testing.assert_close(found[path], leaf)
    frozen = base.keys() - suite.base.keys() - {*pooler}
    assert all(torch.equal(found[path], base[path]) for path in frozen)
    assert note == (
        f"note: suite 'short_text' does not train {len(frozen) + 2} parameters of base: those that experts changed "
        f"('pooler.dense.bias', 'pooler.dense.weight') take {how}, the others stay base's"
    )
    merged = {path: found[path] for path in suite.base}
    assert manifest["dev"] == {task: suite.score(merged, task, "dev") for task in experts}


def test_a_leaf_that_a_whole_model_ties_to_a_trained_one_stays_its_copy(folders, load, tmp_path):
    from transformers import AutoTokenizer, BertForMaskedLM

    model = BertForMaskedLM.from_pretrained(folders / "model")
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folders / "model").save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    name, tied = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    stored[tied] = stored[name].clone()
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    suite = load(model=str(tmp_path / "model"), train_layers=None)
    base = whole_base(suite)
    part = suite_part(suite, base)
    own, others = moved(suite.base), {path: leaf + 1 for path, leaf in base.items()}
    assert tied in base
    found = part.whole(own, others)
    assert torch.equal(found[tied], own["embeddings.word_embeddings.weight"])
    assert part.changed_beside([part.whole(own, base)]) == []
    assert checkpoint.same(part.of(found), own)
    rest = found.keys() - {tied} - {f"bert.{path}" for path in own}
    assert rest
    assert all(torch.equal(found[path], others[path]) for path in rest)
    untied = part.whole(own, {**others, tied: others[tied] + 1})
    assert torch.equal(untied[tied], others[tied] + 1)


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_a_model_that_is_pooled_otherwise_elsewhere_is_a_note(mode, load, folders, tmp_path):
    shutil.copytree(folders / "model", tmp_path / "model")
    modes = {f"pooling_mode_{name}": name == mode for name in ("mean_tokens", "cls_token")}
    write(tmp_path / "model" / "1_Pooling", {"config.json": {"word_embedding_dimension": 16, **modes}})
    notes = load(model=str(tmp_path / "model")).notes
    assert [f"by {mode}, while a feature here is the mean" in note for note in notes] == [True] * (mode == "cls_token")


@pytest.mark.parametrize(
    ("given", "told"), [("mean", ""), (["mean"], ""), ("cls", "cls"), (["cls", "max"], "cls, max")]
)
def test_how_newer_sentence_transformers_names_a_pooling(given, told, tmp_path):
    write(tmp_path / "1_Pooling", {"config.json": {"embedding_dimension": 16, "pooling_mode": given}})
    note = encoder.pooling_note(tmp_path)
    assert f"pools {tmp_path} by {told}, while" in note if told else note == ""


def test_only_the_chosen_tasks_are_read_and_the_recipe_stays(load, folders, tmp_path):
    data = {"tone": str(folders / "rows" / "tone"), "topic": str(tmp_path / "broken")}
    with pytest.raises(ValueError, match="broken"):
        load(data=data)
    part = load(data=data, only=("tone",))
    assert part.tasks == part.options.tasks == ("tone", "topic")
    assert "only" not in part.recipe
    assert part.content("tone", "dev") == load().content("tone", "dev")
    renamed = load(data=data, only=("tone",), columns="text=text,label=label")
    assert renamed.recipe["columns"] == {"text": "text", "label": "label"}
    assert "columns" not in part.recipe


def test_experts_of_some_tasks_are_merged_and_scored_without_the_rows_of_others(folders, tmp_path, monkeypatch):
    def called(command, *words):
        monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, words)])
        command()

    rows, run = shutil.copytree(folders / "rows", tmp_path / "rows"), tmp_path / "run"
    write(rows / "broken", {"train.json": []})
    own = ["--model", folders / "model", "--data", rows, "--tasks", "tone", "topic", "--max-length", 16]
    own += ["--batch-size", 4, "--train-layers", 1, "--device", "cpu", "--steps", 2, "--seed", 3]
    called(entry.train, "ft", "--preset", "text", "--out", run, *own)
    recipe = checkpoint.load_manifest(run / "tone")["suite"]
    assert recipe["tasks"] == ["broken", "tone", "topic"]
    assert (recipe["batch_size"], recipe["max_length"], recipe["train_layers"]) == (4, 16, 1)
    called(entry.merge, "ta", "--run", run, "--search", "--grid", "0.5", "--out", run / "merged")
    called(entry.evaluate, run, run / "merged/ta", "--out", tmp_path / "scores", "--device", "cpu")
    found = [json.loads(line) for line in (tmp_path / "scores/results.jsonl").read_text().splitlines()]
    assert [row["task"] for row in found] == ["tone", "topic", "tone", "topic"]
    with pytest.raises(SystemExit, match="broken"):
        called(entry.evaluate, run, "--other-tasks")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch: forward derivatives import it
@pytest.mark.parametrize(
    "options",
    [{"train_layers": 1}, pytest.param({"train_layers": None, "train": "attention"}, marks=pytest.mark.slow)],
)
def test_linearised_outputs_are_affine_in_what_is_trained(load, options):
    suite = load(linearised=True, **options)
    plain, batch, trained = load(**options), suite.batch("tone", random.key(2), 0), moved(suite.base)
    assert suite.recipe == {**plain.recipe, "linearised": True}
    assert all(".attention." in name for name in suite.base) == ("train" in options)
    at = {}
    for name, own in {"base": suite.base, "expert": trained}.items():
        (loss, at[name]), grads = grad.value_and_grad(suite.loss_fn("tone"), engine="autograd")(own, batch)
        assert loss.isfinite()
        assert all(leaf.isfinite().all() for leaf in grads.values())
    torch.testing.assert_close(at["base"], plain.loss_fn("tone")(plain.base, batch)[1])
    # of logits without a norm in between
    free, half = load(linearised=True, normalize=False, **options), 0.5
    middle = {name: leaf + half * (trained[name] - leaf) for name, leaf in free.base.items()}
    start, end, between = (free.loss_fn("tone")(own, batch)[1] for own in (free.base, trained, middle))
    torch.testing.assert_close(between, start + half * (end - start), rtol=1e-4, atol=1e-5)


def test_an_encoder_of_texts_of_one_length_is_told_with_its_reason(load, folders, tmp_path):
    options = {"num_landmarks": 4, "segment_means_seq_len": 16}
    write_model(tmp_path / "model", kind="nystromformer", **options)
    with pytest.raises(ValueError, match=r"a NystromformerModel fails on texts of up to \d+ tokens .*one length alone"):
        load(model=str(tmp_path / "model"), train_layers=None)


def test_training_rows_are_named_by_file_and_told_apart_by_content(load, suite, folders, tmp_path):
    write(tmp_path / "tone", {f"{split}.json": rows("tone", split) for split in SIZES})
    file = tmp_path / "tone" / "train.json"
    own = load(data=str(tmp_path)).train_rows("tone")
    assert own == {**suite.train_rows("tone"), "from": str(file)}
    found = json.loads(file.read_text())
    file.write_text(json.dumps([{**found[0], "text": "otherwise"}, *found[1:]]))
    edited, few = load(data=str(tmp_path)).train_rows("tone"), load(data=str(tmp_path), rows=2).train_rows("tone")
    assert edited["count"] == own["count"] == len(found)
    assert edited["hash"] != own["hash"]
    file.write_text(json.dumps([*json.loads(file.read_text())[:2], *(row | {"text": "an edit"} for row in found[2:])]))
    other = load(data=str(tmp_path), rows=2).train_rows("tone")  # no step reads them, but the head does
    assert {name for name in few if few[name] != other[name]} == {"head"}


def test_a_run_does_not_resume_on_other_rows_of_its_head(load, tmp_path):
    file, found = tmp_path / "tone" / "train.json", rows("tone", "train")
    write(tmp_path / "tone", {f"{split}.json": rows("tone", split) for split in SIZES})

    def train(**options):
        own = load(data=str(tmp_path), rows=2, **options)
        run = RunOptions(tmp_path / "run", own.tasks, 3, resume=(tmp_path / "run").exists())
        train_run(own, Finetune(), Training(steps=1, lr=1e-3), run)

    train()
    with pytest.raises(ValueError, match=r"tone in .*: suite\.per_class was None, is 2; give the settings [^;]*$"):
        train(per_class=2)
    file.write_text(json.dumps([*found[:2], *(row | {"text": "an edit"} for row in found[2:])]))
    with pytest.raises(
        ValueError, match=r"train.json changed since tone in .*: rows that no step trains on, but of wh"
    ):
        train()


def test_texts_with_two_labels_are_a_note(load, tmp_path):
    texts = ["a good film", "a bad film", "a good film", "some plot"] * 2
    for split, size in (("train", 8), ("dev", 1), ("test", 1)):
        rows = [{"text": texts[i], "label": int(i % 4 > 0)} for i in range(size)]
        (tmp_path / "tone").mkdir(exist_ok=True)
        (tmp_path / "tone" / f"{split}.json").write_text(json.dumps(rows))
    notes = load(data=str(tmp_path)).notes
    assert notes[-1] == "tone trains on 1 row with two labels or more"


def test_splits_of_one_class_and_texts_that_are_cut_off_are_notes(load, tmp_path):
    texts = [f"w{i % 2} w3 w4 w5 w6 {i}" for i in range(8)]
    for split in SIZES:
        (tmp_path / "tone").mkdir(exist_ok=True)
        rows = [{"text": f"{text} {split}", "label": int(i > 3)} for i, text in enumerate(texts)]  # sorted by label
        (tmp_path / "tone" / f"{split}.json").write_text(json.dumps(rows))
    assert load(data=str(tmp_path)).notes == ()
    *classes, cut = load(data=str(tmp_path), rows=3, max_length=6).notes
    assert classes == [
        f"all 3 {split} rows of tone are of class '0': shuffle them, or give more" for split in ("train", "dev", "test")
    ]
    assert cut == (
        "3 of the 3 train texts, 3 of the 3 dev texts, 3 of the 3 test texts of tone have more than the 6 tokens that "
        "are read, the rest is cut off: pass `max_length=24` to read more"
    )
    shorter = [{"text": f"{text} test"[:2], "label": int(i > 3)} for i, text in enumerate(texts)]
    for split in ("train", "dev"):
        (tmp_path / "tone" / f"{split}.json").write_text(json.dumps(shorter))
    assert load(data=str(tmp_path), max_length=6).notes[-1].startswith("8 of the 8 test texts of tone have more than")


def test_positions_that_no_token_has_do_not_count(load, tmp_path):
    write_model(tmp_path / "model", "roberta")
    with pytest.raises(ValueError, match=r"`max_length=24` is more than the 23 positions of .*model: pass 23"):
        load(model=str(tmp_path / "model"), max_length=24)
    encoder = load(model=str(tmp_path / "model"), max_length=23)._encoder
    assert encoder.features(encoder.ids(["w1 " * 40], 23)).isfinite().all()


def test_texts_without_a_token_are_told(load, folders, tmp_path):
    shutil.copytree(folders / "model", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))  # adds no special tokens
    ids = load(model=str(tmp_path / "model"))._encoder.ids
    assert [len(own) for own in ids(["w0 w1"], 9)] == [2]
    with pytest.raises(ValueError, match="2 texts give no token, ' ' the first: remove them"):
        ids(["w0", " ", "w1", "\n"], 9)


def test_a_joint_step_has_the_loss_of_its_task(suite, joint_of):
    together = joint_of(suite)
    rows = together.train_rows("joint")
    assert rows["count"] == sum(suite.train_rows(task)["count"] for task in suite.tasks)
    assert rows["hash"] not in {suite.train_rows(task)["hash"] for task in suite.tasks}
