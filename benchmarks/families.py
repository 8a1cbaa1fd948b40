"""Families of ``transformers``, tiny and with random weights: trained, merged, published, and loaded by peft.

`python -m benchmarks families` writes docs/families.md from what it finds.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from smat_fn import checkpoint, optim, random
from smat_fn.config import TaskArithmetic
from smat_fn.folders import extract_lora, merge_folders
from smat_fn.mat import finetune, smat
from smat_fn.models import clip, encoder, image_classifier, language
from smat_fn.models.packing import texts
from smat_fn.scripts.merge.subcommands.exporting import export
from smat_fn.types import Batch, Params

VOCABULARY, IMAGE = 64, 32
IDS = torch.arange(24).reshape(2, 12) % 40 + 5
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ENCODER = {name: value for name, value in _TEXT.items() if "key_value" not in name} | {"type_vocab_size": 2}
_DEBERTA = {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
_T5 = {
    **{name: _TEXT[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")},
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
_BART = {
    **{name: _TEXT[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")},
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 2},
    "forced_eos_token_id": 2,
}
_IMAGE = {
    **{"image_size": IMAGE, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4},
}
_SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_CONVNEXT = {"num_channels": 3, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_PVT = {
    "image_size": IMAGE,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
}
_TOWERS = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "projection_dim": 32,
}


class Family(NamedTuple):
    """A family: how the library loads it, and a tiny configuration."""

    kind: str  # causal, seq2seq, encoder, images, towers
    config: Mapping[str, Any]
    auto: str = ""  # class that writes the base; that of the kind if it is empty
    train_layers: int | None = None  # of encoders


AUTO = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModel",
    "images": "AutoModelForImageClassification",
    "towers": "AutoModel",
}
_ALIKE: dict[str, tuple[str, Mapping[str, Any]]] = {  # names of one kind and configuration
    "llama mistral qwen2 phi phi3 olmo2 granite smollm3 stablelm cohere starcoder2 gpt_neox falcon": ("causal", _TEXT),
    "nemotron": ("causal", _TEXT),
    "qwen3 gemma2 gemma3_text glm": ("causal", _TEXT | _HEADS),
    "mixtral olmoe": ("causal", _TEXT | _EXPERTS),
    "qwen3_moe gpt_oss": ("causal", _TEXT | _HEADS | _EXPERTS),
    "t5 mt5": ("seq2seq", _T5),
    "bart pegasus mbart m2m_100 plbart": ("seq2seq", _BART),
    "bert roberta mpnet": ("encoder", _ENCODER),
    "vit beit dinov2": ("images", _IMAGE),
    "swin swinv2": ("images", _SWIN),
    "convnext convnextv2": ("images", _CONVNEXT),
    "pvt_v2": ("images", _PVT),
    "clip siglip": ("towers", {}),
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES: dict[str, Family] = {
    **{name: Family(*own) for names, own in _ALIKE.items() for name in names.split()},
    "opt": Family("causal", {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": Family("causal", _GPT2),
    "gpt_bigcode": Family("causal", _GPT2),
    "gptj": Family("causal", {**_GPT2, "rotary_dim": 4}),
    "codegen": Family("causal", {**_GPT2, "rotary_dim": 4}),
    "mpt": Family("causal", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "bloom": Family("causal", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen2_moe": Family("causal", {**_TEXT, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "bert (a masked language model, the top layer)": Family("encoder", _ENCODER, "AutoModelForMaskedLM", 1),
    "distilbert": Family("encoder", _DISTILBERT),
    "electra": Family("encoder", {**_ENCODER, "embedding_size": 32}),
    "albert": Family("encoder", {**_ENCODER, "embedding_size": 16}),
    "deberta-v2 (the top layer)": Family("encoder", _DEBERTA, "", 1),
    "modernbert (the top layer)": Family("encoder", _ENCODER, "", 1),
    "eurobert (the top layer)": Family("encoder", _TEXT, "", 1),
    "vit (backbone alone)": Family("images", _IMAGE, "AutoModel"),
    "deit": Family("images", _IMAGE | {"architectures": ["DeiTForImageClassification"]}),
    "swin (backbone alone)": Family("images", _SWIN, "AutoModel"),
    "dinov2 (backbone alone)": Family("images", _IMAGE, "AutoModel"),
    "dinov3_vit (backbone alone)": Family("images", _IMAGE, "AutoModel"),
}


PAGE = """# Model families

The commands are tested on these families; others may work: `train.py ... --dry-run` loads a model and prints the
parameters that could not be exported. For each line `transformers` saves a tiny model with random weights. This library
loads it, trains an FT and a SMAT expert for two steps, and merges them by task arithmetic. After `merge.py export`,
loading the model gives bit-identical weights. `merge.py extract-lora` extracts an adapter of full rank; after peft
merges it, its weights equal the exported ones. Before that, base and adapter together give the outputs of the exported
model, unless an adapted weight is shared.

- "Trained tensors": parameter tensors of the class in the second column.
- "Factors": matrices with low-rank factors.
- "Whole": changed parameters that the adapter stores whole (norms, convolutions, the experts of a mixture).
- "Left out": changed parameters that peft cannot store (biases of adapted layers); `extract-lora` lists them.
- "Merge first": an adapted matrix is shared (embeddings and head): peft changes its other use only by
  `merge_and_unload`.

Limits:

- With `train_layers`, DeBERTa, ModernBERT, encoders with rotary embeddings, RWKV and Gemma 3n run their frozen layers
  in every step, and so do other models with `gradient_checkpointing` or `device_map`.
- Of models with two towers, only CLIP and SigLIP (also SigLIP 2 of one fixed image size) can get their heads from
  texts; others are an error.
- `export` cannot write into a checkpoint of pickled weights: save it again.

Made by `python -m benchmarks families`, with transformers {transformers} and peft {peft}; the same checks are tests
(`tests/benchmarks/test_families.py`).

| family | loaded as | trained tensors | adapter: factors | whole | left out | |
| --- | --- | --- | --- | --- | --- | --- |
"""


class Outcome(NamedTuple):
    """The outcome of the checks of a family."""

    model: str  # class
    parameters: int
    trained: int  # leaves
    moved: dict[str, int]  # leaves that training changed, by method
    low_rank: int  # leaves of the adapter
    whole: int  # leaves that it holds as they are
    left_out: int  # changed leaves that no adapter holds
    tied: bool  # the adapter is to be merged by peft before it is used


class _Loaded(NamedTuple):
    module: nn.Module
    params: dict[str, Tensor]
    where: Any
    loss_fn: Any
    batch: Batch


def write_base(name: str, folder: Path) -> None:
    """A tiny model of a family with random weights, a tokenizer of numbers and an image processor."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    family = FAMILIES[name]
    config = _config(name)
    torch.manual_seed(0)
    module = getattr(transformers, family.auto or AUTO[family.kind]).from_config(config)
    for leaf in module.parameters():  # biases and norms are constant, and experts alike, in a new model
        leaf.data += 0.02 * torch.randn_like(leaf)
    module.save_pretrained(folder)
    if family.kind != "images":
        words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {str(i): i for i in range(4, VOCABULARY)}
        special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        made: Any = Tokenizer(WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = WhitespaceSplit()
        transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    if family.kind in ("images", "towers"):
        side = {"height": IMAGE, "width": IMAGE}
        transformers.CLIPImageProcessorPil(size=side, crop_size=side).save_pretrained(folder)


def _config(name: str) -> Any:
    from transformers import AutoConfig

    kind, own = FAMILIES[name].kind, dict(FAMILIES[name].config)
    if kind == "towers":
        text = {**_TOWERS, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
        own |= {"text_config": text, "vision_config": {**_TOWERS, "image_size": IMAGE, "patch_size": 8}}
        own |= {"projection_dim": 32}
    return AutoConfig.for_model(name.partition(" ")[0], **own)


def load(name: str, folder: Path) -> _Loaded:
    """A family by the loader of the library that is for it, and a batch."""
    family, labels = FAMILIES[name], torch.tensor([0, 1])
    if family.kind in ("causal", "seq2seq"):
        own = language.load(folder)
        answers = IDS if family.kind == "causal" else IDS[:, :5]
        batch: Batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": answers}
        return _Loaded(own.module, own.params, own.where, own.loss_fn, batch)
    if family.kind == "encoder":
        found = encoder.load(folder, train_layers=family.train_layers)
        rows = [IDS[0], IDS[1, :7]]
        width = found.features(rows).shape[1]
        head = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
        inputs = rows if found.states is None else found.states(rows).split([len(row) for row in rows])
        loss = found.loss_fn(head, torch.zeros(2))
        return _Loaded(found.module, found.params, found.where, loss, texts(list(inputs), labels))
    pixels = torch.randn(2, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1))
    if family.kind == "towers":
        towers = clip.load(folder)
        head = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
        return _Loaded(towers.module, towers.params, towers.where, towers.loss_fn(head, lambda x: x), (pixels, labels))
    images = image_classifier.load(folder)
    head = torch.randn(2, images.features(pixels).shape[1] + 1, generator=torch.Generator().manual_seed(1))
    return _Loaded(images.module, images.params, images.where, images.loss_fn(head, lambda x: x), (pixels, labels))


def train(own: _Loaded, method: str) -> Params:
    """Two steps, the second one of SMAT at a simulated state."""
    optimizer = optim.adam(1e-2)
    common = {"where": own.where, "engine": "autograd"}
    made = (
        finetune.build(own.loss_fn, optimizer, own.params, **common)
        if method == "ft"
        else smat.build(own.loss_fn, optimizer, own.params, period=2, **common)
    )
    state = made.init(own.params)
    for _ in range(2):
        state, info = made.update(random.key(0), state, own.batch)
        assert torch.isfinite(info.loss), f"{method}: the loss is {info.loss}"
    return state.params


def check(name: str, root: Path) -> Outcome:
    """Two experts of a family, merged, published, loaded again by transformers, and as an adapter by peft.

    Raises: AssertionError that says what is not as it should be; whatever a stage raises.
    """
    base = root / "base"
    write_base(name, base)
    own = load(name, base)
    print_of = checkpoint.fingerprint(own.params)
    checkpoint.save_expert(root / "start", own.params, checkpoint.describe(own.params, kind="base"))
    moved = {}
    for method in ("ft", "smat"):
        params = train(own, method)
        moved[method] = sum(not torch.equal(params[path], leaf) for path, leaf in own.params.items())
        assert moved[method], f"{method} changes nothing"
        facts = checkpoint.describe(params, kind="expert", task=method, base_fingerprint=print_of)
        checkpoint.save_expert(root / method, params, facts)
    experts = {method: root / method for method in ("ft", "smat")}
    merge_folders(TaskArithmetic(coef=0.4), root / "start", experts, root / "merged")
    merged = checkpoint.load_leaves(root / "merged")[0]
    manifest = checkpoint.describe(merged, kind="merged", base_fingerprint=print_of)
    (root / "merged" / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    export(root / "merged", base, root / "published")
    again = load(name, root / "published").params
    assert again.keys() == merged.keys(), f"leaves {sorted(again.keys() ^ merged.keys())[:3]}"
    for path, leaf in merged.items():
        assert torch.equal(again[path], leaf), f"{path} is another one when it is loaded again"
    stored, first = load_file(root / "published/model.safetensors"), load_file(base / "model.safetensors")
    assert stored.keys() == first.keys(), "other leaves are stored than base's"
    assert any(not torch.equal(stored[path], leaf) for path, leaf in first.items())
    made = extract_lora(base, root / "published", root / "adapter", rank=64)
    export(root / "adapter", base, root / "again")
    back = load_file(root / "again/model.safetensors")
    if not made.left_out:
        _check_close(back, stored, "base with the adapter, as an expert")
    _check_adapter(name, base, root, tied=bool(made.tied))
    count = sum(leaf.numel() for leaf in own.module.parameters())
    whole, left_out = len(made.whole), len(made.left_out)
    low = len(made.errors) - whole - left_out
    return Outcome(type(own.module).__name__, count, len(merged), moved, low, whole, left_out, bool(made.tied))


def _check_adapter(name: str, base: Path, root: Path, *, tied: bool) -> None:
    """Base with the adapter is the published model, but for what the adapter says it leaves out: in outputs and leaves.

    Raises: AssertionError that says where they differ.
    """
    import peft
    import transformers

    auto = getattr(transformers, FAMILIES[name].auto or AUTO[FAMILIES[name].kind])
    published, module = auto.from_pretrained(root / "published"), auto.from_pretrained(base)
    wanted, found = dict(published.named_parameters()), dict(module.named_parameters())
    for path in json.loads((root / "adapter" / checkpoint.MANIFEST).read_text())["left_out"]:
        found[path].data.copy_(wanted[path].data)
    model = peft.PeftModel.from_pretrained(module, root / "adapter")
    for ours, own in [] if tied else zip(_outputs(name, model), _outputs(name, published), strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-3, msg=lambda text: f"outputs through peft: {text}")
    found = dict(model.merge_and_unload().named_parameters())
    assert wanted.keys() == found.keys(), f"leaves {sorted(wanted.keys() ^ found.keys())[:3]} of the adapter's model"
    _check_close(found, wanted, "base with the adapter, merged by peft")


def _check_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    for path, leaf in wanted.items():
        off = (found[path] - leaf).abs().flatten().tolist()
        assert max(off, default=0) < 1e-5, f"{what}: {path} is off by {max(off):.1e}"


def _outputs(name: str, module: nn.Module) -> list[Tensor]:
    kind, auto = FAMILIES[name].kind, FAMILIES[name].auto
    values = torch.randn(2, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(2))
    inputs = {"causal": {"input_ids": IDS}, "seq2seq": {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}}
    inputs |= {"encoder": {"input_ids": IDS}, "images": {"pixel_values": values}}
    inputs |= {"towers": {"input_ids": IDS, "pixel_values": values}}
    with torch.no_grad():
        found = module.eval()(**inputs[kind])
    if kind == "towers":
        return [found.logits_per_image]
    return [found.last_hidden_state if (auto or AUTO[kind]) == "AutoModel" else found.logits]


def row(name: str, found: Outcome) -> str:
    """A family's line of the page."""
    cells = (name, found.model, found.trained, found.low_rank, found.whole, found.left_out)
    return f"| {' | '.join(map(str, cells))} | {'merge first' if found.tied else ''} |"


def main(arguments: Sequence[str]) -> None:
    """Checks every family and writes the page; failures are reported, and then nothing is written."""
    from importlib import metadata

    from transformers.utils import logging

    parser = argparse.ArgumentParser(prog="python -m benchmarks families", description=__doc__)
    parser.add_argument("families", nargs="*", help="families to check (default: all, then the page is written)")
    parser.add_argument("--out", type=Path, default=Path("docs/families.md"), help="the page")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.families if name not in FAMILIES]:
        parser.error(f"{', '.join(unknown)}: unknown, the families are {', '.join(FAMILIES)}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines, failed = [], 0
    for name in given.families or FAMILIES:
        with TemporaryDirectory() as folder:
            try:
                lines.append(row(name, check(name, Path(folder))))
            except Exception as error:  # of many libraries: the next family is checked all the same
                failed += 1
                lines.append(f"{name}: {type(error).__name__}: {error}")
        print(lines[-1], flush=True)
    if failed:
        sys.exit(f"{failed} of {len(lines)} families fail")
    if not given.families:
        page = PAGE.format(**{package: metadata.version(package) for package in ("transformers", "peft")})
        given.out.write_text(page + "\n".join(lines) + "\n", encoding="utf-8")
