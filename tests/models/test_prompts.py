"""Prompts that frozen layers read once: the same answers as of the whole model, at whatever weights above."""

import functools

import pytest
import torch
import transformers as hf

from smat_fn.evaluate.decoding import prompt_tokens
from smat_fn.models import prompts as prompts_module
from smat_fn.models.modules import blocks, cache_name, train_only
from smat_fn.models.prompts import Prompts, prompts_of


def tokens(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(3, 61, (n,), generator=generator).tolist() for n in lengths]
    return prompt_tokens(rows, torch.device("cpu"))


@pytest.fixture(scope="module")
def made(model):
    """``made(kind, layers=1)``: a model and what reads prompts with it."""

    def build(kind, layers=1):
        module = model(kind, layers).module.eval()
        found = prompts_of(module, tokens(9, 6, 2))
        assert isinstance(found, Prompts), found
        return module, found

    return build


def passes(module):
    """Counts how often the insides of every block run."""
    seen = [0] * len(blocks(module))
    for place, block in enumerate(blocks(module)):
        block.mlp.register_forward_hook(lambda *_, place=place: seen.__setitem__(place, seen[place] + 1))
    return seen


KINDS = ["llama", "tied", "qwen2", "gpt2", "opt", "gemma2", "gemma3", "mixtral"]


@pytest.mark.parametrize(("kind", "layers"), [*((kind, 1) for kind in KINDS), ("llama", 2), ("gemma3", 2)])
def test_logits_and_caches_are_those_of_the_whole(kind, layers, made):
    module, read = made(kind, layers)
    given = tokens(12, 30, 7)  # longer than a window of attention
    for turn in range(3):
        with torch.no_grad():
            for p in module.parameters():
                if p.requires_grad:
                    p.add_(0.1 * turn)
            wanted, found = module(**given, use_cache=True), read(module, **given, use_cache=True)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=0)
        name = cache_name(module)
        for own, due in zip(found[name].layers, wanted[name].layers, strict=True):
            assert torch.equal(own.keys, due.keys)
            assert torch.equal(own.values, due.values)
            assert own.get_seq_length() == due.get_seq_length()
    assert not any("forward" in vars(block) for block in blocks(module))


def test_frozen_layers_read_a_batch_once(made):
    module, read = made("llama")
    seen, options = passes(module), {"use_cache": True}
    with torch.no_grad():
        for _ in range(3):
            read(module, **tokens(12, 30), **options)
        assert seen == [1, 1, 3]
        read(module, **tokens(12, 31), **options)
    assert seen == [2, 2, 4]


def test_answers_do_not_change_what_is_kept(made):
    module, read = made("llama")
    given = tokens(12, 30)
    with torch.no_grad():
        first = [read(module, **given, use_cache=True) for _ in range(2)]
        after = {"input_ids": given["input_ids"][:, :1], "position_ids": given["position_ids"][:, -1:] + 1}
        name = cache_name(module)
        longer = [module(**after, **{name: out[name]}).logits for out in first]
        again = read(module, **given, use_cache=True)
    assert torch.equal(*longer)
    assert {layer.keys.shape[2] for layer in again[name].layers} == {30}
    assert torch.equal(again.logits, first[0].logits)


def test_no_more_is_kept_than_there_is_room_for(monkeypatch, made):
    module, read = made("llama", 2)
    size = 4 * (2 * 30 * 16 + 2 * 2 * 30 * 8)  # states; keys and values of the lowest block
    monkeypatch.setattr(prompts_module, "HELD", size + 100)
    seen = passes(module)
    with torch.no_grad():
        for given in (tokens(12, 30), tokens(11, 30)) * 2:
            read(module, **given, use_cache=True)
    assert read._bytes == size
    assert len(read._kept) == 1
    assert seen == [3, 4, 4]


def test_layers_are_back_after_an_error(made):
    def fails(*_):
        raise RuntimeError("out of memory")

    module, read = made("llama")
    given = tokens(12, 30)
    read(module, **given, use_cache=True)
    blocks(module)[-1].mlp.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        read(module, **given, use_cache=True)
    assert not any("forward" in vars(block) or block._forward_pre_hooks for block in blocks(module))


def test_models_that_need_more_say_why(model):
    module = model("mamba").module.eval()
    assert isinstance(prompts_of(module, tokens(9, 6)), str)
    module = model("llama").module.eval()
    for p in module.parameters():
        p.requires_grad_(True)
    assert prompts_of(module, tokens(9, 6)) == "layers other than top ones are trained"
    train_only(module, layers=3)
    assert prompts_of(module, tokens(9, 6)) == "the lowest block is trained"
    train_only(module, layers=1)
    module.forward = lambda input_ids, **options: None
    assert prompts_of(module, tokens(9, 6)) == "its forward function takes no cache of keys and values"


class Mixes(hf.LlamaForCausalLM):
    """Reads more of the prompt than its blocks' states."""

    @functools.wraps(hf.LlamaForCausalLM.forward)
    def forward(self, input_ids, **options):
        out = super().forward(input_ids, output_hidden_states=True, **options)
        out.logits = out.logits + out.hidden_states[1][:, -1:].sum()
        return out


def test_a_model_whose_answers_depend_on_more_reads_prompts_whole(model):
    torch.manual_seed(0)
    module = Mixes(model("llama").module.config).eval()
    train_only(module, layers=1)
    assert prompts_of(module, tokens(9, 6)).startswith("logits differ by ")
