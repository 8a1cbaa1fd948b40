"""The engines of docs/serving.md, run as they stand behind the suite and beside the built-in engine."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from smat_fn.suites import load_suite

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/serving.md"
PROMPTS = ["keep the plan", "the council voted to", "as it is", "nothing"]


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The example as a module that can be imported, and the folder of it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    folder = tmp_path_factory.mktemp("engine")
    (folder / "my_engine.py").write_text(code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "my_engine:make"
        sys.modules.pop("my_engine", None)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """``load(**options)``: a suite of a greedy task and a sampled one on a tiny model."""
    folder = tmp_path_factory.mktemp("served")
    for task in ("NumGLUE-cm", "MeetingBank"):
        (folder / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "eval"):
            rows = [{"prompt": prompt, "answer": prompt.split()[0]} for prompt in PROMPTS]
            (folder / "rows" / task / f"{split}.json").write_text(json.dumps(rows))
    runpy.run_path(str(ROOT / "examples/trace_tiny.py"))["write_model"](
        folder / "model", PROMPTS, vocabulary=300, width=128, layers=1
    )
    given = {"model": str(folder / "model"), "data": str(folder / "rows"), "device": "cpu", "max_new_tokens": 6}
    return lambda **options: load_suite("trace", seed=3, **given, **options)


def answers(suite, params, task, repeat=0):
    from smat_fn.evaluate.records import Journal

    found = {}

    def add(batch, done, total):
        found.update({answer.row: answer.prediction for answer in batch})

    suite.score_once(params, task, "dev", repeat, Journal({}, add))
    return [found[row] for row in range(len(PROMPTS))]


def test_greedy_answers_of_other_weights_are_those_of_the_built_in_engine(load, module):
    plain, served = load(), load(engine=module)
    generator = torch.Generator().manual_seed(1)
    moved = {name: p + 0.5 * torch.randn(p.shape, generator=generator) for name, p in plain.base.items()}
    kept = {name: p.clone() for name, p in served.base.items()}
    for params in (plain.base, moved):
        assert answers(served, params, "NumGLUE-cm") == answers(plain, params, "NumGLUE-cm")
    assert answers(plain, plain.base, "NumGLUE-cm") != answers(plain, moved, "NumGLUE-cm")
    assert all(torch.equal(served.base[name], p) for name, p in kept.items())


def test_samples_depend_on_repeat_and_row_and_not_on_the_batch(load, module):
    whole, pairs = load(engine=module), load(engine=module, decode_batch=2)
    texts = [answers(whole, whole.base, "MeetingBank", repeat) for repeat in (0, 1)]
    assert [answers(pairs, pairs.base, "MeetingBank", repeat) for repeat in (0, 1)] == texts
    assert texts[0] != texts[1]
    assert whole.score(whole.base, "MeetingBank", "dev") == pairs.score(pairs.base, "MeetingBank", "dev")


def test_scores_of_another_engine_are_told_apart(load, module):
    assert load().content("MeetingBank", "dev") != load(engine=module).content("MeetingBank", "dev")
    with pytest.raises(ValueError, match="engine 'my_engine:nothing' cannot be imported"):
        load(engine="my_engine:nothing")


class Answer(NamedTuple):
    text: str


class Answers(NamedTuple):
    outputs: list[Answer]


class StandIn:
    """A stand-in for ``vllm.LLM`` in examples/vllm_engine.py: greedy answers of a folder, by transformers."""

    def __init__(self, folder, *, dtype, **options):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def generate(self, prompts, asked, use_tqdm):
        return [Answers([Answer(self.answer(*each))]) for each in zip(prompts, asked, strict=True)]

    def answer(self, prompt, asked):
        assert not asked["temperature"]
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        found = self.model.generate(ids, max_new_tokens=asked["max_tokens"], do_sample=False)
        return self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("real", [False, True])
def test_vllm_answers_with_the_weights_that_it_is_given(real, load, monkeypatch):
    if real:
        pytest.importorskip("vllm", exc_type=ImportError, reason="vllm is not installed")
    else:
        module = SimpleNamespace(LLM=StandIn, SamplingParams=dict, __version__="0")
        monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.delitem(sys.modules, "vllm_engine", raising=False)
    plain, served = load(), load(engine="vllm_engine:eager")
    generator = torch.Generator().manual_seed(1)
    moved = {name: p + 0.5 * torch.randn(p.shape, generator=generator) for name, p in plain.base.items()}
    for params in (plain.base, moved, plain.base):
        assert answers(served, params, "NumGLUE-cm") == answers(plain, params, "NumGLUE-cm")
    assert "vllm" in repr(sys.modules["vllm_engine"].eager)
    sys.modules.pop("vllm_engine")
