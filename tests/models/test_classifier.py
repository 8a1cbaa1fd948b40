"""Classifiers as losses and classes of flat parameters, on tiny random models."""

import pytest
import torch
from torch.nn import functional as F

from smat_fn import grad, random
from smat_fn.mat import smat
from smat_fn.merge import task_arithmetic
from smat_fn.models.classifier import classifier
from smat_fn.optim import adamw


def make_module(kind="bert", seed=0, **changes):
    import transformers as hf

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    if kind == "bert":
        config = hf.BertConfig(vocab_size=20, max_position_embeddings=16, num_labels=3, **sizes | changes)
        return hf.BertForSequenceClassification(config)
    config = hf.ViTConfig(image_size=4, patch_size=2, num_channels=1, num_labels=3, **sizes | changes)
    return hf.ViTForImageClassification(config)


def make_batch(kind="bert"):
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 1, 2, 1, 0])
    if kind == "vit":
        return {"pixel_values": torch.rand(5, 1, 4, 4, generator=generator), "labels": labels}
    ids = torch.randint(0, 20, (5, 7), generator=generator)
    mask = (torch.arange(7) < torch.tensor([[7], [5], [2], [7], [1]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_loss_classes_and_masked_set_are_those_of_the_model(kind):
    module = make_module(kind)
    model, batch = classifier(module), make_batch(kind)
    assert list(model.params) == [name for name, _ in module.named_parameters()]
    assert not any(layer.training for layer in module.modules())
    logits = module(**{name: value for name, value in batch.items() if name != "labels"}).logits
    loss, aux = model.loss_fn(model.params, batch)
    assert torch.equal(aux, logits)
    assert loss == F.cross_entropy(logits, batch["labels"]) == module(**batch).loss
    assert torch.equal(model.predict_fn(model.params, batch), logits.argmax(1))
    masked = {name for name, leaf in model.params.items() if model.where(name, leaf)}
    assert masked == {n for n, p in module.named_parameters() if p.ndim == 2 and ".layer" in n}
    assert len(masked) == 2 * 6
    # what stands under the padding does not matter
    if kind == "bert":
        other = batch | {"input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
        assert model.loss_fn(model.params, other)[0] == loss


def test_classes_are_of_the_given_weights_and_the_module_keeps_its_own():
    one, two, batch = classifier(make_module(seed=0)), classifier(make_module(seed=1)), make_batch()
    kept = {name: p.clone() for name, p in one.params.items()}
    moved = {name: 20 * p for name, p in two.params.items()}
    assert torch.equal(one.predict_fn(moved, batch), two.predict_fn(moved, batch))
    assert all(torch.equal(one.params[name], p) for name, p in kept.items())
    with pytest.raises(ValueError, match=r"params lack 'classifier\.bias'"):
        one.predict_fn({name: p for name, p in moved.items() if name != "classifier.bias"}, batch)


def test_a_frozen_head_is_no_leaf():
    module = make_module()
    module.classifier.requires_grad_(False)
    model = classifier(module)
    assert not any("classifier" in name for name in model.params)
    _, grads = grad.value_and_grad(model.loss_fn, engine="autograd")(model.params, make_batch())
    assert set(grads) == set(model.params)


def test_smat_trains_experts_that_merge():
    model, experts = classifier(make_module()), {}
    batch = make_batch()
    settings = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3, "period": 4}
    for seed, rows in enumerate((slice(0, 3), slice(2, 5))):
        own = {name: value[rows] for name, value in batch.items()}
        optimizer = adamw(1e-2, weight_decay=0.0)
        method = smat.build(model.loss_fn, optimizer, model.params, where=model.where, **settings)
        state = method.init(model.params)
        for _ in range(30):
            state, _ = method.update(random.key(seed), state, own)
        assert model.loss_fn(state.params, own)[0] < 0.8 * model.loss_fn(model.params, own)[0]
        experts[str(seed)] = state.params
    merged = task_arithmetic(model.params, experts, coef=0.5)
    assert model.loss_fn(merged, batch)[0] < model.loss_fn(model.params, batch)[0]


@pytest.mark.parametrize("changes", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_other_problems_than_one_of_several_classes_are_refused(changes):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    module = BertForSequenceClassification(BertConfig(vocab_size=5, **{"num_labels": 2, **sizes, **changes}))
    with pytest.raises(ValueError, match="for one of at least two classes"):
        classifier(module)
