"""Writes golden/moe.safetensors: what mergekit-moe 0.1.5 makes of the mixtures of `FILES`, on tiny models.

    pip install torch==2.13.0 && pip install mergekit==0.1.5 accelerate && python make_moe.py

Names are those of ``MixtralForCausalLM``, ``Qwen2MoeForCausalLM`` and ``Qwen3MoeForCausalLM``, in memory.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
PROMPTS = [
    {"positive_prompts": ["t3 t4", "t5 t6 t7"], "negative_prompts": ["t8", "t12 t13 t3"]},
    {"positive_prompts": ["t9"], "residual_scale": 0.5},
    {"positive_prompts": ["t10 t11"]},
]
MODES = "hidden", "hidden_avg", "cheap_embed"
SHARED = {"positive_prompts": ["t4 t8"], "negative_prompts": ["t5"], "residual_scale": 0.25}
MORE = {"Qwen3": {"head_dim": 6}}  # not the width over the heads


def file_of(mode, folder, **more):
    """A file in mergekit-moe's format."""
    experts = [{"source_model": str(folder / name), **own} for name, own in zip("ABC", PROMPTS, strict=True)]
    return {"base_model": str(folder / "BASE"), "gate_mode": mode, "dtype": "float32", "experts": experts, **more}


def shared_by(folder, **more):
    """The shared expert of a file: B."""
    return {"shared_experts": [{"source_model": str(folder / "B"), **SHARED, **more}]}


def write_models(folder, kind="Llama", **more):
    """BASE, A, B and C in a folder, unrelated."""
    import transformers
    from make_recipes import WORDS, write_tokenizer

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=len(WORDS), rms_norm_eps=2e-5, bos_token_id=1, eos_token_id=2, initializer_range=0.5, **more,
    )  # fmt: skip
    for seed, name in enumerate(("BASE", "A", "B", "C")):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for path, leaf in model.named_parameters():
            if path.endswith("bias"):  # a new one is zero
                torch.nn.init.normal_(leaf)
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name, WORDS)


def main():
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    out = {}
    with tempfile.TemporaryDirectory() as place:
        for kind, modes in {"Llama": MODES, "Qwen2": MODES[:1], "Qwen3": MODES[:1]}.items():
            folder = Path(place) / kind
            folder.mkdir()
            write_models(folder, kind, **MORE.get(kind, {}))
            for mode in modes:
                more = shared_by(folder) if kind == "Qwen2" else {}
                (folder / "moe.yml").write_text(yaml.safe_dump(file_of(mode, folder, **more)))
                subprocess.run([sys.executable, "-m", "mergekit.scripts.moe", "moe.yml", mode], check=True, cwd=folder)
                found = AutoModelForCausalLM.from_pretrained(folder / mode, dtype="auto").state_dict()
                label = mode if kind == "Llama" else kind
                kept = mode == MODES[0]
                out |= {f"{label}/{k}": v.clone() for k, v in found.items() if kept or k.endswith("gate.weight")}
    save_file(out, HERE / "golden" / "moe.safetensors")


if __name__ == "__main__":
    main()
