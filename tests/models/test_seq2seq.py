"""Encoder-decoders as losses and answers of flat parameters, on tiny random models."""

import math

import pytest
import torch
from torch import nn

from smat_fn import grad, random
from smat_fn.data import pairs
from smat_fn.evaluate.decoding import generator
from smat_fn.evaluate.engine import Decoding
from smat_fn.mat import smat
from smat_fn.models.seq2seq import seq2seq, start_problems
from smat_fn.optim import adamw

ROWS = [("abc", "ba"), ("z", "q"), ("the quick", "abcdef"), ("someprompt", "")]
SOURCES = [source for source, _ in ROWS]


def make_tokenizer():
    """Letters as tokens, EOS at the end as T5's tokenizer puts it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<s>", *"abcdefghijklmnopqrstuvwxyz", " "])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="z"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Split(Regex("."), behavior="isolated"), decoders.Fuse()
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make_module(kind="t5", seed=0, dtype=torch.float64):
    import transformers as hf

    torch.manual_seed(seed)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.5}
        module = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=30, **sizes, **ids))
    else:
        side = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
        sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in side.items()}
        config = hf.BartConfig(
            vocab_size=30,
            d_model=16,
            max_position_embeddings=24,
            forced_eos_token_id=None,
            bos_token_id=2,
            **sizes,
            **ids,
        )
        module = hf.BartForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in module.named_parameters():
            # far from a uniform distribution
            p.mul_(4 if p.ndim > 1 and "shared" not in name else 1)
    return module.to(dtype)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def batch_of(rows, tokenizer, **options):
    return pairs.collate(pairs.encode(rows, tokenizer, vocabulary=len(tokenizer), **options), tokenizer.pad_token_id)


@pytest.fixture(scope="module", params=["t5", "bart"])
def model(request, tokenizer):
    module = make_module(request.param)
    return module, seq2seq(module, tokenizer)


def answers(bundle, params, sources, settings, seed=0, **options):
    return generator(bundle.loss_fn, bundle.tokenizer, params, batch_size=3)(sources, settings, seed, **options)


def test_params_are_all_leaves_once_and_the_masked_set_is_that_of_the_blocks(model):
    module, bundle = model
    assert list(bundle.params) == [name for name, _ in module.named_parameters()]
    assert not any(layer.training for layer in module.modules())
    masked = {name for name, leaf in bundle.params.items() if bundle.where(name, leaf)}
    blocks = {n for n, p in module.named_parameters() if p.ndim == 2 and (".block." in n or ".layers." in n)}
    assert masked == {name for name in blocks if "relative_attention_bias" not in name}
    assert len(masked) == (2 * 6 + 2 * 10 if module.config.model_type == "t5" else 6 + 10)


def test_batches_are_sources_and_targets_each_with_its_end(tokenizer):
    batch = batch_of(ROWS, tokenizer)
    letters = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "abcz"}
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 11)
    assert batch["input_ids"][0].tolist() == [*(letters[x] for x in "abc"), 1, *[0] * 7]
    assert batch["attention_mask"].sum(1).tolist() == [4, 2, 10, 11]
    assert batch["labels"][0].tolist() == [letters["b"], letters["a"], 1, *[-100] * 4]
    assert batch["labels"][3].tolist() == [1, *[-100] * 6]
    short = batch_of(ROWS, tokenizer, max_length=3)
    assert short["input_ids"][0].tolist() == [letters["a"], letters["b"], 1]
    assert short["labels"].shape == (4, 3)


# how families write sources and targets, with x and y for language codes, and what decoding starts from
FORMS = {
    "T5ForConditionalGeneration": ("$A </s>", "$A </s>", "<pad>"),
    "BartForConditionalGeneration": ("<s> $A </s>", "<s> $A </s>", "</s>"),
    "LEDForConditionalGeneration": ("<s> $A </s>", "<s> $A </s>", "</s>"),
    "PegasusForConditionalGeneration": ("$A </s>", "$A </s>", "<pad>"),
    "MarianMTModel": ("$A </s>", "$A </s>", "<pad>"),
    "M2M100ForConditionalGeneration": ("x $A </s>", "y $A </s>", "</s>"),
    "MBartForConditionalGeneration": ("$A </s> x", "$A </s> y", "y"),
    "PLBartForConditionalGeneration": ("$A </s> x", "$A </s> y", "y"),
}
SEAMLESS = "x $A </s>", "</s> y $A </s>", "</s>"


def of_family(kind, form=None):
    """A tiny module of a family, and a tokenizer that writes targets in another way than sources."""
    import transformers as hf
    from tokenizers import processors

    def template(form):
        ids = {token: own.convert_tokens_to_ids(token) for token in form.split() if token != "$A"}
        return processors.TemplateProcessing(single=form, special_tokens=list(ids.items()))

    class Both(hf.PreTrainedTokenizerFast):
        def _switch_to_input_mode(self):
            self.backend_tokenizer.post_processor = template(source)

        def _switch_to_target_mode(self):
            self.backend_tokenizer.post_processor = template(target)

    source, target, start = form or FORMS[kind]
    own = Both(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="</s>", pad_token="<pad>")
    own._switch_to_input_mode()
    side = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in side.items()}
    sizes |= {"d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4} if kind.startswith("T5") else {}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": own.convert_tokens_to_ids(start)}
    made = getattr(hf, kind)
    return made(made.config_class(vocab_size=30, d_model=16, **sizes, **ids)).eval(), own


ALIKE = ("LEDForConditionalGeneration", "PegasusForConditionalGeneration", "PLBartForConditionalGeneration")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ALIKE else kind for kind in FORMS]
)
def test_targets_and_decoder_inputs_are_those_of_transformers_and_begin_as_decoding_does(kind):
    module, tokenizer = of_family(kind)
    answers = [answer for _, answer in ROWS]
    batch, seen = batch_of(ROWS, tokenizer), []
    labels = tokenizer(text_target=answers, padding=True, return_tensors="pt")["input_ids"]
    assert torch.equal(batch["labels"], labels.masked_fill(labels == 0, -100))
    with module.register_forward_pre_hook(lambda _, args, own: seen.append(own), with_kwargs=True):
        seq2seq(module, tokenizer).loss_fn({n: p.detach() for n, p in module.named_parameters()}, batch)
        module(**batch)
    with module.get_decoder().register_forward_pre_hook(lambda _, args, own: seen.append(own), with_kwargs=True):
        module(**batch)
    given, _, wanted = seen
    assert torch.equal(given["decoder_input_ids"], wanted["input_ids"])
    assert torch.equal(
        given["input_ids"], tokenizer([own for own, _ in ROWS], padding=True, return_tensors="pt")["input_ids"]
    )
    assert (given["decoder_input_ids"][:, 0] == module.config.decoder_start_token_id).all()
    assert start_problems(module, pairs.encode(ROWS, tokenizer, vocabulary=30)[0].labels) == []


def test_an_answer_does_not_begin_with_the_token_that_ends_it():
    module, tokenizer = of_family("M2M100ForConditionalGeneration", SEAMLESS)
    found = pairs.encode([("abc", "ba"), ("a", "")], tokenizer, vocabulary=30)
    assert [tokenizer.convert_ids_to_tokens(own.labels) for own in found] == [["y", "b", "a", "</s>"], ["y", "</s>"]]
    assert start_problems(module, found[0].labels) == []
    _, other = of_family("MBartForConditionalGeneration")  # of an empty answer EOS is the end
    (empty,) = pairs.encode([("a", "")], other, vocabulary=30)
    assert other.convert_ids_to_tokens(empty.labels) == ["</s>", "y"]


def test_long_targets_keep_eos_and_the_language_code():
    _, tokenizer = of_family("MBartForConditionalGeneration")
    for source, target in pairs.encode(ROWS, tokenizer, vocabulary=30, max_length=4):
        assert tokenizer.convert_ids_to_tokens(source)[-2:] == ["</s>", "x"]
        assert tokenizer.convert_ids_to_tokens(target)[-2:] == ["</s>", "y"]
        assert max(len(source), len(target)) <= 4


def test_a_loss_that_starts_elsewhere_than_decoding_is_an_error():
    module, tokenizer = of_family("MBartForConditionalGeneration")
    target = pairs.encode(ROWS, tokenizer, vocabulary=30)[0].labels
    module.config.decoder_start_token_id = 5
    (text,) = start_problems(module, target)
    assert text.startswith("answers are decoded from token 5 (decoder_start_token_id), but the loss of MBartFor")
    module.config.pad_token_id = None
    assert "set pad_token_id in its config.json" in start_problems(module, target)[0]


def test_the_loss_is_the_mean_over_target_tokens(model, tokenizer):
    module, bundle = model
    batch, seen = batch_of(ROWS, tokenizer), []
    hook = module.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(out.shape[:2]))
    loss, count = bundle.loss_fn(bundle.params, batch)
    hook.remove()
    assert seen == [(1, count)]  # the head runs where a token is predicted
    total = 0.0
    for row in ROWS:  # every row alone, unpadded
        one = batch_of([row], tokenizer)
        before = torch.cat((torch.zeros(1, 1, dtype=torch.int64), one["labels"][:, :-1]), 1)
        logits = module(input_ids=one["input_ids"], decoder_input_ids=before).logits[0]
        total -= logits.log_softmax(-1).gather(1, one["labels"][0][:, None]).sum().item()
    assert count == sum(len(target) + 1 for _, target in ROWS)
    torch.testing.assert_close(loss.item(), total / int(count), rtol=1e-10, atol=0)
    torch.testing.assert_close(loss, module(**batch).loss, rtol=1e-12, atol=0)


def test_the_loss_of_bfloat16_weights_is_float32(tokenizer):
    bundle = seq2seq(make_module(dtype=torch.bfloat16), tokenizer)
    (loss, _), grads = grad.value_and_grad(bundle.loss_fn, engine="autograd")(bundle.params, batch_of(ROWS, tokenizer))
    assert loss.dtype == torch.float32
    assert {g.dtype for g in grads.values()} == {torch.bfloat16}


def test_greedy_answers_are_those_of_generate(model, tokenizer):
    module, bundle = model
    got = answers(bundle, bundle.params, SOURCES, Decoding(9))
    for source, text in zip(SOURCES, got, strict=True):
        out = module.generate(**tokenizer(source, return_tensors="pt", return_token_type_ids=False),
                              do_sample=False, num_beams=1, max_new_tokens=9)  # fmt: skip
        assert text == tokenizer.decode(out[0], skip_special_tokens=True).strip()
    assert len(set(got)) > 1
    assert "".join(got)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_forward_function_that_hands_its_options_on_decodes_too(tokenizer):
    bundle = seq2seq(module := make_module(seed=0), tokenizer)
    expected, forward = answers(bundle, bundle.params, SOURCES, Decoding(6)), module.forward
    module.forward = lambda **options: forward(**options)
    assert answers(bundle, bundle.params, SOURCES, Decoding(6)) == expected


def test_samples_depend_on_seed_repeat_and_row_alone(model):
    module, bundle = model
    settings = Decoding(8, 0.8, 3)
    whole = answers(bundle, bundle.params, SOURCES, settings, 5, repeat=1)
    rows = [3, 0]
    assert answers(bundle, bundle.params, [SOURCES[i] for i in rows], settings, 5, repeat=1, rows=rows) == [
        whole[i] for i in rows
    ]
    assert answers(bundle, bundle.params, SOURCES, settings, 5, repeat=0) != whole
    if module.config.model_type == "bart":  # positions of encoder and decoder are counted apart
        assert answers(bundle, bundle.params, ["a" * 23], Decoding(24))
        with pytest.raises(ValueError, match="prompt 0 has 25 tokens"):
            answers(bundle, bundle.params, ["a" * 24], Decoding(5))


def test_answers_are_of_the_given_weights(tokenizer):
    one, two = (seq2seq(make_module(seed=seed), tokenizer) for seed in (0, 1))
    other = answers(one, two.params, SOURCES, Decoding(6))
    assert other == answers(two, two.params, SOURCES, Decoding(6)) != answers(one, one.params, SOURCES, Decoding(6))
    lacking = {name: p for name, p in one.params.items() if name != "shared.weight"}
    with pytest.raises(ValueError, match=r"params lack 'shared\.weight'"):
        answers(one, lacking, SOURCES, Decoding(6))


def test_smat_trains_it(tokenizer):
    bundle = seq2seq(make_module(dtype=torch.float32), tokenizer)
    batch = batch_of(ROWS, tokenizer)
    before = bundle.loss_fn(bundle.params, batch)[0].item()
    optimizer = adamw(3e-2, weight_decay=0.0)
    settings = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3, "period": 4}
    method = smat.build(bundle.loss_fn, optimizer, bundle.params, where=bundle.where, max_grad_norm=1.0, **settings)
    state = method.init(bundle.params)
    for _ in range(20):
        state, info = method.update(random.key(0), state, batch)
    after = bundle.loss_fn(state.params, batch)[0].item()
    assert math.isfinite(info.loss.item())
    assert after < 0.5 * before


def test_what_is_no_encoder_decoder_is_refused(tokenizer):
    from transformers import LlamaConfig

    class Causal(nn.Module):
        config = LlamaConfig()

    with pytest.raises(ValueError, match="Causal is not an encoder-decoder"):
        seq2seq(Causal(), tokenizer)
    module = make_module()
    module.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="no decoder_start_token_id"):
        seq2seq(module, tokenizer)
    plbart, other = of_family("PLBartForConditionalGeneration")
    del plbart.config.decoder_start_token_id
    with pytest.raises(ValueError, match="no decoder_start_token_id"):
        seq2seq(plbart, other)
    wide = make_tokenizer()
    wide.add_tokens(["<x>"], special_tokens=True)
    wide.pad_token = "<x>"
    with pytest.raises(ValueError, match="embedding has 30 rows, too few"):
        seq2seq(make_module(), wide)
