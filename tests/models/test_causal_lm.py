"""Language models as losses of flat parameters, on tiny random checkpoints."""

import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F

from smat_fn import grad, testing, where
from smat_fn.data import text
from smat_fn.models import causal_lm, head, pretrained

SIZES = {
    **{"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
WORDS = ["a", "b", "c", "d", "\n"]


def save(folder, kind="llama", *, words=WORDS, **changes):
    """A tiny random model and a word tokenizer, as ``save_pretrained`` writes them."""
    import transformers as hf
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    if kind == "llama":
        module = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | changes))
    elif kind == "gpt2":
        small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 1}
        module = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, **small))
    elif kind == "opt":
        small = {"ffn_dim": 24, "word_embed_proj_dim": 16, "layerdrop": 0.5}
        module = hf.OPTForCausalLM(hf.OPTConfig(**SIZES | small))
    elif kind == "rwkv":
        small = {"attention_hidden_size": 16, "num_hidden_layers": 3, "rescale_every": 1}
        module = hf.RwkvForCausalLM(hf.RwkvConfig(**SIZES | small))
    else:
        assert kind == "mixtral"
        module = hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1))
    module.save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", "<unk>", *words])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^ ]"), behavior="isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind="llama", **changes):
        key = kind, *sorted(changes.items())
        if key not in made:
            made[key] = save(tmp_path_factory.mktemp(kind), kind, **changes)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def lm(folders):
    return causal_lm.load(folders())


def make_batch(tokenizer, rows=(("abcd", "ab"), ("d", "c"), ("abc", "dcba"))):
    return text.collate(text.encode(rows, tokenizer, vocabulary=20), tokenizer.pad_token_id)


def test_a_bundle_holds_theta0_by_name_and_the_masked_set(lm):
    assert list(lm.params) == [name for name, _ in lm.module.named_parameters()]
    assert not any(p.requires_grad for p in lm.params.values())
    assert {p.dtype for p in lm.params.values()} == {torch.float32}
    masked = where.block_linear(lm.module)
    assert {n for n, p in lm.params.items() if lm.where(n, p)} == {n for n, p in lm.params.items() if masked(n, p)}
    assert sum(lm.where(n, p) for n, p in lm.params.items()) == 14
    assert lm.module.config._attn_implementation == "sdpa"
    assert not any(layer.training for layer in lm.module.modules())
    # one copy of the weights
    assert all(p.data_ptr() == lm.params[n].data_ptr() for n, p in lm.module.named_parameters())


def test_tied_weights_are_one_leaf_and_both_places_get_it(folders):
    tied = causal_lm.load(folders(tie_word_embeddings=True))
    name = "model.embed_tokens.weight"
    assert name in tied.params
    assert "lm_head.weight" not in tied.params
    assert not tied.where(name, tied.params[name])
    # with a zero embedding all logits are zero if the head follows it
    loss, _ = tied.loss_fn(tied.params | {name: torch.zeros_like(tied.params[name])}, make_batch(tied.tokenizer))
    torch.testing.assert_close(loss.item(), math.log(20), rtol=1e-6, atol=0)


def test_the_loss_is_the_token_mean_over_shifted_labels(lm):
    batch = make_batch(lm.tokenizer)
    loss, count = lm.loss_fn(lm.params, batch)
    total, tokens = 0.0, 0
    for ids, labels, length in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].sum(1), strict=True):
        # every row alone, unpadded
        logits = lm.module(input_ids=ids[None, :length]).logits[0].double()
        for t in range(1, length):
            total -= logits[t - 1].log_softmax(0)[labels[t]].item()
            tokens += 1
    assert count == tokens == int(batch["attention_mask"].sum()) - 3
    torch.testing.assert_close(loss.item(), total / tokens, rtol=1e-5, atol=0)
    assert loss == lm.module(**batch).loss


def test_only_labelled_tokens_count(lm):
    rows = [("ab", "c"), ("d", "ab")]
    examples = text.encode(rows, lm.tokenizer, vocabulary=20, mask_prompt=True)
    batch = text.collate(examples, lm.tokenizer.pad_token_id)
    loss, count = lm.loss_fn(lm.params, batch)
    # answers and EOS
    assert count == (1 + 1) + (2 + 1)
    torch.testing.assert_close(loss, lm.module(**batch).loss.detach(), rtol=1e-6, atol=0)
    # what stands under the padding does not matter
    other = batch | {"input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
    assert lm.loss_fn(lm.params, other)[0] == loss


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "mixtral"])
@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_the_head_runs_where_a_token_is_predicted(folders, kind, engine, monkeypatch):
    lm, seen = causal_lm.load(folders(kind)), []
    examples = text.encode([("abcd", "c"), ("d", "ab")], lm.tokenizer, vocabulary=20, mask_prompt=True)
    batch = text.collate(examples, lm.tokenizer.pad_token_id)
    lm.module.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape)))
    gradient = grad.value_and_grad(lm.loss_fn, engine=engine)
    (loss, count), grads = gradient(lm.params, batch)
    monkeypatch.setattr(head, "FEW", -1)
    (wanted, every), expected = gradient(lm.params, batch)
    size = tuple(batch["input_ids"].shape)
    # torch.func transforms values that are not there yet: all logits
    assert seen == [(1, 5, 20) if engine == "autograd" else (*size, 20), (*size, 20)]
    assert count == every == 5
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-7)


def test_a_head_of_other_states_or_of_a_compiled_module_gives_all_logits(lm):
    examples = text.encode([("abcd", "c"), ("d", "ab")], lm.tokenizer, vocabulary=20, mask_prompt=True)
    batch, seen = text.collate(examples, lm.tokenizer.pad_token_id), []
    own = lm.module.get_output_embeddings()
    hooks = [own.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape)))]
    wanted = lm.loss_fn(lm.params, batch)[0]
    lm.module._compiled_call_impl = lm.module._call_impl
    try:
        whole = lm.loss_fn(lm.params, batch)[0]
    finally:
        lm.module._compiled_call_impl = None
    hooks.append(own.register_forward_pre_hook(lambda _, args: (args[0][:, :, None],)))  # before that of the loss
    hooks.append(own.register_forward_hook(lambda _, args, out: out[:, :, 0]))
    other = lm.loss_fn(lm.params, batch)[0]
    for hook in hooks:
        hook.remove()
    rows, length = batch["input_ids"].shape
    assert seen == [(1, 5, 20), (rows, length, 20), (rows, length, 1, 20)]
    for found in (whole, other):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert not own._forward_pre_hooks


def test_bfloat16_weights_have_a_float32_loss(folders):
    low = causal_lm.load(folders(), dtype="bfloat16")
    assert {p.dtype for p in low.params.values()} == {torch.bfloat16}
    batch = make_batch(low.tokenizer)
    (loss, _), grads = grad.value_and_grad(low.loss_fn, engine="autograd")(low.params, batch)
    assert loss.dtype == torch.float32
    assert {g.dtype for g in grads.values()} == {torch.bfloat16}
    logits = low.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    # far nearer than bfloat16, but not bit by bit: some processors add in another order
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), rtol=1e-6, atol=0)


def test_float64_stays_float64(folders):
    high = causal_lm.load(folders(), dtype=torch.float64)
    assert high.loss_fn(high.params, make_batch(high.tokenizer))[0].dtype == torch.float64


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "mixtral"])
def test_gradient_checkpointing_gives_the_same_bits_without_dropout(folders, kind):
    from transformers.modeling_layers import GradientCheckpointingLayer

    plain, saving = (causal_lm.load(folders(kind), gradient_checkpointing=on) for on in (False, True))
    batch = make_batch(plain.tokenizer)
    calls = []
    layers = [layer for layer in saving.module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        next(layer.children()).register_forward_hook(lambda *_: calls.append(1))
    # other weights than the module's own, so that a recomputation with those would show
    params = {name: p * 1.5 for name, p in plain.params.items()}
    runs = [grad.value_and_grad(lm.loss_fn, engine="autograd")(params, batch) for lm in (plain, saving)]
    assert len(calls) == 2 * len(layers) == 4
    ((loss, _), grads), ((other, _), others) = runs
    assert loss == other
    assert all(torch.equal(grads[name], others[name]) for name in grads)
    assert max(g.abs().max() for g in grads.values()) > 0


def test_rwkv_does_not_halve_weights_in_place(folders):
    lm = causal_lm.load(folders("rwkv"))
    before = {name: p.clone() for name, p in lm.module.named_parameters()}
    lm.module.eval()(input_ids=torch.tensor([[3, 4]]))
    assert all(torch.equal(p, before[name]) for name, p in lm.module.named_parameters())


def test_the_func_engine_works_after_loading(lm):
    batch = make_batch(lm.tokenizer)
    (_, count), func = grad.value_and_grad(lm.loss_fn, engine="func")(lm.params, batch)
    _, auto = grad.value_and_grad(lm.loss_fn, engine="autograd")(lm.params, batch)
    assert count == 18
    torch.testing.assert_close(func, auto)


def test_a_leaf_left_out_is_an_error(lm):
    fewer = {name: p for name, p in lm.params.items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"params lack 'lm_head\.weight'"):
        lm.loss_fn(fewer, make_batch(lm.tokenizer))


def test_what_cannot_be_reached_is_told_in_one_sentence(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("nobody/no-such-model", str(tmp_path / "nothing"), tmp_path):
        with pytest.raises(ValueError, match=r"cannot be loaded as a causal language model.*give a folder") as error:
            causal_lm.load(source)
        assert str(source) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
def test_an_adapter_is_refused_where_it_lies_and_where_transformers_puts_it_over_its_base(
    folders, tmp_path, monkeypatch
):
    peft = pytest.importorskip("peft")
    folder = save(tmp_path / "base")
    module = causal_lm.load(folder).module
    peft.get_peft_model(module, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(folder)}))
    for seen in True, False:  # a folder; a repository of the hub, which is not one
        if not seen:
            monkeypatch.setattr(pretrained, "Path", lambda source: tmp_path / "no folder")
        with pytest.raises(
            ValueError, match=r"adapter' holds an adapter: write a whole model, merge.py wa --base BASE"
        ):
            pretrained.fetch(tmp_path / "adapter", "a language model", "AutoModelForCausalLM")


def test_missing_weights_are_told(folders, tmp_path):
    from transformers import LlamaModel

    folder = save(tmp_path)
    LlamaModel.from_pretrained(folder).save_pretrained(folder)
    said = r"lacks 1 weights of LlamaForCausalLM \(first: lm_head\.weight\).*for an encoder, the preset text"
    with pytest.raises(ValueError, match=said):
        causal_lm.load(folder)


def test_unused_weights_are_told_in_a_line_and_wrong_sizes_in_a_table(tmp_path, caplog, monkeypatch):
    folder = save(tmp_path)
    logger = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    pretrained.fetch(folder, "an encoder", "AutoModel")
    [line] = caplog.messages
    assert line.startswith(f"{folder}: LlamaModel has no place for 1 of the stored weights (first: lm_head.weight)")
    assert not logger.filters
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    with pytest.raises(ValueError, match=r"cannot be loaded as an encoder"):
        pretrained.fetch(folder, "an encoder", "AutoModel")
    assert "MISMATCH" in caplog.messages[-1]


def test_a_tokenizer_larger_than_the_embedding_is_told(tmp_path):
    folder = save(tmp_path, words=[f"word{i}" for i in range(20)])
    with pytest.raises(ValueError, match=r"embedding has 20 rows.*its 24 tokens"):
        causal_lm.load(folder)


@pytest.mark.parametrize("dtype", ["int64", torch.int8, "nope", "nn"])
def test_a_bad_dtype_is_told(dtype):
    with pytest.raises(ValueError, match="is not a floating-point dtype"):
        causal_lm.load("anything", dtype=dtype)


def test_a_device_map_loads_the_same_model(folders, tmp_path):
    pytest.importorskip("accelerate")
    plain = causal_lm.load(folders())
    (tmp_path / "map.json").write_text(json.dumps({"model": "cpu", "lm_head": "cpu"}))
    for given in ("auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, str(tmp_path / "map.json")):
        mapped = causal_lm.load(folders(), device_map=given)
        testing.assert_trees_equal(mapped.params, plain.params)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "cpu", "lm_head": "meta"}, r"leaves \d+ weights on no device, \S+ the first: .* give more devices"),
        ({"model": "disk", "lm_head": "cpu"}, "disk"),
        ("everywhere", "everywhere"),
        ("nowhere.json", "nowhere.json' cannot be read as JSON"),
    ],
)
def test_a_device_map_that_cannot_train_is_refused(folders, given, named):
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match=named):
        causal_lm.load(folders(), device_map=given)
