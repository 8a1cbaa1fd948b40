"""Names of modules in the original code of diffusion models and OpenCLIP, and those of diffusers and transformers.

Names are flat, as kohya's scripts write them: "_" for ".". For the UNets of Stable Diffusion and for OpenCLIP, `flat`
gives one name to both. In Flux and Wan a module may have two names in diffusers (in Flux 1 and 2), or several modules
(queries, keys and values): `of_diffusers` lists them.

Source: the conversion scripts and adapter loaders of diffusers (scripts/, loaders/lora_conversion_utils.py).
"""

import re

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
_DOUBLE, _SINGLE, _WAN = r"double_blocks_(\d+)_", r"single_blocks_(\d+)_", r"blocks_(\d+)_"
_OF_DIFFUSERS: dict[str, list[tuple[str, ...]]] = {  # of Flux 1, Chroma and Flux 2; of Wan
    _DOUBLE + "img_attn_qkv": [tuple(rf"transformer_blocks_\1_attn_to_{part}" for part in "qkv")],
    _DOUBLE + "txt_attn_qkv": [tuple(rf"transformer_blocks_\1_attn_add_{part}_proj" for part in "qkv")],
    _DOUBLE + "img_attn_proj": [(r"transformer_blocks_\1_attn_to_out_0",)],
    _DOUBLE + "txt_attn_proj": [(r"transformer_blocks_\1_attn_to_add_out",)],
    _DOUBLE + "img_mlp_0": [(r"transformer_blocks_\1_ff_net_0_proj",), (r"transformer_blocks_\1_ff_linear_in",)],
    _DOUBLE + "img_mlp_2": [(r"transformer_blocks_\1_ff_net_2",), (r"transformer_blocks_\1_ff_linear_out",)],
    _DOUBLE + "txt_mlp_0": [
        (r"transformer_blocks_\1_ff_context_net_0_proj",), (r"transformer_blocks_\1_ff_context_linear_in",),
    ],
    _DOUBLE + "txt_mlp_2": [
        (r"transformer_blocks_\1_ff_context_net_2",), (r"transformer_blocks_\1_ff_context_linear_out",),
    ],
    _DOUBLE + "img_mod_lin": [(r"transformer_blocks_\1_norm1_linear",)],
    _DOUBLE + "txt_mod_lin": [(r"transformer_blocks_\1_norm1_context_linear",)],
    _SINGLE + "linear1": [
        tuple(rf"single_transformer_blocks_\1_{part}" for part in ("attn_to_q", "attn_to_k", "attn_to_v", "proj_mlp")),
        (r"single_transformer_blocks_\1_attn_to_qkv_mlp_proj",),
    ],
    _SINGLE + "linear2": [(r"single_transformer_blocks_\1_proj_out",), (r"single_transformer_blocks_\1_attn_to_out",)],
    _SINGLE + "modulation_lin": [(r"single_transformer_blocks_\1_norm_linear",)],
    "((?:single|double)_stream_modulation.*)_lin": [(r"\1_linear",)],
    "img_in": [("x_embedder",)],
    "txt_in": [("context_embedder",)],
    **{
        f"{ours}_in_{which}_layer": [(f"{theirs}_linear_{number}",) for theirs in names]
        for which, number in (("in", 1), ("out", 2))
        for ours, names in {
            "time": ("time_text_embed_timestep_embedder", "time_guidance_embed_timestep_embedder"),
            "guidance": ("time_text_embed_guidance_embedder", "time_guidance_embed_guidance_embedder"),
            "vector": ("time_text_embed_text_embedder",),
        }.items()
    },
    "final_layer_linear": [("proj_out",)],
    **{
        f"{_WAN}{ours}_attn_{part}": [(rf"blocks_\1_{theirs}_to_{part.replace('o', 'out_0')}",)]
        for ours, theirs in (("self", "attn1"), ("cross", "attn2"))
        for part in "qkvo"
    },
    **{f"{_WAN}cross_attn_{part}_img": [(rf"blocks_\1_attn2_add_{part}_proj",)] for part in "kv"},
    _WAN + "ffn_0": [(r"blocks_\1_ffn_net_0_proj",)],
    _WAN + "ffn_2": [(r"blocks_\1_ffn_net_2",)],
    **{
        f"{kind}_embedding_{place}": [(f"condition_embedder_{kind}_embedder_linear_{number}",)]
        for kind in ("time", "text")
        for place, number in ((0, 1), (2, 2))
    },
    "time_projection_1": [("condition_embedder_time_proj",)],
    "head_head": [("proj_out",)],
}  # fmt: skip


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


def of_diffusers(name: str) -> list[tuple[str, ...]]:
    """The names that diffusers gives to a module of Flux or Wan: alternatives, each of one module or of its parts.

    Args: name: flat, in the original code. Returns: nothing for another module.
    """
    for pattern, alternatives in _OF_DIFFUSERS.items():
        if found := re.fullmatch(pattern, name):
            return [tuple(found.expand(part) for part in parts) for parts in alternatives]
    return []
