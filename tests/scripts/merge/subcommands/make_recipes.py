"""Writes golden/recipes.safetensors: what mergekit 0.1.5 makes of the recipes in golden/recipes.yml, on tiny models.

Beside it golden/tokens.json holds the tokenizers that it made, as tokens by id, and the chat templates, and
golden/templates.json what its own chat templates make of conversations.

    pip install torch==2.13.0 && pip install mergekit==0.1.5 && python make_recipes.py

The models are those of `write_models`, four layers, with task vectors that have nothing to do with each other. The
masks of DARE and DELLA are not mergekit's: `torch.bernoulli` is replaced by the fields of ``smat_fn.random`` that the
same expert, leaf and coordinate has here under seed 0, so that the outputs can be compared.
Of ``dtype: bfloat16`` the output is rounded to it, as here, while mergekit would add up in it.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent / "golden"
WIDTH, INNER, ROWS, LAYERS = 6, 10, 14, 4
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}
LAYER = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
ROUND = {"model.embed_tokens.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (ROWS, WIDTH)}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": ROWS,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


WORDS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, ROWS))]
OTHER_WORDS = ["<unk>", "</s>", "<s>", *(f"t{i}" for i in range(13, 3, -1) if i != 6), "n0", "n1", "n2"]
TEMPLATES = {"A": "{{ 'a' }}", "B": "{{ 'b' }}", "C": "{{ 'c' }}", "B_OTHER_VOCABULARY": "{{ 'a' }}"}


def write_tokenizer(folder, words, special=(), template=None):
    """A tokenizer of whole words, with ``special`` ones behind them."""
    ids = {word: i for i, word in enumerate([*words, *special])}
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [word for word in ids if word[0] == "<"]
    made = {
        "version": "1.0",
        "added_tokens": [{"id": ids[word], "content": word, **marks} for word in added],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {word: ids[word] for word in words}, "unk_token": "<unk>"},
    }
    made |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(made))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    config |= {"eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_models(folder):
    """BASE, A, B, C, ADAPTER, a LoRA adapter of rank 2, and B_OTHER_VOCABULARY, in a folder."""
    generator = torch.Generator().manual_seed(11)

    def leaves(scale):
        return {path: scale * torch.randn(shape, generator=generator) for path, shape in (LAYER | ROUND).items()}

    base = leaves(1.0)
    models = {"BASE": base, **{name: {p: base[p] + d for p, d in leaves(0.3).items()} for name in "ABC"}}
    for name, own in models.items():
        (folder / name).mkdir()
        save_file(own, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(CONFIG))
        write_tokenizer(folder / name, WORDS, template=TEMPLATES.get(name))
    (folder / "ADAPTER").mkdir()
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    pair = {f"{name}.lora_A.weight": (2, WIDTH), f"{name}.lora_B.weight": (WIDTH, 2)}
    adapter = {path: torch.randn(shape, generator=generator) for path, shape in pair.items()}
    save_file(adapter, folder / "ADAPTER" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "ADAPTER" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "BASE"}))
    other, rows = folder / "B_OTHER_VOCABULARY", (len(OTHER_WORDS) + 1, WIDTH)
    other.mkdir()
    own = {path: torch.randn(rows, generator=generator) for path in ROUND if len(ROUND[path]) == 2}
    save_file(models["B"] | own, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": len(OTHER_WORDS) + 1}))
    write_tokenizer(other, OTHER_WORDS, ["<|im_end|>"], TEMPLATES["B_OTHER_VOCABULARY"])


def at(setting, folder):
    """A recipe with its models in a folder."""
    if isinstance(setting, dict):
        places = {"model", "base_model"}
        places |= {key for key in ("tokenizer_source", "source") if setting.get(key) not in ("base", "union")}
        return {
            key: "+".join(str(folder / part) for part in value.split("+"))
            if key in places and isinstance(value, str)
            else at(value, folder)
            for key, value in setting.items()
        }
    return [at(entry, folder) for entry in setting] if isinstance(setting, list) else setting


def fields_of(name, path, count):
    """The fields of an expert's leaf under seed 0."""
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from smat_fn.merge.parts.chunks import fields_of, mask_keys
    from smat_fn.scripts.merge.experts.inputs import mask_key

    ((field,),) = fields_of(mask_keys(mask_key(0), [name], [path]), [(0, 0, count)], torch.device("cpu"))
    return field


def draw_alike():
    """Have mergekit keep what is kept here."""
    from mergekit import sparsify
    from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge as Merge
    from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask as Task

    from_sparsify, merge, execute, now = sparsify.sparsify, Merge.merge_group, Task.execute, {}

    def executed(self, *args, **kwargs):
        now["path"] = self.output_weight.name
        return execute(self, *args, **kwargs)

    def merged(self, group, /, **parameters):
        now["names"] = [Path(str(entry.id.model.path)).name for entry in group.non_base]
        return merge(self, group, **parameters)

    def sparse(*args, **kwargs):
        now["name"] = now["names"].pop(0)
        return from_sparsify(*args, **kwargs)

    def bernoulli(p, *args, **kwargs):
        fields = fields_of(now["name"], now["path"], p.numel()).view(p.shape)
        return (fields >= ((1 - p.double()) * 65536).round()).to(p.dtype)

    Task.execute, Merge.merge_group, torch.bernoulli = executed, merged, bernoulli
    sys.modules[Merge.__module__].sparsify = sparse


CONVERSATIONS = (
    ("system", "Be brief. "), ("user", " Hi\nthere\n"), ("assistant", "Hello. "), ("user", "Why?"), ("assistant", "é"),
)  # fmt: skip


def rendered():
    """Conversations rendered by mergekit's chat templates, by name; None for an error."""
    from importlib.resources import files

    from mergekit._data import chat_templates
    from transformers.utils.chat_template_utils import render_jinja_template

    found = {}
    for name in "chatml", "llama3", "alpaca", "mistral":
        text = files(chat_templates).joinpath(f"{name}.jinja").read_text()
        for start, stop in (0, 4), (0, 5), (1, 2), (1, 4), (0, 1), (2, 4):
            messages = [{"role": role, "content": content} for role, content in CONVERSATIONS[start:stop]]
            for prompt in False, True:
                asked = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
                try:
                    made = render_jinja_template([messages], chat_template=text, **asked)[0][0]
                except Exception:
                    made = None
                found.setdefault(name, []).append({"messages": messages, "prompt": prompt, "text": made})
    return found


def main():
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions
    from transformers import AutoTokenizer

    draw_alike()
    out, options, tokens = {}, {"copy_tokenizer": False, "write_model_card": False}, {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_models(folder)
        options["lora_merge_cache"] = str(folder / "cache")
        for name, recipe in yaml.safe_load((HERE / "recipes.yml").read_text()).items():
            if recipe["dtype"] == "bfloat16":
                recipe |= {"dtype": "float32", "out_dtype": "bfloat16"}
            config = MergeConfiguration.model_validate(at(recipe, folder))
            run_merge(config, str(folder / name), MergeOptions(**options))
            out |= {f"{name}/{path}": leaf for path, leaf in load_file(folder / name / "model.safetensors").items()}
            if (folder / name / "tokenizer.json").exists():
                tokenizer = AutoTokenizer.from_pretrained(folder / name)
                tokens[name] = {"ids": tokenizer.get_vocab(), "chat_template": tokenizer.chat_template}
    (HERE / "templates.json").write_text(json.dumps(rendered(), indent=1, ensure_ascii=False) + "\n")
    save_file(out, HERE / "recipes.safetensors")
    (HERE / "tokens.json").write_text(json.dumps(tokens, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
