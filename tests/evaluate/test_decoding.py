"""Decoding of tiny random language models: the same texts in whatever batch, and as ``generate`` has them."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import ModuleLoss, random
from smat_fn.evaluate import decoding
from smat_fn.evaluate.decoding import Decoding, generator, prompt_ids

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["<s>", "</s>", "<pad>"]
PROMPTS = ["abc", "z", "the quick", "abc", "hello", "q", "someprompt", "xy"]
SAMPLED = Decoding(12, 0.8, 3)


def make_tokenizer(*, bos=True, closes=False):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS, " "])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="z"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast.decoder = decoders.Fuse()
    if bos or closes:
        template = f"{'<s>' if bos else ''} $A {'</s>' if closes else ''}".strip()
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make_model(seed=0, kind="llama", dtype=torch.float64):
    import transformers as hf

    torch.manual_seed(seed)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        module = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=30, **sizes, **ids))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = hf.LlamaConfig(vocab_size=30, num_key_value_heads=2, max_position_embeddings=64, **sizes, **ids)
        module = hf.LlamaForCausalLM(config)
    module = module.to(dtype).eval()
    with torch.no_grad():
        for p in module.parameters():
            # far from a uniform distribution, so that every position has its own
            p.mul_(8 if p.ndim > 1 else 1)
    return module


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def module():
    return make_model()


@pytest.fixture(scope="module")
def make(module, tokenizer):
    """``make(params=None, **options)``: a generator of the tiny Llama."""

    def build(params=None, **options):
        return generator(ModuleLoss(module, None), tokenizer, params or weights(module), **options)

    return build


def test_the_settings_of_trace():
    sampled = {name: settings for name, settings in decoding.TRACE.items() if settings.temperature}
    assert sampled == {
        "MeetingBank": Decoding(150, 0.7, 3),
        "20Minuten": Decoding(150, 0.7, 3),
        "ScienceQA": Decoding(100, 0.5, 3),
    }
    greedy = ["C-STANCE", "FOMC", "NumGLUE-cm", "NumGLUE-ds"]
    assert {name: decoding.TRACE[name] for name in greedy} == dict.fromkeys(greedy, Decoding(20, 0.0, 1))
    assert len(decoding.TRACE) == 7


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32])
def test_greedy_is_generate_without_sampling(kind, dtype, tokenizer):
    module = make_model(1, kind, dtype)
    got = generator(ModuleLoss(module, None), tokenizer, weights(module), batch_size=3)(PROMPTS, Decoding(9), seed=0)
    for prompt, text in zip(PROMPTS, got, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        out = module.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=9)[0, ids.shape[1] :]
        assert text == tokenizer.decode(out, skip_special_tokens=True).strip()
    assert len(set(got)) > 3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_with_a_cache_reads_each_token_once(kind, tokenizer):
    module, widths = make_model(1, kind), []

    def look(_, args, named):
        widths.append(named["input_ids"].shape[1])

    module.register_forward_pre_hook(look, with_kwargs=True)
    generator(ModuleLoss(module, None), tokenizer, weights(module))(["abcde"], Decoding(4), seed=0)
    assert len(widths) > 2
    assert widths == [6] + [1] * (len(widths) - 1)  # under whatever name the cache is


@pytest.mark.parametrize(
    "kind", ["Mamba", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Rwkv", "RecurrentGemma"))]
)
def test_a_recurrent_model_answers_as_if_it_read_all_anew(kind, tokenizer):
    import transformers as hf

    own = {
        "Mamba": {"state_size": 4, "num_hidden_layers": 2},
        "Rwkv": {"attention_hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        "RecurrentGemma": {
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 8,
            "attention_window_size": 32,
        },
    }[kind]
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(vocab_size=30, hidden_size=16, bos_token_id=0, eos_token_id=1, **own)
    module = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(8 if p.ndim == 2 else 1)
    got = generator(ModuleLoss(module, None), tokenizer, weights(module), batch_size=3)(PROMPTS, Decoding(6), seed=0)
    for prompt, text in zip(PROMPTS, got, strict=True):
        ids = start = tokenizer(prompt, return_tensors="pt")["input_ids"]
        while ids.shape[1] < start.shape[1] + 6 and (ids is start or ids[0, -1] != 1):
            with torch.no_grad():
                ids = torch.cat((ids, module(input_ids=ids, use_cache=False).logits[:, -1].argmax(1)[:, None]), 1)
        assert text == tokenizer.decode(ids[0, start.shape[1] :], skip_special_tokens=True).strip()
    assert len(set(got)) > 3


@pytest.mark.parametrize(
    ("kind", "other", "alike"),
    [pytest.param("MiniMax", "linear_attention", True, marks=pytest.mark.slow), ("Lfm2", "conv", False)],
)
def test_rows_of_two_lengths_are_decoded_together_unless_that_changes_answers(
    kind, other, alike, tokenizer, monkeypatch
):
    import transformers as hf

    tried, reads = [], decoding._reads_padding
    monkeypatch.setattr(decoding, "_reads_padding", lambda *args: tried.append([*map(len, args[1:])]) or reads(*args))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    own = {"MiniMax": {"block_size": 4, "num_local_experts": 2}, "Lfm2": {"block_auto_adjust_ff_dim": False}}[kind]
    config = getattr(hf, f"{kind}Config")(
        vocab_size=30, num_key_value_heads=2, layer_types=[other, "full_attention", other], bos_token_id=0,
        eos_token_id=1, pad_token_id=2, **sizes, **own,
    )  # fmt: skip
    module = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    together = generator(ModuleLoss(module, None), tokenizer, weights(module), batch_size=3)
    alone = generator(ModuleLoss(module, None), tokenizer, weights(module), batch_size=1)
    assert together(PROMPTS[:1], Decoding(6), seed=0) == alone(PROMPTS[:1], Decoding(6), seed=0)
    assert together([], Decoding(6), seed=0) == []
    masks = []
    with module.register_forward_pre_hook(
        lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    ):
        got = together(PROMPTS, Decoding(6), seed=0)
    assert got == alone(PROMPTS, Decoding(6), seed=0)
    assert tried == [[2, 11]] * 2  # tokens of a shortest and a longest prompt, once a generator
    assert all(mask.all() for mask in masks[4:]) is alike  # after the four calls that find it out
    assert len(set(got)) > 3


@pytest.mark.parametrize("settings", [pytest.param(Decoding(12), marks=pytest.mark.slow), SAMPLED])
def test_texts_do_not_depend_on_the_batch(make, settings):
    alone = make(batch_size=1)(PROMPTS, settings, seed=5)
    for size in (3, 100):
        assert make(batch_size=size)(PROMPTS, settings, seed=5) == alone
    assert len(set(alone)) > 4


def test_a_sample_depends_on_seed_repeat_and_row_alone(make):
    run = make(batch_size=3)
    base = run(["abc"] * 6, SAMPLED, 5)
    # rows of one prompt differ, and do not know of the rows after them
    assert len(set(base)) == 6
    assert run(["abc"] * 2, SAMPLED, 5) == base[:2]
    assert run(["xyxyxy", *["abc"] * 5], SAMPLED, 5)[1:] == base[1:]
    assert run(["abc"] * 6, SAMPLED, 5, repeat=0) == base
    others = [*run(["abc"] * 6, SAMPLED, 5, repeat=1), *run(["abc"] * 6, SAMPLED, 6)]
    assert not set(others) & set(base)
    # whatever torch's own generator did
    torch.manual_seed(123)
    assert run(["abc"] * 6, SAMPLED, 5) == base


def test_a_part_of_the_rows_by_their_numbers_is_that_part_of_the_whole(make, module, tokenizer):
    whole = make(batch_size=3)(PROMPTS, SAMPLED, 5, repeat=1)
    rows = [6, 0, 3]
    assert make()([PROMPTS[row] for row in rows], SAMPLED, 5, repeat=1, rows=rows) == [whole[row] for row in rows]
    assert make()([PROMPTS[row] for row in rows], SAMPLED, 5, repeat=1) != [whole[row] for row in rows]
    with pytest.raises(ValueError, match="prompt 41 has 61 tokens"):
        make()(["a", "b" * 60], Decoding(5), 0, rows=[40, 41])


def test_greedy_knows_neither_seed_nor_repeat(make):
    run = make()
    assert run(PROMPTS, Decoding(5), 1, repeat=2) == run(PROMPTS, Decoding(5), 7)


def test_a_tiny_temperature_is_greedy(make):
    run = make()
    assert run(PROMPTS, Decoding(8, 1e-6), 0) == run(PROMPTS, Decoding(8), 0)


def test_samples_have_the_softmax_distribution():
    logits = torch.tensor([0.0, 1.0, 2.5, -1.0, 0.3], dtype=torch.float64)
    n, temperature = 20_000, 0.7
    keys = random.fold_in(random.key(0), torch.arange(n))
    drawn = decoding.sample(logits.expand(n, 5), keys, 3, temperature)
    p = (logits / temperature).softmax(0)
    counts = torch.bincount(drawn, minlength=5)
    chi2 = ((counts - n * p).square() / (n * p)).sum().item()
    # four degrees of freedom, 99.9 %
    assert chi2 < 18.5
    # the next position is independent of this one
    after = decoding.sample(logits.expand(n, 5), keys, 4, temperature)
    same = (drawn == after).double().mean().item()
    assert abs(same - p.square().sum().item()) < 4 * math.sqrt(0.25 / n)


def test_gumbel_numbers_are_those_of_the_keys():
    keys = random.fold_in(random.key(7), torch.tensor([4, 9]))
    logits = torch.zeros(2, 6, dtype=torch.float64)
    for row, key in enumerate(keys):
        child = random.fold_in(key, 2)
        words = [random.philox(child[0], child[1] + n // 4)[n % 4].item() for n in range(6)]
        gumbel = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words]
        assert decoding.sample(logits, keys, 2, 1.0)[row] == gumbel.index(max(gumbel))


class Recorder(torch.nn.Module):
    """Stands where the model stands: says a fixed text per prompt, and counts what it is asked."""

    def __init__(self, module, script):
        super().__init__()
        self.inner, self.script, self.widths = module, script, []
        self.config, self.generation_config = module.config, module.generation_config
        self.get_input_embeddings = module.get_input_embeddings

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None, use_cache=True):
        self.widths.append(tuple(input_ids.shape))
        step = 0 if past_key_values is None else past_key_values
        first = input_ids[:, -1] if step == 0 else self.first
        self.first = first
        spoken = [
            self.script.get(int(token), [5])[min(step, len(self.script.get(int(token), [5])) - 1)] for token in first
        ]
        logits = torch.nn.functional.one_hot(torch.tensor(spoken), 30).double()[:, None]

        class Out:
            pass

        out = Out()
        out.logits, out.past_key_values = logits, step + 1
        return out


def test_a_row_ends_at_its_eos_and_the_batch_when_all_have(module, tokenizer):
    a, b, c = (tokenizer.convert_tokens_to_ids(x) for x in "abc")
    space = tokenizer.convert_tokens_to_ids(" ")
    talk = Recorder(module, {a: [space, b, space, 1, c], b: [1, a], c: [b, 2, c, 1]})
    run = generator(ModuleLoss(talk, None), tokenizer, {}, batch_size=3)
    assert run(["xa", "b", "yyc"], Decoding(50), 0) == ["b", "", "bc"]
    # prefill of the longest, then one token a step until the last row has ended
    assert talk.widths == [(3, 4), (3, 1), (3, 1), (3, 1)]


def test_the_eos_of_the_generation_config_ends_a_row_too(module, tokenizer):
    a, b, c = (tokenizer.convert_tokens_to_ids(x) for x in "abc")
    talk = Recorder(module, {a: [b, c, b, 1]})
    talk.generation_config = type(module.generation_config)(eos_token_id=[c, 2])
    assert generator(ModuleLoss(talk, None), tokenizer, {})(["a"], Decoding(9), 0) == ["b"]


def test_no_step_copies_the_heads_weight_for_each_row(make):
    class Copies(TorchDispatchMode):
        batched = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.batched += func is torch.ops.aten.bmm.default and args[1].shape[-1] == 30  # the vocabulary
            return func(*args, **kwargs or {})

    run = make(batch_size=3)
    with Copies() as copies:
        run(PROMPTS, Decoding(3), 0)
    assert copies.batched == 0


def test_other_weights_by_reference_and_the_own_ones_back(module, tokenizer):
    own = {name: p.data_ptr() for name, p in module.named_parameters()}
    given = weights(make_model(3))
    seen = []

    def look(layer, args):
        seen.append({name: p.data_ptr() for name, p in layer.named_parameters()})

    hook = module.register_forward_pre_hook(look)
    try:
        got = generator(ModuleLoss(module, None), tokenizer, given)(PROMPTS, Decoding(6), 0)
    finally:
        hook.remove()
    assert all(names == {name: p.data_ptr() for name, p in given.items()} for names in seen)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == own
    other = make_model(3)
    assert got == generator(ModuleLoss(other, None), tokenizer, weights(other))(PROMPTS, Decoding(6), 0)
    assert got != generator(ModuleLoss(module, None), tokenizer, weights(module))(PROMPTS, Decoding(6), 0)


def test_weights_and_modes_are_back_after_an_exception(module, tokenizer, monkeypatch):
    own = {name: p.data_ptr() for name, p in module.named_parameters()}
    module.model.layers[0].training = True

    def stop(*args):
        assert not module.model.layers[0].training
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "sample", stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            generator(ModuleLoss(module, None), tokenizer, weights(make_model(3)))(PROMPTS, SAMPLED, 0)
        assert module.model.layers[0].training
    finally:
        module.model.layers[0].training = False
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == own


def test_a_checkpointing_model_decodes_with_its_cache(tokenizer, make):
    from smat_fn.models.pretrained import checkpoint_blocks

    module = make_model()
    checkpoint_blocks(module)
    got = generator(ModuleLoss(module, None), tokenizer, weights(module))(PROMPTS, SAMPLED, 5)
    assert got == make()(PROMPTS, SAMPLED, 5)
    assert module.model.layers[0].training


def test_no_prompts_no_answers(make):
    assert make()([], SAMPLED, 0) == []


def test_a_tokenizer_that_closes_texts_does_not_close_the_prompt(module, make):
    closing = make_tokenizer(closes=True)
    assert closing("a")["input_ids"][-1] == 1
    got = generator(ModuleLoss(module, None), closing, weights(module))(PROMPTS, Decoding(6), 0)
    assert got == make()(PROMPTS, Decoding(6), 0)


@pytest.mark.parametrize("closes", [False, True])
def test_an_eos_that_a_prompt_ends_in_is_its_own(closes):
    tokenizer = make_tokenizer(closes=closes)
    own = prompt_ids(["ab", "ab</s>"], tokenizer)
    assert own[1] == [*own[0], 1]
    assert tokenizer.decode(own[0]).replace(" ", "") == "<s>ab"


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        (torch.float64, "$"),
        (torch.float32, "$"),
        (torch.bfloat16, r", or load the model as float32 \(--suite-options dtype float32\)$"),
    ],
)
def test_logits_that_are_nan_are_an_error(dtype, way, tokenizer):
    module = make_model(dtype=dtype)
    params = weights(module)
    broken = {**params, "lm_head.weight": params["lm_head.weight"] * math.inf}
    told = f"the logits of 2 of 2 prompts are NaN: the weights overflow in {dtype}, choose a smaller coefficient{way}"
    with pytest.raises(ValueError, match=told):
        generator(ModuleLoss(module, None), tokenizer, broken)(["a", "b"], Decoding(2), 0)


def test_logits_that_are_nan_at_one_step_are_an_error(module, tokenizer):
    def overflows(own, args, out):
        if len(own.widths) == 2:
            out.logits[:1] = math.nan

    talk = Recorder(module, {})
    talk.register_forward_hook(overflows)
    with pytest.raises(ValueError, match="the logits of 1 of 2 prompts are NaN"):
        generator(ModuleLoss(talk, None), tokenizer, {})(["a", "b"], Decoding(4), 0)


def test_bad_input_is_told_before_any_work(module, make):
    run = make()
    with pytest.raises(ValueError, match=r"max_new_tokens is 0.*temperature is -1.*repeat is -2"):
        run(PROMPTS, Decoding(0, -1.0), 0, repeat=-2)
    with pytest.raises(ValueError, match=r"temperature is nan"):
        run(PROMPTS, Decoding(1, math.nan), 0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        make(batch_size=0)
    with pytest.raises(ValueError, match=r"prompt 1 has 61 tokens, with 5 new ones more than the model's 64"):
        run(["a", "b" * 60], Decoding(5), 0)
    assert run(["b" * 58], Decoding(5), 0)
    bare = generator(ModuleLoss(module, None), make_tokenizer(bos=False), weights(module))
    with pytest.raises(ValueError, match=r"prompt 0 holds no token.*and 3 more"):
        bare([""] * 8, Decoding(1), 0)
    wide = make_tokenizer()
    wide.add_tokens(["<image>"])
    with pytest.raises(ValueError, match=r"prompt 1 has token 30, the embedding has 30 rows"):
        generator(ModuleLoss(module, None), wide, weights(module))(["a", "<image>"], Decoding(1), 0)
    with pytest.raises(ValueError, match=r"leaf 'nope' is not a parameter"):
        make({"nope": torch.zeros(1)})(["a"], Decoding(1), 0)
