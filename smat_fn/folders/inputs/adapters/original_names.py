"""Names of modules in the original code of diffusion models and OpenCLIP, and those of diffusers and transformers.

Names are flat, as kohya's scripts write them: "_" for ".". For the UNets of Stable Diffusion and for OpenCLIP, `flat`
gives one name to both. In newer models a module may have one of two names in diffusers (in Flux 1 and 2), or be several
modules (queries, keys and values): `of_diffusers` lists them.

Source: the conversion scripts and adapter loaders of diffusers (scripts/, loaders/lora_conversion_utils.py).
"""

import re
from typing import NamedTuple

_BLOCK = re.compile(r"(input|output)_blocks_(\d+)_(\d)_(.+)")
_MIDDLE = re.compile(r"middle_block_([012])_(.+)")
_RESBLOCK = re.compile(r"transformer_resblocks_(\d+)_(.+)")
_NAMES = {  # of the original code of UNets and of OpenCLIP, and those of diffusers and transformers
    "input_blocks_0_0": "conv_in",
    "out_2": "conv_out",
    "time_embed_0": "time_embedding_linear_1",
    "time_embed_2": "time_embedding_linear_2",
    "label_emb_0_0": "add_embedding_linear_1",
    "label_emb_0_2": "add_embedding_linear_2",
    "in_layers_2": "conv1",
    "emb_layers_1": "time_emb_proj",
    "out_layers_3": "conv2",
    "skip_connection": "conv_shortcut",
    "attn": "self_attn",
    "attn_out_proj": "self_attn_out_proj",
    "mlp_c_fc": "mlp_fc1",
    "mlp_c_proj": "mlp_fc2",
}
_TABLE = {  # the original name -> alternatives in diffusers; N: a number; {a,b}: the modules that are one, in order
    # Flux 1, Chroma, Flux 2
    "double_blocks.N.img_attn.qkv": "transformer_blocks.N.attn.to_{q,k,v}",
    "double_blocks.N.txt_attn.qkv": "transformer_blocks.N.attn.{add_q_proj,add_k_proj,add_v_proj}",
    "double_blocks.N.img_attn.proj": "transformer_blocks.N.attn.to_out.0",
    "double_blocks.N.txt_attn.proj": "transformer_blocks.N.attn.to_add_out",
    **{
        f"double_blocks.N.{ours}.{number}": f"transformer_blocks.N.{ff}.{one} | transformer_blocks.N.{ff}.{two}"
        for ours, ff in (("img_mlp", "ff"), ("txt_mlp", "ff_context"))
        for number, one, two in ((0, "net.0.proj", "linear_in"), (2, "net.2", "linear_out"))
    },
    "double_blocks.N.img_mod.lin": "transformer_blocks.N.norm1.linear",
    "double_blocks.N.txt_mod.lin": "transformer_blocks.N.norm1_context.linear",
    "single_blocks.N.linear1": "single_transformer_blocks.N.{attn.to_q,attn.to_k,attn.to_v,proj_mlp} | "
    "single_transformer_blocks.N.attn.to_qkv_mlp_proj",
    "single_blocks.N.linear2": "single_transformer_blocks.N.proj_out | single_transformer_blocks.N.attn.to_out",
    "single_blocks.N.modulation.lin": "single_transformer_blocks.N.norm.linear",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    **{
        f"{kind}_in.{way}_layer": f"time_text_embed.{part}.linear_{number} | time_guidance_embed.{part}.linear_{number}"
        for kind, part in (("time", "timestep_embedder"), ("guidance", "guidance_embedder"))
        for way, number in (("in", 1), ("out", 2))
    },
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "distilled_guidance_layer.layers.N.in_layer": "distilled_guidance_layer.layers.N.linear_1",
    "distilled_guidance_layer.layers.N.out_layer": "distilled_guidance_layer.layers.N.linear_2",
    "final_layer.linear": "proj_out | all_final_layer.2-1.linear",  # of Z-Image, too
    "final_layer.adaLN_modulation.1": "~norm_out.linear | all_final_layer.2-1.adaLN_modulation.1",  # ~: halves swapped
    # Stable Diffusion 3; norms of the context are left out: those of the last block have swapped halves
    **{
        f"joint_blocks.N.{side}_block.{name}": f"transformer_blocks.N.{theirs}"
        for side, parts, out, ff in (
            ("x", "attn.to_{q,k,v}", "attn.to_out.0", "ff"),
            ("context", "attn.{add_q_proj,add_k_proj,add_v_proj}", "attn.to_add_out", "ff_context"),
        )
        for name, theirs in {
            "attn.qkv": parts, "attn.proj": out, "mlp.fc1": f"{ff}.net.0.proj", "mlp.fc2": f"{ff}.net.2",
        }.items()
    },
    "joint_blocks.N.x_block.attn2.qkv": "transformer_blocks.N.attn2.to_{q,k,v}",
    "joint_blocks.N.x_block.attn2.proj": "transformer_blocks.N.attn2.to_out.0",
    "joint_blocks.N.x_block.adaLN_modulation.1": "transformer_blocks.N.norm1.linear",
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    # Z-Image
    **{
        f"{blocks}.N.attention.{name}": f"{blocks}.N.attention.{theirs}"
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for name, theirs in {"qkv": "to_{q,k,v}", "out": "to_out.0"}.items()
    },
    "x_embedder": "all_x_embedder.2-1",
    # Wan
    **{
        f"{blocks}.N.{name}": f"{blocks}.N.{theirs}"
        for blocks in ("blocks", "vace_blocks")
        for name, theirs in {
            **{f"self_attn.{part}": f"attn1.to_{part}" for part in "qkv"}, "self_attn.o": "attn1.to_out.0",
            **{f"cross_attn.{part}": f"attn2.to_{part}" for part in "qkv"}, "cross_attn.o": "attn2.to_out.0",
            **{f"cross_attn.{part}_img": f"attn2.add_{part}_proj" for part in "kv"},
            "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2", "before_proj": "proj_in", "after_proj": "proj_out",
        }.items()
    },
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "head.head": "proj_out",
}  # fmt: skip
_NUMBER = re.compile(r"_(\d+)_")


class Names(NamedTuple):
    """The modules of diffusers that are one module of the original code."""

    parts: tuple[str, ...]
    swapped: bool = False  # of one module: the upper and the lower half of the rows


def _names(text: str) -> Names:
    """One alternative of `_TABLE`."""
    start, brace, rest = text.removeprefix("~").partition("{")
    inside, _, end = rest.partition("}")
    parts = [f"{start}{part}{end}" for part in inside.split(",")] if brace else [start]
    return Names(tuple(part.replace(".", "_") for part in parts), text.startswith("~"))


_OF_DIFFUSERS = {
    name.replace(".", "_"): [_names(text) for text in texts.split(" | ")] for name, texts in _TABLE.items()
}


def flat(path: str, *, of_blocks: bool) -> str:
    """A module's path as kohya's scripts write it, of UNets and OpenCLIP under the names of diffusers and transformers.

    Args: of_blocks: a UNet's blocks have two layers each, which decides how the original code counts them.
    """
    name = path.replace(".", "_").removeprefix("text_model_")  # which transformers 5 does not store
    if found := _RESBLOCK.fullmatch(name):
        return f"encoder_layers_{found[1]}_{_NAMES.get(found[2], found[2])}"
    if not of_blocks:
        return name
    if found := _MIDDLE.fullmatch(name):
        inside = "resnets_0", "attentions_0", "resnets_1"
        return f"mid_block_{inside[int(found[1])]}_{_NAMES.get(found[2], found[2])}"
    if (found := _BLOCK.fullmatch(name)) is None:
        return _NAMES.get(name, name)
    side, rest = found[1], found[4]
    block, layer = divmod(int(found[2]) - (side == "input"), 3)
    if rest == "op":
        return f"down_blocks_{block}_downsamplers_0_conv"
    if rest == "conv":
        return f"up_blocks_{block}_upsamplers_0_conv"
    kind = "resnets" if found[3] == "0" else "attentions"
    return f"{'down' if side == 'input' else 'up'}_blocks_{block}_{kind}_{layer}_{_NAMES.get(rest, rest)}"


def of_diffusers(name: str) -> list[Names]:
    """The names that diffusers gives to a module of a newer model: alternatives.

    Args: name: flat, in the original code. Returns: nothing for another module.
    """
    if (found := _OF_DIFFUSERS.get(name)) is not None or (number := _NUMBER.search(name)) is None:
        return found or []
    known = _OF_DIFFUSERS.get(_NUMBER.sub("_N_", name, count=1), [])
    return [Names(tuple(part.replace("_N_", number[0]) for part in own.parts), own.swapped) for own in known]
