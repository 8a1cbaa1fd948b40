"""Top layers of causal language models on states: same loss, gradients and transforms as the whole model."""

import pytest
import torch
import transformers as hf
from torch.func import vmap

from smat_fn.data import text
from smat_fn.grad import value_and_grad
from smat_fn.models import top_language as top_module
from smat_fn.models.causal_lm import next_token_loss
from smat_fn.models.head import IGNORED
from smat_fn.models.modules import train_only
from smat_fn.models.pretrained import language_model
from smat_fn.models.top_language import TopLanguage, top_language

KINDS = ["llama", "tied", "qwen2", "gpt2", "opt", "gemma2", "gemma3", "mixtral", "mamba"]
LLAMA = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def batch(*lengths, prompt=0):
    """Rows of random tokens; the first ones are not predicted."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [tuple(torch.randint(3, 61, (n,), generator=generator).tolist()) for n in lengths]
    labels = [tuple(IGNORED if i < prompt else t for i, t in enumerate(row)) for row in rows]
    return text.collate([text.Example(*row) for row in zip(rows, labels, strict=True)], 0)


def top_of(lm):
    found = top_language(lm, batch(12, 7, 3))
    assert isinstance(found, TopLanguage), found
    return found


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        *((kind, 1) for kind in KINDS),
        ("gemma3", 2),
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("llama", "opt")),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(kind, layers, model):
    lm = model(kind, layers)
    top = top_of(lm)
    for given in (batch(9, 20, 40), batch(9, 20, 40, prompt=6)):  # longer than a window of attention
        own = {**given, "states": top.states(given)}
        ((expected, count), wanted), ((found, predicted), grads) = (
            value_and_grad(loss)(lm.params, rows) for loss, rows in ((lm.loss_fn, given), (top.loss_fn, own))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
        assert count == predicted
        assert not own["states"].requires_grad


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bfloat16_is_as_close_as_its_resolution(kind, model):
    lm, given = model(kind, dtype=torch.bfloat16), batch(9, 30)
    top = top_of(lm)
    states = top.states(given)
    assert states.dtype == torch.bfloat16
    found, expected = top.loss_fn(lm.params, {**given, "states": states})[0], lm.loss_fn(lm.params, given)[0]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_states_decide_and_not_the_frozen_layers(model):
    lm, given = model("llama"), batch(9, 30)
    top = top_of(lm)
    states = top.states(given)
    names = {name for name, _ in top.loss_fn.module.named_parameters()}
    assert names < {name for name, _ in lm.module.named_parameters()}
    assert not [name for name in names if ".layers.0." in name or ".layers.1." in name]
    assert {p.data_ptr() for p in top.loss_fn.module.parameters()} < {p.data_ptr() for p in lm.module.parameters()}
    other = top.loss_fn(lm.params, {**given, "states": states.flip(0)})[0]
    assert abs(other - lm.loss_fn(lm.params, given)[0]) > 1e-4
    with pytest.raises(KeyError, match="states"):
        top.loss_fn(lm.params, given)


def test_what_fills_a_row_does_not_count(model):
    lm, given = model("llama"), batch(9, 30)
    top = top_of(lm)
    states = top.states(given)
    changed = torch.where(given["attention_mask"].bool()[..., None], states, 0.0)
    losses = [top.loss_fn(lm.params, {**given, "states": own})[0] for own in (states, changed)]
    assert torch.equal(*losses)


def test_models_of_several_weights_run_together(model):
    lm, given = model("llama"), batch(9, 30)
    lm.module.set_attn_implementation("eager")  # vmap has no rule for the fused one
    top = top_of(lm)
    own = {**given, "states": top.states(given)}
    stacked = {name: torch.stack([p, p + 0.1]) for name, p in lm.params.items()}
    found = vmap(lambda params: top.loss_fn(params, own)[0])(stacked)
    expected = [lm.loss_fn({name: p[i] for name, p in stacked.items()}, given)[0] for i in range(2)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_the_head_runs_where_a_token_is_predicted(model, monkeypatch):
    lm, given, sizes, moved = model("llama"), batch(9, 30, prompt=6), [], []
    monkeypatch.setattr(top_module, "sent", lambda own, device: moved.append(own) or own)
    top = top_of(lm)
    head = top.loss_fn.module.get_output_embeddings()
    head.register_forward_hook(lambda _, args, out: sizes.append(tuple(out.shape)))
    top.loss_fn(lm.params, {**given, "states": top.states(given)})
    assert sizes == [(3 + 24, 61)]
    # the host would wait for the number of tokens that are predicted, were it counted on a device
    assert len(moved) > 5
    assert not any(own is given["labels"] for own in moved)


def test_models_that_need_more_say_why(model):
    lm = model("llama")
    lm.module.lm_head.weight.requires_grad_(True)
    assert top_language(lm, batch(12, 7)) == "layers other than top ones are trained"
    torch.manual_seed(0)
    rwkv = hf.RwkvForCausalLM(hf.RwkvConfig(vocab_size=61, hidden_size=16, num_hidden_layers=3))
    train_only(rwkv, layers=1)
    assert "attribute 'attention'" in top_language(language_model(rwkv, None, next_token_loss), batch(12, 7))


class Looks(hf.LlamaForCausalLM):
    """Gives other logits where its lowest layer has weights."""

    def forward(self, input_ids, **options):
        out = super().forward(input_ids, **options)
        if list(self.model.layers[0].parameters()):
            out.logits = out.logits * 1.1
        return out


def test_a_model_that_gives_another_loss_runs_whole():
    torch.manual_seed(0)
    whole = Looks(hf.LlamaConfig(**LLAMA, initializer_range=1.0))
    train_only(whole, layers=1)
    assert top_language(language_model(whole, None, next_token_loss), batch(12, 7)).startswith("the loss is ")
