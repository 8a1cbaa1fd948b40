"""What stands beside the weights: configurations and chat templates that differ, tokenizers merged by token."""

import importlib.util
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn.config import ModelStock, TaskArithmetic, WeightAverage
from smat_fn.folders import Part, merge_folders, merge_part, open_folder, plan, read_inputs, run
from smat_fn.folders.inputs.differing import differences
from smat_fn.folders.inputs.side_files import TOKENIZER, template_of
from smat_fn.folders.inputs.stacks import stack_of, stack_parts, stacked

_file = Path(__file__).parents[1] / "scripts/merge/subcommands/make_recipes.py"
_spec = importlib.util.spec_from_file_location("make_recipes", _file)
make_recipes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_recipes)
TA = TaskArithmetic(coef=0.5)


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    make_recipes.write_models(folder)
    for name in "ABC":
        (folder / name / "tokenizer_config.json").write_text((folder / "BASE/tokenizer_config.json").read_text())
    return folder


def change(folder, file="config.json", **fields):
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("model_type", "mistral", "another kind of model"),
        ("hidden_act", "gelu", "another activation"),
        ("num_attention_heads", 2, "other heads"),
        ("num_key_value_heads", 2, "other heads"),
    ],
)
def test_what_weights_do_not_show_is_an_error_until_it_is_decided(field, value, kind, models, tmp_path):
    change(models / "BASE", hidden_act="silu")
    change(models / "A", hidden_act="silu")
    change(models / "A", **{field: value})
    experts = {"A": models / "A"}
    with pytest.raises(ValueError, match=f"^expert 'A' has {kind} in config.json .{field} {value}, base's is"):
        plan(TA, models / "BASE", experts, tmp_path / "out")
    with pytest.raises(ValueError, match=f"has {kind} .* merge.py wa .* --out OUT --config-from base$"):
        read_inputs(models / "BASE", experts, [])  # of a search, which has no such option
    for whose, wanted in ("A", value), ("base", json.loads((models / "BASE/config.json").read_text())[field]):
        report = merge_folders(TA, models / "BASE", experts, tmp_path / whose, config_from=whose)
        assert json.loads((tmp_path / whose / "config.json").read_text())[field] == wanted
        assert [note for note in report.notes if kind in note]


@pytest.mark.parametrize(("field", "value"), [("rope_theta", 5e5), ("rms_norm_eps", 1e-5), ("eos_token_id", 7)])
def test_what_can_be_merged_in_spite_of_it_is_a_note(field, value, models, tmp_path):
    for name in "BASE", "A", "B":
        change(models / name, **{field: 2})
    change(models / "A", **{field: value})
    notes = plan(TA, models / "BASE", {"A": models / "A", "B": models / "B"}, tmp_path / "out").notes
    (note,) = [note for note in notes if field in note]
    assert note.startswith("expert 'A' has other ")
    assert note.endswith(f"{field} {value}, base's is 2")


def test_special_tokens_that_only_a_tokenizer_shows_are_a_note(models, tmp_path):
    change(models / "BASE", "tokenizer_config.json", eos_token={"content": "<s>"}, bos_token="<b>")
    for name in "A", "ADAPTER":
        change(models / name, "tokenizer_config.json", eos_token="<end>", bos_token="<b>")
    experts = {"A": models / "A", "lora": models / "ADAPTER"}
    told = "has other special tokens: eos_token '<end>' of its tokenizer, base's is '<s>'"
    notes = plan(TA, models / "BASE", experts, tmp_path / "out").notes
    assert [note for note in notes if "special" in note] == [f"expert 'A' {told}", f"expert 'lora' {told}"]
    for name, number in {"BASE": 1, "A": 2}.items():
        change(models / name, eos_token_id=number)
    notes = plan(TA, models / "BASE", experts, tmp_path / "out").notes
    assert [note for note in notes if "special" in note] == [
        "expert 'A' has other special tokens: eos_token_id 2, base's is 1",  # the same difference, told once
        f"expert 'lora' {told}",
    ]


def test_rotary_positions_are_compared_whatever_version_wrote_them(models, tmp_path):
    written = {  # by transformers 4 and 5
        "A": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}},
        "B": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        "C": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    }
    change(models / "BASE", rope_theta=1e4, rope_scaling=None)
    for name, fields in written.items():
        change(models / name, **fields)
    notes = plan(TA, models / "BASE", {name: models / name for name in "ABC"}, tmp_path / "out").notes
    assert [note for note in notes if "rope" in note] == [
        "expert 'B' has other positions: rope_theta 1000000.0, base's is 10000.0",
        "expert 'C' has other positions: rope_scaling.rope_type linear, base's is default",
    ]
    change(models / "BASE", rope_scaling={"type": "mrope"})
    notes = plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out").notes
    assert not [note for note in notes if "rope" in note]  # one name of the same
    change(models / "BASE", rope_scaling={"rope_type": "linear", "factor": 8.0})
    notes = plan(TA, models / "BASE", {"C": models / "C"}, tmp_path / "out").notes
    assert "expert 'C' has other positions: rope_scaling.factor 4.0, base's is 8.0" in notes


def test_positions_that_only_an_experts_configuration_names_are_compared_with_those_of_most_classes(models, tmp_path):
    base = json.loads((models / "BASE/config.json").read_text())
    rope = ("rope_theta", "rope_scaling", "rope_parameters")
    (models / "BASE/config.json").write_text(json.dumps({k: v for k, v in base.items() if k not in rope}))
    plain = {"rope_theta": 1e4, "rope_type": "default"}
    change(models / "A", rope_parameters=plain, sliding_window=None)
    change(models / "B", rope_parameters=None, rope_theta=1000000, rope_scaling=None, sliding_window=16)
    change(models / "C", rope_parameters=None, rope_scaling={"type": "linear", "factor": 8.0})
    experts = {name: models / name for name in "ABC"}
    wanted = [
        "expert 'B' has other positions: rope_theta 1000000, base's is 10000.0, sliding_window 16, base's is None",
        "expert 'C' has other positions: rope_scaling.rope_type linear, base's is default",
    ]
    for nothing in {}, {"rope_scaling": None}:
        change(models / "BASE", **nothing)
        notes = plan(TA, models / "BASE", experts, tmp_path / "out").notes
        assert [note for note in notes if "positions" in note] == wanted
    change(models / "BASE", use_sliding_window=False, sliding_window=32)  # as transformers 4 wrote Qwen2
    notes = plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out").notes
    assert not [note for note in notes if "positions" in note]
    layers = {"full_attention": plain, "sliding_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    change(models / "A", rope_parameters=layers)  # says more than a base with one kind of layers could
    notes = plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out").notes
    assert not [note for note in notes if "positions" in note]


def test_chat_templates_of_processors_are_read_and_replaced(models, tmp_path):
    places = {"chat_template.json": "A", "processor_config.json": "B"}
    for file, name in places.items():
        change(models / name, file, chat_template=f"{{{{ '{name}' }}}}")
        (models / name / "chat_template.jinja").write_text("{{ 'of the tokenizer alone' }}")
        assert template_of(models / name) == f"{{{{ '{name}' }}}}"
        merge_folders(TA, models / name, {"C": models / "C"}, tmp_path / name, chat_template="{{ 'new' }}")
        assert (tmp_path / name / "chat_template.jinja").read_text() == "{{ 'new' }}"
        assert template_of(tmp_path / name) == "{{ 'new' }}"
    assert not (tmp_path / "A/chat_template.json").exists()
    assert "chat_template" not in json.loads((tmp_path / "B/processor_config.json").read_text())
    notes = plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out").notes
    assert "expert 'A' has a chat template, base has none: the output has none" in notes
    merge_folders(TA, models / "B", {"A": models / "A"}, tmp_path / "from", tokenizer_from="A")
    assert template_of(tmp_path / "from") == "{{ 'A' }}"
    experts = {name: models / name for name in "AB"}
    merge_folders(TA, models / "BASE", experts, tmp_path / "auto", chat_template="auto")
    assert template_of(tmp_path / "auto") == "{{ 'A' }}"


def test_tokenizers_processors_and_code_that_the_output_lacks_are_notes(models, tmp_path):
    for file in (models / "BASE").glob("tokenizer*"):
        file.unlink()
    change(models / "A", "preprocessor_config.json", image_mean=[0.5])
    for name in "BASE", "A", "B":
        (models / name / "modeling_own.py").write_text(f"NAME = {name in ('BASE', 'B')}")
    notes = plan(TA, models / "BASE", {name: models / name for name in "AB"}, tmp_path / "out").notes
    without = "has a tokenizer, base has none: the output has none, copy one there"
    assert [note for note in notes if note.startswith("expert 'A'")] == [
        f"expert 'A' {without}",
        "expert 'A' has another modeling_own.py than base: the output has that of base",
        "expert 'A' has files that base lacks (preprocessor_config.json): the output lacks them, copy them there",
    ]
    assert [note for note in notes if note.startswith("expert 'B'")] == [f"expert 'B' {without}"]
    notes = plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", config_from="A").notes
    assert not [note for note in notes if "modeling_own" in note]


def test_folders_of_a_processor_come_along(models, tmp_path):
    own = {"qformer_tokenizer/tokenizer.json": "{}", "speaker_embeddings_path.json": '{"v2": 1}'}
    own |= {"speaker_embeddings/v2/one.npy": "voice", "speaker_embeddings/two.npy": "another"}
    for file, text in own.items():
        (models / "BASE" / file).parent.mkdir(parents=True, exist_ok=True)
        (models / "BASE" / file).write_text(text)
    merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")
    assert {file: (tmp_path / "out" / file).read_text() for file in own} == own


def test_weights_that_a_model_is_used_with_come_from_base(models, tmp_path):
    names = "spk_dict.pt", "colbert_linear.pt", "sparse_linear.pt", "adapter.eng.safetensors", "adapter.eng.bin"
    for name in names:
        (models / "BASE" / name).write_text("own")
        (models / "A" / name).write_text("own")
    (models / "A/sparse_linear.pt").write_text("two")  # as long
    (models / "A/adapter.fra.safetensors").write_text("own")
    report = merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in names} == dict.fromkeys(names, "own")
    assert report.notes == (
        "expert 'A' has files that base lacks (adapter.fra.safetensors): the output lacks them, copy them there",
        "expert 'A' has other weights than base in sparse_linear.pt: the output has those of base",
    )


def test_weights_that_an_output_loses_are_notes(models, tmp_path):
    kept = (
        *("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "scaler.pt", "pytorch_model.bin"),
        *("pytorch_model-00001-of-00002.bin", "consolidated.safetensors", "consolidated.00.pth", "model.gguf"),
        *("tf_model.h5", "flax_model.msgpack", "model.fp16.safetensors", "openvino_model.bin", "lit_model.pth"),
        *("open_clip_pytorch_model.bin", "original/consolidated.00.pth", "global_step9/mp_rank_00_model_states.pt"),
        *("onnx/model.onnx", "fisher.safetensors", "smat_theta_0.safetensors", "adam.safetensors"),
    )
    for folder in "BASE", "A":
        for name in kept:
            (models / folder / name).parent.mkdir(exist_ok=True)
            (models / folder / name).touch()
    experts = {"A": models / "A"}
    assert plan(TA, models / "BASE", experts, tmp_path / "out").notes == ()
    index = {"weight_map": dict.fromkeys(load_file(models / "A/model.safetensors"), "of-a-tool.safetensors")}
    (models / "A/model.safetensors").rename(models / "A/of-a-tool.safetensors")
    (models / "A/model.safetensors.index.json").write_text(json.dumps(index))
    assert plan(TA, models / "BASE", experts, tmp_path / "out").notes == ()
    (models / "BASE/vocoder.pt").touch()
    (models / "A/value_head.safetensors").touch()
    (models / "A/ema.ckpt").touch()
    told = "holds weights beside its model that are neither merged nor copied ({}): copy them to the output if it needs"
    wanted = f"base {told.format('vocoder.pt')}", f"expert 'A' {told.format('ema.ckpt, value_head.safetensors')}"
    assert plan(TA, models / "BASE", experts, tmp_path / "out").notes == tuple(f"{text} them" for text in wanted)
    notes = []
    read_inputs(models / "BASE", experts, notes)  # of a search
    assert notes == [f"{text} them" for text in wanted]


def test_chat_templates_and_generation_configs_that_differ_are_notes(models, tmp_path):
    change(models / "A", "generation_config.json", eos_token_id=[2, 5])
    change(models / "B", "generation_config.json", eos_token_id=2, _from_model_config=True)
    experts = {name: models / name for name in "AB"}
    notes = plan(TA, models / "BASE", experts, tmp_path / "out").notes
    told = "expert 'A' has a generation_config.json, base has none: the output has none"
    assert [note for note in notes if "generation" in note] == [told]
    assert told not in plan(TA, models / "BASE", experts, tmp_path / "out", config_from="A").notes
    for name in "AB":
        (models / name / "generation_config.json").unlink()
    for name in "BASE", "A":
        change(models / name, "generation_config.json", eos_token_id=2, top_p=0.9, transformers_version=name)
    change(models / "A", "generation_config.json", top_p=0.8)
    (models / "A/chat_template.jinja").write_text("{{ 'one' }}")
    experts = {name: models / name for name in "ABC"}
    notes = plan(TA, models / "BASE", experts, tmp_path / "out").notes
    assert "expert 'A' has a chat template, base has none: the output has none" in notes
    told = "expert 'A' has another generation_config.json than base (top_p): the output has that of base"
    assert told in notes
    assert told not in plan(TA, models / "BASE", experts, tmp_path / "out", config_from="A").notes
    change(models / "BASE", "tokenizer_config.json", chat_template=[{"name": "default", "template": "{{ 'two' }}"}])
    change(models / "A", "tokenizer_config.json", chat_template=[{"name": "tool", "template": "{{ 'tool' }}"}])
    notes = plan(TA, models / "BASE", experts, tmp_path / "out").notes
    assert "expert 'A' has other named chat templates than base (tool): the output has those of base" in notes
    for name in "BC":
        (models / name / "chat_template.jinja").write_text("{{ 'three' }}\n")
    made = tmp_path / "out"
    report = merge_folders(TA, models / "BASE", experts, made, chat_template="auto")
    assert not [note for note in report.notes if "chat" in note]
    assert (made / "chat_template.jinja").read_text() == "{{ 'three' }}"
    assert "chat_template" not in json.loads((made / "tokenizer_config.json").read_text())
    (tmp_path / "own.jinja").write_text("{{ 'own' }}")
    merge_folders(TA, models / "BASE", experts, tmp_path / "2", chat_template=str(tmp_path / "own.jinja"))
    assert (tmp_path / "2/chat_template.jinja").read_text() == "{{ 'own' }}"
    with pytest.raises(ValueError, match="chat_template is 'chatml': must be auto, a template in Jinja, or a file"):
        plan(TA, models / "BASE", experts, tmp_path / "3", chat_template="chatml")


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"eos_token_id": [{}]}),
        ("tokenizer_config.json", {"chat_template": [{"name": [], "template": "x"}]}),
        ("tokenizer.json", {"model": {"vocab": [[1]]}}),
    ],
)
def test_values_of_other_types_beside_the_weights_are_passed_over(file, values, models, tmp_path):
    (models / "A" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (models / "BASE" / file).write_text("{}")
    change(models / "BASE", file, **values)
    plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% for m in", "line 1: unexpected 'end of template'"),
        ("{{ 'a' }}\n{% endfor %}", "line 2: Encountered unknown tag 'endfor'"),
        ("{{ messages | nosuch }}", "line 1: No filter named 'nosuch'"),
        ("{% generation %}{{ 'a' }}", "line 1: .*endgeneration"),
    ],
)
def test_a_chat_template_that_is_not_jinja_is_an_error(text, why, models, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(text)
    for asked, named in {text: "which", str(file): "a file that"}.items():
        with pytest.raises(ValueError, match=rf"(?s)chat_template is .*, {named} is not valid Jinja \({why}") as raised:
            plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", chat_template=asked)
        assert repr(asked) in str(raised.value)
        assert str(raised.value).endswith("): correct it")
    file.write_bytes(b"{{ '\xff' }}")
    with pytest.raises(
        ValueError, match=r"chat_template is '.*own.jinja', a file that is not text in UTF-8 .*: correct"
    ):
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", chat_template=str(file))


def test_a_long_chat_template_is_named_by_its_begin(models, tmp_path):
    with pytest.raises(ValueError, match=r"chat_template is '\{% if x+\.\.\.', which is not valid Jinja") as raised:
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", chat_template="{% if x" + "x" * 5000)
    assert len(str(raised.value)) < 300


def test_tags_that_transformers_adds_to_jinja_are_taken(models, tmp_path):
    own = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", chat_template=own)
    assert template_of(tmp_path / "out") == own
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "out")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "t3"}], tokenize=False)
    assert said == '{"role": "user", "content": "t3"}'


def test_ids_of_tokens_follow_the_tokenizer(models, tmp_path):
    change(models / "BASE", bos_token_id=1, eos_token_id=[2, 5])
    change(models / "BASE", "generation_config.json", eos_token_id=2)
    experts = {"other": models / "B_OTHER_VOCABULARY"}
    report = merge_folders(TA, models / "BASE", experts, tmp_path / "out", tokenizer_from="other")
    assert not any("chat template" in note for note in report.notes)  # it comes with the tokenizer
    assert template_of(tmp_path / "out") == make_recipes.TEMPLATES["B_OTHER_VOCABULARY"]
    words = [*make_recipes.OTHER_WORDS, "<|im_end|>"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert [words[config["bos_token_id"]], words[config["eos_token_id"][0]]] == ["<s>", "</s>"]
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == words.index("</s>")
    assert config["vocab_size"] == len(words)
    made, base, own = (
        load_file(folder / "model.safetensors")["lm_head.weight"]
        for folder in (tmp_path / "out", models / "BASE", models / "B_OTHER_VOCABULARY")
    )
    row, here = words.index("t9"), make_recipes.WORDS.index("t9")
    assert torch.equal(made[row], base[here] + (own[row] - base[here]) * 0.5)
    assert torch.equal(made[words.index("n1")], own[words.index("n1")])  # base has no such token


@pytest.mark.parametrize("head", ["cls.predictions.bias", "vocab_projector.bias", "decoder.bias"])
def test_tables_of_segments_are_no_tokens_and_biases_of_heads_are(head, models, tmp_path):
    for name in "BASE", "B_OTHER_VOCABULARY":
        rows = json.loads((models / name / "config.json").read_text())["vocab_size"]
        (models / name / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": rows}))
        leaves = {"embeddings.word_embeddings.weight": torch.rand(rows, 4), head: torch.rand(rows)}
        save_file(
            {**leaves, "embeddings.token_type_embeddings.weight": torch.rand(2, 4)}, models / name / "model.safetensors"
        )
    experts = {"other": models / "B_OTHER_VOCABULARY"}
    merge_folders(WeightAverage(), models / "BASE", experts, tmp_path / "out", tokenizer_from="base")
    made, base, own = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", models / "BASE", experts["other"])
    )
    words = [*make_recipes.OTHER_WORDS, "<|im_end|>"]
    places = {token: i for i, token in enumerate(make_recipes.WORDS) if token in words}
    assert len(places) > 3
    for path in base:
        if "token_type" in path:
            assert torch.equal(made[path], own[path])
            continue
        assert made[path].shape == base[path].shape
        for token, i in places.items():
            assert torch.equal(made[path][i], own[path][words.index(token)])


def test_equal_tokenizers_leave_every_bit(models, tmp_path):
    merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "plain")
    merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "union", tokenizer_from="union")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "union")]
    assert weights[0] == weights[1]


def test_padding_rows_are_kept_where_all_models_have_as_many(models, tmp_path):
    def pad(name, rows):
        own = load_file(models / name / "model.safetensors")
        for path in "model.embed_tokens.weight", "lm_head.weight":
            own[path] = torch.cat([own[path], torch.full((rows, own[path].shape[1]), 7.0)])
        save_file(own, models / name / "model.safetensors", metadata={"format": "pt"})
        change(models / name, vocab_size=make_recipes.ROWS + rows)

    def merged(out, **options):
        merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / out, **options)
        made = load_file(tmp_path / out / "model.safetensors")
        assert json.loads((tmp_path / out / "config.json").read_text())["vocab_size"] == len(made["lm_head.weight"])
        return made

    plain = merged("plain")
    pad("A", 2)
    found = merged("one", tokenizer_from="base")
    assert all(torch.equal(leaf, found[path]) for path, leaf in plain.items())
    pad("BASE", 2)
    by_row, found = merged("by-row"), merged("both", tokenizer_from="base")
    assert all(torch.equal(leaf, found[path]) for path, leaf in by_row.items())
    assert len(merged("multiple", tokenizer_from="base", pad_to_multiple_of=5)["lm_head.weight"]) == 15


def test_an_expert_may_be_named_as_base_is(models, tmp_path):
    change(models / "BASE", rms_norm_eps=1e-5)
    change(models / "A", rms_norm_eps=3e-3)
    for name in "A", "base":
        experts = {name: models / "A", "B": models / "B_OTHER_VOCABULARY"}
        merge_folders(WeightAverage(), models / "BASE", experts, tmp_path / name, tokenizer_from="union")
    for file in "model.safetensors", "config.json":
        assert (tmp_path / "base" / file).read_bytes() == (tmp_path / "A" / file).read_bytes()


def test_an_expert_with_more_tokens_than_rows_gives_a_row_to_each(models, tmp_path):
    words = [*make_recipes.WORDS, "<x>", "<y>", "<z>"]  # three behind the last row of A
    make_recipes.write_tokenizer(models / "A", words)
    experts = {"A": models / "A", "B": models / "B"}
    told = "3 tokens, such as '<x>', have no row in any merged model: filled with 0"
    (tmp_path / "only").mkdir()
    make_recipes.write_tokenizer(tmp_path / "only", words)
    for out, source in {"name": "A", "folder": str(models / "A"), "other": str(tmp_path / "only")}.items():
        report = merge_folders(WeightAverage(), models / "BASE", experts, tmp_path / out, tokenizer_from=source)
        assert [note for note in report.notes if "tokens" in note and "numbers" not in note] == [told]
        made = load_file(tmp_path / out / "model.safetensors")
        plain = [load_file(folder / "model.safetensors") for folder in experts.values()]
        for path in "model.embed_tokens.weight", "lm_head.weight":
            assert torch.equal(made[path][:14], (plain[0][path] + plain[1][path]) / 2)
            assert torch.equal(made[path][14:], torch.zeros(3, make_recipes.WIDTH))
        assert json.loads((tmp_path / out / "config.json").read_text())["vocab_size"] == len(words)
        assert "<z>" in (tmp_path / out / "tokenizer.json").read_text()
    own = {"<x>": {"zero": True}, "<y>": {"model": "B", "id": 3}}
    report = merge_folders(WeightAverage(), models / "BASE", experts, tmp_path / "own", tokenizer_from="A", tokens=own)
    assert "the token '<z>' has no row in any merged model: filled with 0" in report.notes
    assert load_file(tmp_path / "own/model.safetensors")["lm_head.weight"][15].any()


def test_a_base_with_more_tokens_than_rows_gives_a_row_to_each(models, tmp_path):
    make_recipes.write_tokenizer(models / "BASE", [*make_recipes.WORDS, "<x>"])
    report = merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", tokenizer_from="base")
    assert len(load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]) == make_recipes.ROWS + 1
    assert "the token '<x>' has no row in any merged model: filled with 0" in report.notes
    with pytest.raises(ValueError, match="base has 1 tokens without a row, such as '<x>': a union needs a row for"):
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "2", tokenizer_from="union")


def test_a_union_notes_tokens_of_experts_without_a_row(models, tmp_path):
    make_recipes.write_tokenizer(models / "A", [*make_recipes.WORDS, "<x>", "<y>"])
    make_recipes.write_tokenizer(models / "B_OTHER_VOCABULARY", make_recipes.OTHER_WORDS, ["<|im_end|>", "<y>"])
    told = "no row in any model: left out of the output's tokenizer"
    for name, said in {
        "A": f"2 tokens, such as '<x>', have {told}",
        "B_OTHER_VOCABULARY": f"the token '<y>' has {told}",
    }.items():
        experts = {name: models / name}
        report = merge_folders(TA, models / "BASE", experts, tmp_path / name, tokenizer_from="union")
        assert [note for note in report.notes if "left out" in note] == [said]
        tokenizer = json.loads((tmp_path / name / "tokenizer.json").read_text())
        vocabulary = {*tokenizer["model"]["vocab"], *(token["content"] for token in tokenizer["added_tokens"])}
        rows = len(load_file(tmp_path / name / "model.safetensors")["lm_head.weight"])
        assert "<y>" not in vocabulary
        assert rows == len(vocabulary) == json.loads((tmp_path / name / "config.json").read_text())["vocab_size"]


def test_an_expert_without_a_tokenizer_is_not_its_source(models, tmp_path):
    for file in (models / "A").glob("tokenizer*"):
        file.unlink()
    experts = {"A": models / "A", "B": models / "B", "lora": models / "ADAPTER"}
    for name, folder in {"A": "A", "lora": "ADAPTER"}.items():
        told = f"tokenizer_from is '{name}', but .*{folder} has no tokenizer: give base, union, or an expert or a"
        for rows in "base", "by-row":
            with pytest.raises(ValueError, match=told):
                plan(TA, models / "BASE", experts, tmp_path / "out", tokenizer_from=name, token_rows=rows)
    for source in "base", "B", "union":  # A then has base's
        plan(TA, models / "BASE", experts, tmp_path / "out", tokenizer_from=source)


def test_an_expert_that_cannot_be_opened_is_one_error_where_its_files_are_asked_for_too(models, tmp_path):
    change(models / "ADAPTER", "adapter_config.json", peft_type="VERA")
    change(models / "ADAPTER", "tokenizer_config.json")
    for asked in {"tokenizer_from": "lora"}, {"config_from": "lora"}:
        with pytest.raises(ValueError, match=r"^expert 'lora': .*VERA") as error:
            plan(TA, models / "BASE", {"lora": models / "ADAPTER"}, tmp_path / "out", **asked)
        assert "lora has no" not in str(error.value)


def test_a_tokenizer_that_transformers_refuses_is_one_error(models, tmp_path):
    change(models / "BASE", head_dim=7)  # seven coordinates cannot be rotated in pairs
    with pytest.raises(ValueError, match=r"the tokenizer of .*BASE cannot be read .*even rotary dimension"):
        plan(TA, models / "BASE", {"B": models / "B_OTHER_VOCABULARY"}, tmp_path / "out", tokenizer_from="union")


def test_a_merge_that_changes_nothing_says_so(models, tmp_path):
    told = "no parameter differs from base's"
    same = merge_folders(TA, models / "BASE", {"one": models / "BASE"}, tmp_path / "same")
    other = merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "other")
    assert told in same.notes
    assert told not in other.notes


def test_rows_by_token_and_by_their_number_exclude_each_other(models, tmp_path):
    told = "vocabulary 'base-rows' is by row, tokenizer_from merges by token: leave one of them out"
    with pytest.raises(ValueError, match=told):
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path, vocabulary="base-rows", tokenizer_from="base")


def test_tokenizers_that_cannot_decide_are_refused_by_name(models, tmp_path):
    experts = {"A": models / "A", "other": models / "B_OTHER_VOCABULARY"}
    with pytest.raises(ValueError, match=r"tokenizer_from is '.*ADAPTER': must be base, union, an expert's name or a"):
        plan(TA, models / "BASE", experts, tmp_path / "out", tokenizer_from=str(models / "ADAPTER"))
    (models / "other").mkdir()
    with pytest.raises(ValueError, match=r"config_from is '.*other': .*other has no config.json"):
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out", config_from=str(models / "other"))
    (models / "A/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"expert 'A': the tokenizer of .*A cannot be read"):
        plan(TA, models / "BASE", experts, tmp_path / "out", tokenizer_from="union")
    (models / "BASE/tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"base: .*BASE has no tokenizer"):
        plan(TA, models / "BASE", {"other": experts["other"]}, tmp_path / "out", tokenizer_from="union")


def test_a_stack_is_written_as_it_is_read(models):
    assert stack_parts(Path("a/b")) == stack_parts(Path("A[0:2]x")) == stack_parts(Path("A[0:2]+B")) == []
    path = Path(f"{models / 'A'}[0:2]+own/er@v1[1:3]")
    assert [(str(part.path), *part[1:3]) for part in stack_parts(path)] == [
        (str(models / "A"), 0, 2),
        ("own/er@v1", 1, 3),
    ]
    assert stack_of(stack_parts(path)) == path
    path = Path(f"{models / 'A'}[0:2]~+{models / 'B'}[1:4]+{models / 'B'}[4:4]~")
    assert [part.absent for part in stack_parts(path)] == [True, False, True]
    assert stack_of(stack_parts(path)) == path
    opened = {name: open_folder(name, models / name) for name in "AB"}
    made = stacked("x", [(opened["A"], 0, 2), (opened["B"], 1, 4), (opened["B"], 4, 4)], [True, False, True])
    assert {name for name in made.leaves if "layers" in name and name in made.absent} == {
        name for name in made.leaves if ".0." in name or ".1." in name
    }
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < made.absent
    for config, text in (TA, "ta needs all experts in every layer"), (ModelStock(), "there are 0 experts"):
        with pytest.raises(ValueError, match=text):
            plan(config, Path(f"{models / 'A'}[0:4]"), {"x": path.with_name("B[0:4]~")}, models / "out")


def test_parts_of_a_stack_with_one_name_are_all_compared(models, tmp_path):
    other = shutil.copytree(models / "B", tmp_path / "run2/A")
    change(models / "A", rms_norm_eps=1e-6)
    change(other, rms_norm_eps=1e-5)
    stack = Path(f"{models / 'A'}[0:2]+{other}[2:4]")
    for base, name in (stack, "A"), (models / "A", "x"):
        notes = plan(TA, base, {name: stack}, tmp_path / "out").notes
        assert "expert 'run2/A' has other norms: rms_norm_eps 1e-05, base's is 1e-06" in notes


def test_stacks_that_do_not_fit_are_refused_by_name(models, tmp_path):
    opened = {name: open_folder(name, models / name) for name in ("A", "B", "B_OTHER_VOCABULARY")}
    with pytest.raises(ValueError, match=r"x: .*A has layers \[0:4\], not \[3:9\]; x: .*B has .* not \[2:2\]"):
        stacked("x", [(opened["A"], 3, 9), (opened["B"], 2, 2), (opened["B"], 4, 4)])
    with pytest.raises(ValueError, match=r"x: parameter 'lm_head.weight' is \(16, 6\) in .*, \(14, 6\) in"):
        stacked("x", [(opened["A"], 0, 2), (opened["B_OTHER_VOCABULARY"], 0, 2)])
    with pytest.raises(ValueError, match=r"parameter 'lm_head.weight' is in .*A or .*B alone"):
        stacked("x", [(opened["A"], 0, 2), (opened["B"].without("lm_head.weight"), 0, 2)])
    change(models / "A", layer_types=list("abc"))
    with pytest.raises(ValueError, match=r"x: layer_types in config.json is not a list of one entry a layer in all "):
        stacked("x", [(opened["A"], 0, 2)])
    change(models / "A", layer_types=list("abcd"))
    change(models / "B", layer_types=list("efgh"))
    assert stacked("x", [(opened["A"], 1, 3), (opened["B"], 0, 1)]).config == {
        "num_hidden_layers": 3,
        "layer_types": ["b", "c", "e"],
    }
    (models / "A/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="has none of num_hidden_layers, n_layer"):
        stacked("x", [(opened["A"], 0, 2)])
    two = {"encoder.layer.0.w": torch.ones(2), "decoder.layer.0.w": torch.ones(2)}
    (tmp_path / "two").mkdir()
    save_file(two, tmp_path / "two/model.safetensors")
    with pytest.raises(ValueError, match="numbered layers in several places"):
        plan(WeightAverage(), Path(f"{tmp_path / 'two'}[0:1]"), {"x": models / "A"}, tmp_path / "out")


def test_heads_of_experts_are_kept_beside_the_merged_trunk(models, tmp_path):
    trees = {name: load_file(models / name / "model.safetensors") for name in ("BASE", "A", "B")}
    trees["BASE"]["score.weight"] = torch.ones(2, 6)
    save_file(trees["BASE"], models / "BASE/model.safetensors", metadata={"format": "pt"})
    for name, labels in (("A", 2), ("B", 5)):  # A's head has base's shape
        del trees[name]["lm_head.weight"]
        trees[name] |= {
            "score.weight": torch.full((labels, 6), float(labels)),
            "score.extra.0.weight": torch.ones(labels),
        }
        save_file(trees[name], models / name / "model.safetensors", metadata={"format": "pt"})
        change(models / name, num_labels=labels)
    experts = {name: models / name for name in "AB"}
    with pytest.raises(ValueError, match=r"'score.weight'"):
        plan(TA, models / "BASE", experts, tmp_path / "out")
    made = tmp_path / "out"
    for name in ("..", "../A", "a/b"):  # a manifest may name a task so
        with pytest.raises(ValueError, match=rf"expert '{name}': `heads='keep'` writes a file of its name"):
            merge_folders(TA, models / "BASE", {name: models / "A"}, made, heads="keep")
    assert not made.exists()
    report = merge_folders(TA, models / "BASE", experts, made, heads="keep")
    found = load_file(made / "model.safetensors")
    assert found.keys() == trees["BASE"].keys()
    for path, leaf in found.items():
        if path == "score.weight":
            assert torch.equal(leaf, trees["BASE"][path])
            continue
        both = [trees[name].get(path, trees["BASE"][path]) - trees["BASE"][path] for name in "AB"]
        assert torch.equal(leaf, trees["BASE"][path] + (both[0] + both[1]) * 0.5)
    for name, labels in (("A", 2), ("B", 5)):
        head = load_file(made / f"heads/{name}.safetensors")
        assert {path: tuple(leaf.shape) for path, leaf in head.items()} == {
            "score.weight": (labels, 6),
            "score.extra.0.weight": (labels,),
        }
        assert torch.equal(head["score.weight"], trees[name]["score.weight"])
        assert json.loads((made / f"heads/{name}.json").read_text())["num_labels"] == labels
    assert sum("is kept as heads/" in note for note in report.notes) == 2
    assert {"heads/A.safetensors", "heads/B.json"} <= json.loads((made / "manifest.json").read_text())["files"].keys()
    longer = {f"lm.{path}" if not path.startswith("score") else path: leaf for path, leaf in trees["B"].items()}
    save_file(longer, models / "B/model.safetensors", metadata={"format": "pt"})
    merge_folders(TA, models / "BASE", experts, tmp_path / "longer", heads="keep")
    again = load_file(tmp_path / "longer/model.safetensors")
    assert again.keys() == found.keys()
    assert all(again[path].equal(leaf) for path, leaf in found.items())


def test_configurations_inside_the_configuration_are_compared_too(models, tmp_path):
    inner = {"model_type": "llama", "hidden_act": "silu", "rope_theta": 1e4, "hidden_dropout": 0.0}
    change(models / "BASE", text_config=inner, logits_scaling=1.0, pretraining_tp=1, layer_types=["full"] * 4)
    others = {"rope_theta": 1e6, "hidden_dropout": 0.1, "softcapping": 3.0}
    change(models / "A", text_config=inner | others, logits_scaling=8.0, pretraining_tp=2, layer_types=["full"] * 5)
    (first, second) = plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out").notes
    assert first == "expert 'A' has other positions: text_config.rope_theta 1000000.0, base's is 10000.0"
    assert second == "expert 'A' has other settings: logits_scaling 8.0, base's is 1.0"
    change(models / "A", text_config=inner | {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match=r"another activation in config.json .text_config.hidden_act gelu, base's is"):
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")
    change(models / "BASE", decoder=inner)
    change(models / "A", text_config=inner, decoder=inner | {"hidden_act": "gelu", "return_dict": True})
    with pytest.raises(ValueError, match=r"another activation in config.json .decoder.hidden_act gelu, base's is silu"):
        plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"model_type": "qwen2_vl"}, {"model_type": "qwen2_vl_vision"}),
        ({"model_type": "Glm4vMoe_text"}, {"model_type": "glm4v_moe_text"}),
        ({"model_type": ""}, {"model_type": "got_ocr2_vision"}),
        ({}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"}}),
    ],
)
def test_parts_that_transformers_4_names_otherwise_are_the_same(old, new, models, tmp_path):
    for base, expert in (old, new), (new, old):
        for folder, kind, inner in ("BASE", "lfm2-vl", base), ("A", "lfm2_vl", expert):
            change(models / folder, model_type=kind, vision_config={"depth": 1} | inner)
        assert plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out").notes == ()
    for kind in "qwen3_vl", "qwen2_vl_moe":
        change(models / "BASE", vision_config={"model_type": "qwen2_vl_vision"})
        change(models / "A", vision_config={"model_type": kind})
        with pytest.raises(ValueError, match=f"another kind of model .* .vision_config.model_type {kind}, base's is"):
            plan(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")


@pytest.mark.slow
def test_a_configuration_with_its_defaults_is_the_one_without_them_for_every_kind_of_model(tmp_path):
    CONFIG_MAPPING = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    found, tried = {}, 0
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]()
            written = {
                name: config.to_json_string(use_diff=less) for name, less in {"short": True, "long": False}.items()
            }
        except Exception:  # not all have defaults that fit, or the libraries that they need
            continue
        tried += 1
        for name, text in written.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(text)
        for base, expert in (("short", "long"), ("long", "short")):
            said = differences(tmp_path / base, {"x": tmp_path / expert}, chosen=False, template=False)
            if said != ([], []):
                found[kind, base] = said
    assert found == {}
    assert tried > 300


def test_labels_in_another_order_are_an_error_and_other_labels_a_note(models, tmp_path):
    change(models / "BASE", id2label={"0": "bad", "1": "good"})
    change(models / "A", id2label={"0": "good", "1": "bad"})
    change(models / "B", id2label={"0": "no", "1": "yes"})
    experts = {name: models / name for name in "AB"}
    with pytest.raises(ValueError, match="'A' has labels in another order"):
        plan(TA, models / "BASE", experts, tmp_path / "out")
    notes = plan(TA, models / "BASE", experts, tmp_path / "out", config_from="base").notes
    assert [note.partition(":")[0] for note in notes] == [
        "expert 'A' has labels in another order",
        "expert 'B' has other labels",
    ]


@pytest.mark.parametrize("given", [None, {"0": "LABEL_0", "1": "LABEL_1"}], ids=["none", "generic"])
def test_labels_that_base_does_not_name_are_compared_among_experts(given, models, tmp_path):
    if given is not None:
        change(models / "BASE", id2label=given)
    change(models / "A", id2label={"0": "bad", "1": "good"})
    change(models / "B", id2label={"1": "bad", "0": "good"})
    change(models / "C", id2label={"1": "good", "0": "bad"})
    told = (
        r"expert 'B' has labels in another order in config.json than expert 'A' \(good, bad and bad, good\), which "
        "their weights do not show: merge models of one configuration, or say whose"
    )
    with pytest.raises(ValueError, match=told):
        plan(TA, models / "BASE", {name: models / name for name in "ABC"}, tmp_path / "out")
    plan(TA, models / "BASE", {name: models / name for name in "ABC"}, tmp_path / "out", config_from="A")
    notes = plan(TA, models / "BASE", {name: models / name for name in "AC"}, tmp_path / "out").notes
    assert [note.partition(":")[0] for note in notes] == ["expert 'A' has other labels", "expert 'C' has other labels"]
    change(models / "BASE", label_names=["x", "y"])  # of timm
    change(models / "C", label_names=["y", "x"])
    with pytest.raises(ValueError, match=r"expert 'C' has labels in another order in config.json .label_names"):
        plan(TA, models / "BASE", {"C": models / "C"}, tmp_path / "out")


FILES = (  # one at least for each pattern
    *("tokenizer.txt", "special_tokens_map.json", "added_tokens.json", "vocab.bpe", "merges.txt", "spiece.model"),
    *("qwen.tiktoken", "chat_template.txt", "additional_chat_templates/tools.jinja", "source.spm", "tekken.json"),
    *("normalizer.json", "bpe.codes", "dict.txt", "emoji.json", "byte_maps.json", "entity_vocab.json"),
    *("target_vocab.json", "word_shape.json", "own.tokenizer", "custom_generate/generate.py"),
)


def test_every_file_of_a_tokenizer_and_a_models_own_decoding_come_along(models, tmp_path):
    assert [own for own in (*TOKENIZER, "custom_generate/*") if not any(fnmatch(file, own) for file in FILES)] == []
    for file in FILES:
        (models / "BASE" / file).parent.mkdir(exist_ok=True)
        (models / "BASE" / file).write_text("{}")
    merge_folders(TA, models / "BASE", {"A": models / "A"}, tmp_path / "out")
    out = tmp_path / "out"
    assert {file: (out / file).read_text() for file in FILES if (out / file).exists()} == dict.fromkeys(FILES, "{}")


def test_the_configuration_names_the_dtype_of_the_weights(models, tmp_path):
    for given, named in (({}, ["torch_dtype"]), ({"dtype": "float32"}, ["dtype", "torch_dtype"])):
        change(models / "BASE", **given)
        out = tmp_path / "_".join(named)
        merge_folders(TA, models / "BASE", {"A": models / "A"}, out, out_dtype="bfloat16")
        config = json.loads((out / "config.json").read_text())
        assert {name: config[name] for name in config if "dtype" in name} == dict.fromkeys(named, "bfloat16")


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"stack": ("A", 0, 2, "B", 2, 4)}, {"stack": ("A", 0, 2, "B", 0, 2)}),
        ({"stack": ("A", 0, 1, "B", 1, 2, "A", 2, 4)}, {"stack": ("A", 0, 1, "B", 1, 2, "B", 2, 4)}),
        ({"tokenizer_from": "base"}, {"tokenizer_from": "base", "token_rows": "mean"}),
        ({"tokens": {"t3": {"zero": True, "force": True}}}, {"tokens": {"t3": {"model": "x", "force": True}}}),
    ],
    ids=["layers", "models", "mean", "tokens"],
)
def test_a_merge_of_other_layers_or_rows_does_not_resume_an_unfinished_one(
    before, after, parts, models, tmp_path, monkeypatch
):
    def merge(out, *, stack=("A", 0, 4), **options):
        triples = zip(stack[::3], stack[1::3], stack[2::3], strict=True)
        expert = Path("+".join(f"{models / name}[{start}:{stop}]" for name, start, stop in triples))
        options |= {"tokenizer_from": "base"} if "tokens" in options else {}
        inputs = TA, models / "BASE", {"x": expert, "other": models / "B_OTHER_VOCABULARY"}, tmp_path / out
        options |= {"vocabulary": "base-rows"} if "tokenizer_from" not in options else {}
        return merge_part(*inputs, Part(1, 1), **options) if parts else merge_folders(*inputs, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge("out", **before)
    merge("whole", **after)
    if parts:
        with pytest.raises(ValueError, match=r"part 1/1 differs from part 1/1 in (layers of stacks|token_rows|tokens)"):
            merge("out", **after)
        merge("out", **before)
        return
    merge("out", **after)
    made, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(leaf, whole[path]) for path, leaf in made.items())


def test_a_merge_by_token_begins_again_where_an_expert_has_another_tokenizer(models, tmp_path, monkeypatch):
    def merge(out):
        experts = {"A": models / "A", "other": models / "B_OTHER_VOCABULARY"}
        return merge_folders(TA, models / "BASE", experts, tmp_path / out, tokenizer_from="base")

    with monkeypatch.context() as patch:
        patch.setattr(run, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge("out")
    file = models / "B_OTHER_VOCABULARY/tokenizer.json"
    facts = json.loads(file.read_text())
    first, second, *_ = facts["model"]["vocab"]
    vocab = facts["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    facts["added_tokens"] = [own | {"id": vocab.get(own["content"], own["id"])} for own in facts["added_tokens"]]
    file.write_text(json.dumps(facts))
    assert file in merge("whole").inputs["expert 'other'"]
    merge("out")
    made, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(leaf, whole[path]) for path, leaf in made.items())
