"""Conversations: what the template writes, what is supervised in it, what cannot be told apart."""

import json

import pytest
from transformers import AutoTokenizer

from smat_fn.data import chat, rows
from smat_fn.models.head import IGNORED

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "a colour?"},
    {"role": "assistant", "content": "dark blue"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer, loaded as a suite loads it, with a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=262, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    fast.train_from_iterator(["dark blue dark blue"], trainer)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    own.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    own.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def supervised(example, tokenizer):
    """The supervised stretches as text."""
    parts, last = [], False
    for token, label in zip(*example, strict=True):
        if label == IGNORED:
            last = False
            continue
        assert label == token
        parts = [*parts[:-1], [*parts[-1], token]] if last else [*parts, [token]]
        last = True
    return [tokenizer.decode(part) for part in parts]


def test_the_loss_is_on_every_answer_and_its_end_alone(tokenizer):
    (example,) = chat.encode([TALK], tokenizer, vocabulary=262)
    assert tokenizer.decode(example.input_ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert example.input_ids.count(0) == 1, "the template writes BOS, the tokenizer adds none"
    assert supervised(example, tokenizer) == ["two</s>", "dark blue</s>"]
    assert chat.prompt_of(TALK, tokenizer).endswith("a colour?</s>[assistant]")
    answers = [label for label in example.labels if label != IGNORED]
    assert len(set(answers)) > 4
    assert chat.ends_by(TALK, tokenizer) == {*answers[-4:]} > {1}


def test_answers_of_weight_0_are_not_trained(tokenizer):
    def weighted(*weights, talk=TALK):
        own = iter(weights)
        return [{**message, "weight": next(own)} if message["role"] == "assistant" else message for message in talk]

    talks = [weighted(0, 1), weighted(1, 0), weighted(1, 1)]
    found = chat.encode(talks, tokenizer, vocabulary=262)
    assert [supervised(one, tokenizer) for one in found] == [
        ["dark blue</s>"],
        ["two</s>"],
        ["two</s>", "dark blue</s>"],
    ]
    assert {one.input_ids for one in found} == {chat.encode([TALK], tokenizer, vocabulary=262)[0].input_ids}
    scored = chat.encode(talks, tokenizer, vocabulary=262, last=True)
    assert [supervised(one, tokenizer) for one in scored] == [["dark blue</s>"]] * 3
    assert chat.ends_by(talks[1], tokenizer) == chat.ends_by(TALK, tokenizer)
    assert chat.cut_report(talks, tokenizer, max_length=60)[0] == 3


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]


def test_a_template_gets_the_tools_of_a_row(tokenizer, tmp_path):
    kept, tokenizer.chat_template = tokenizer.chat_template, "{{ tools | tojson if tools else 'none' }}" + TEMPLATE
    stored = [{"messages": TALK, "tools": tools} for tools in (TOOLS, json.dumps(TOOLS), [], "null", None)]
    found = rows.load_conversations(write(tmp_path, stored), "task", "train")
    try:
        texts, _, lost = chat.render(found, tokenizer)
        prompts = [chat.prompt_of(own, tokenizer) for own in found]
    finally:
        tokenizer.chat_template = kept
    assert lost == [()] * 5
    assert [own[0] for own in chat.render(found, tokenizer)[2][:2]] == ["tools"] * 2, "its own template has no tools"
    for several in (texts, prompts):
        assert [text.partition("<s>")[0] for text in several] == [json.dumps(TOOLS)] * 2 + ["none"] * 3
    for tools in ("weather", [1], {"name": "weather"}):
        with pytest.raises(ValueError, match=r"row 0: tools are .*, must be a list of objects, or a JSON text of one"):
            rows.load_conversations(write(tmp_path, [{"messages": TALK, "tools": tools}]), "task", "train")


def test_a_long_conversation_is_cut_as_other_rows_are(tokenizer):
    (whole,) = chat.encode([TALK], tokenizer, vocabulary=262)
    size = whole.labels.index(1) + 1
    (example,) = chat.encode([TALK], tokenizer, vocabulary=262, max_length=size)
    assert example == tuple(own[:size] for own in whole)
    assert supervised(example, tokenizer) == ["two</s>"]
    assert chat.cut_report([TALK], tokenizer, max_length=size)[:4] == (1, 1.0, 1.0, 0.0)  # the first answer is whole
    (example,) = chat.encode([TALK], tokenizer, vocabulary=262, max_length=20, truncate="prompt-middle")
    assert (len(example.input_ids), example.input_ids[0]) == (20, 0)
    with pytest.raises(ValueError, match=r"rows 0 \(\d+ tokens\) hold no answer"):
        chat.encode([TALK], tokenizer, vocabulary=262, max_length=12)
    cut = chat.cut_report([TALK], tokenizer, max_length=12)
    assert (cut.rows, cut.eos, cut.answer, cut.whole_answer) == (1, 1.0, 1.0, 1.0)
    assert chat.cut_report([TALK], tokenizer).eos == 0
    for truncate, lost in (("prompt-middle", (1.0, 1.0, 0.0)), ("left", (0.0, 1.0, 0.0))):  # of two answers one is left
        assert chat.cut_report([TALK], tokenizer, max_length=20, truncate=truncate)[1:4] == lost
    assert chat.cut_report([TALK[:3]], tokenizer, max_length=20, truncate="prompt-middle")[1:4] == (0, 0, 0)


def test_a_template_that_renders_a_beginning_otherwise_is_refused(tokenizer):
    own = chat.Rendered(tokenizer)
    kept = tokenizer.chat_template
    try:  # what is thought is written in the last answer alone
        tokenizer.chat_template = TEMPLATE.replace(
            "]{{ m.content }}", "]{% if loop.last and m.role == 'assistant' %}(think){% endif %}{{ m.content }}"
        )
        with pytest.raises(ValueError, match=r"row 1: .* renders message 2 otherwise when more follow"):
            chat.render([TALK[:3], TALK], own)
        assert chat.render([TALK[:3]], own)[0][0].endswith("[assistant](think)two</s>")
        tokenizer.chat_template = TEMPLATE.replace("[assistant]{% endif", "[assistant](think){% endif")
        with pytest.raises(ValueError, match=r"row 0: .*before the answer of message 2 it renders other text than as"):
            chat.render([TALK[:3]], own)
        tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
        with pytest.raises(ValueError, match=r"row 0: the chat template does not take it .no system messages"):
            chat.render([TALK], own)
    finally:
        tokenizer.chat_template = kept


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
LAST = "{{ m.content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("written", "answer", "told"),
    [
        (LAST, {"content": "<think>1 + 1</think>two"}, "'<think>1 .*</think>two'"),
        ("{{ m.content if m.role != 'assistant' }}", {"content": "1"}, "'1'"),  # which the prompt has
        ("{{ m.content }}", {"content": "", "tool_calls": [CALL]}, "the call of weather"),
        ("{{ m.content }}", {"content": "two", "reasoning_content": "1 + 1"}, "the reasoning_content"),
    ],
)
def test_a_template_that_leaves_out_a_trained_answer_is_refused(tokenizer, written, answer, told):
    kept, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE.replace("{{ m.content }}", written)
    own, more = {"role": "assistant", **answer}, {"role": "assistant", "content": ""}
    try:
        with pytest.raises(
            ValueError, match=rf"row 1: .*it does not write all of {told} in message 2, an answer: change"
        ):
            chat.render([[*TALK[:2], more], [*TALK[:2], own]], tokenizer)
        lost = chat.render([[*TALK[:2], {**own, "weight": 0}, TALK[1], more]], tokenizer)[2]
    finally:
        tokenizer.chat_template = kept
    assert lost == [() if told in ("'1'", "the reasoning_content") else ("assistant messages",)]


def test_what_a_template_leaves_out_beside_answers_is_named_by_row(tokenizer):
    kept = tokenizer.chat_template
    spaced = "{{ m.content | tojson if m.role == 'tool' else m.content | replace('</think>', '\n</think>\n\n') }}"
    talk = [TALK[1], {"role": "tool", "content": 'a "b"\n'}, {"role": "assistant", "content": "<think>c</think>d e"}]
    try:
        tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", spaced)
        assert chat.render([talk], tokenizer)[2] == [()], "written otherwise, but all of it"
        tokenizer.chat_template = TEMPLATE.replace("in messages %}", "in messages if m.role != 'tool' %}")
        assert chat.render([talk, TALK], tokenizer)[2] == [("tool messages",), ()]
        tokenizer.chat_template = TEMPLATE.replace("[assistant]{% endif", "[assistant]<think>{% endif").replace(
            "]{{ m.content }}", "]{{ '<think>' if m.role == 'assistant' }}{{ m.content | replace('<think>', '') }}"
        )
        (text,), ((span,),), lost = chat.render([talk], tokenizer)
    finally:
        tokenizer.chat_template = kept
    assert (text[slice(*span)], lost) == ("c</think>d e</s>", [()])


THOUGHT = "]{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"


@pytest.mark.parametrize(
    ("old", "new", "end"),
    [
        ("]{{ m.content }}", THOUGHT, "[assistant]<think>\n\n</think>\n\n"),
        ("{% if add_generation_prompt %}[assistant]{% endif %}", "", "[assistant]"),  # it knows no generation prompt
        ("]{{ m.content }}", "] {{ m.content }}", "[assistant]"),  # a space belongs to the word that follows
    ],
)
def test_a_prompt_holds_what_the_template_writes_before_an_answer(tokenizer, old, new, end):
    kept, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE.replace(old, new)
    try:
        (example,), prompt = chat.encode([TALK[:3]], tokenizer, vocabulary=262), chat.prompt_of(TALK[:3], tokenizer)
    finally:
        tokenizer.chat_template = kept
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert prompt.endswith(f"1 + 1?</s>{end}")
    assert example.input_ids[: len(ids)] == tuple(ids)
    assert tokenizer.decode(example.input_ids[len(ids) :], skip_special_tokens=True).strip() == "two"


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(tokenizer):
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {% endif %}" + kept
    try:
        assert chat.prompt_of(TALK[:3], tokenizer).startswith("26 Jul 2024 <s>[system]")
        assert chat.render([TALK[:3]], tokenizer)[0][0].startswith("26 Jul 2024 <s>[system]")
    finally:
        tokenizer.chat_template = kept


def test_a_tokenizer_without_template_is_refused_with_the_way_out(tokenizer):
    chat.check_template(tokenizer, "m")
    chat.check_template(chat.Rendered(tokenizer), "m")
    kept = tokenizer.chat_template
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"the tokenizer of m has no chat template: .*chat_template\.jinja.*--chat"):
        chat.check_template(tokenizer, "m")
    tokenizer.chat_template = kept


def test_rendered_text_gets_no_special_tokens(tokenizer):
    assert chat.Rendered(tokenizer)("ab", add_special_tokens=True).input_ids == tokenizer("ab").input_ids[1:]


def write(folder, found):
    (folder / "task").mkdir(exist_ok=True)
    (folder / "task/train.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder


def test_conversations_are_rows_with_messages_or_pairs(tmp_path):
    pair = {"prompt": "a?", "answer": "b"}
    found = rows.load_conversations(write(tmp_path, [{"messages": TALK, "id": 3}, pair]), "task", "train")
    assert [[*own] for own in found] == [
        TALK, [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    ]  # fmt: skip
    renamed = write(tmp_path, [{"talk": TALK}])
    assert len(rows.load_conversations(renamed, "task", "train", columns={"messages": "talk"})) == 1
    with pytest.raises(ValueError, match=r"columns renames \['image'\]"):
        rows.load_conversations(renamed, "task", "train", columns={"image": "x"})
    with pytest.raises(ValueError, match="these look like conversations, for which there is --chat"):
        rows.load_rows(write(tmp_path, [{"messages": TALK}]), "task", "train")


@pytest.mark.parametrize("stored", ["parquet", "saved"])
def test_calls_of_tools_are_the_same_in_files_that_give_all_rows_the_same_keys(tmp_path, stored):
    from datasets import Dataset

    talks = []
    for name, arguments in (("weather", {"city": "Rome"}), ("add", {"a": 1, "b": [2, None]})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        talks.append([TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}, TALK[1], TALK[2]])
    data = Dataset.from_list([{"messages": talk} for talk in (*talks, TALK)])
    (tmp_path / "task").mkdir()
    if stored == "parquet":
        data.to_parquet(str(tmp_path / "task/train.parquet"))
    else:
        data.save_to_disk(str(tmp_path / "task/train"))
    found = rows.load_conversations(tmp_path, "task", "train")
    assert [[*own] for own in found] == [*talks, TALK]


def test_keys_that_are_null_are_those_that_are_not_there(tmp_path):
    nulls = [{**message, "tool_calls": None, "name": None} for message in TALK]
    (own,) = rows.load_conversations(write(tmp_path, [{"messages": nulls}]), "task", "train")
    assert [*own] == TALK
    bare = [TALK[1], {"role": "assistant", "content": None, "tool_calls": []}, TALK[1], TALK[2]]
    with pytest.raises(ValueError, match=r'row 0: every message needs .* "" where it only calls tools'):
        rows.load_conversations(write(tmp_path, [{"messages": bare}]), "task", "train")


def test_pairs_as_trl_names_them_are_told_their_columns(tmp_path):
    pair = write(tmp_path, [{"prompt": "one?", "completion": "two"}])
    with pytest.raises(ValueError, match=r"column 'answer' is missing, .* --suite-options columns answer=completion"):
        rows.load_conversations(pair, "task", "train")
    messages = [[{"role": role, "content": "one"}] for role in ("user", "assistant")]
    lists = write(tmp_path, [{"prompt": "a", "answer": "b"}, dict(zip(("prompt", "answer"), messages, strict=True))])
    with pytest.raises(ValueError, match="row 1: prompt and answer are lists: join them into one column messages"):
        rows.load_conversations(lists, "task", "train")


def test_all_bad_conversations_are_listed_by_row(tmp_path):
    bad = [
        {"messages": TALK},
        {"text": "x"},
        {"messages": "hello"},
        {"messages": [{"role": "user"}, TALK[2]]},
        {"messages": TALK[:2]},
        {"messages": TALK[2:3]},
        {"messages": [{"role": "human", "content": "x"}, TALK[2]]},
        {"messages": [TALK[0], {"role": "Assistant", "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}, TALK[2]]},  # of templates that know it
        {"messages": [TALK[2], TALK[1], TALK[2]]},
        {"messages": [{"role": "user", "content": "half \ud83d"}, TALK[2]]},
        {"messages": [TALK[1], {**TALK[2], "weight": 0.5}]},
        {"messages": [{**TALK[1], "weight": 1}, TALK[2]]},
        {"messages": [TALK[1], {**TALK[2], "weight": 0}]},
        {"messages": [{**TALK[2], "weight": 0}, TALK[1], {**TALK[2], "weight": True}]},
    ]
    with pytest.raises(ValueError, match="row 1: no messages") as told:
        rows.load_conversations(write(tmp_path, bad), "task", "train")
    for text in ("row 2: messages must be a list", "row 3: every message needs", "rows 4 and 5: the last message"):
        assert text in str(told.value)
    assert "row 6: a message has role 'human': write 'user', by which its template finds it" in str(told.value)
    assert "row 7: a message has role 'Assistant': write 'assistant'" in str(told.value)
    assert "row 8" not in str(told.value)
    assert "row 9: the first message is the assistant's, and answers nothing: begin with the user's" in str(told.value)
    assert "row 10: a message has half a surrogate pair" in str(told.value)
    assert "row 11: a message has weight 0.5, must be 1" in str(told.value)
    assert "row 12: a message of role 'user' has weight 1, but answers alone are trained" in str(told.value)
    assert "row 13: all answers have weight 0: leave the row out, or give one weight 1 (rows count" in str(told.value)
    assert "row 14" not in str(told.value)
