"""The masked set on real architectures of transformers, tiny and random."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from smat_fn import where

LM = {
    **{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
VISION = {
    **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12},
    **{"image_size": 8, "patch_size": 4},
}
NO_GROUPS = {name: size for name, size in LM.items() if name != "num_key_value_heads"}
ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
MLP = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def make(kind):
    import transformers as hf

    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**LM))
    if kind == "llama tied":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**LM, tie_word_embeddings=True))
    if kind in ("qwen2", "qwen2 tied"):
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**LM, tie_word_embeddings="tied" in kind))
    if kind == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**LM, head_dim=4))
    if kind == "gemma":
        return hf.GemmaForCausalLM(hf.GemmaConfig(**LM, head_dim=4))
    if kind == "t5":
        sizes = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2}
        config = hf.T5Config(**sizes, num_layers=2, feed_forward_proj="gated-gelu")
        return hf.T5ForConditionalGeneration(config)
    if kind == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(**NO_GROUPS, num_labels=3))
    if kind == "bert tied":
        return hf.BertForMaskedLM(hf.BertConfig(**NO_GROUPS))
    if kind == "clip":
        text = NO_GROUPS | {"max_position_embeddings": 8}
        return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=4))
    if kind == "qwen2 moe":
        sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
        return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**LM, **sizes, num_experts=2, num_experts_per_tok=1))
    if kind == "gpt oss":
        config = hf.GptOssConfig(**LM, head_dim=4, num_local_experts=2, num_experts_per_tok=1)
        return hf.GptOssForCausalLM(config)
    if kind == "swin":
        sizes = {"image_size": 8, "patch_size": 2, "embed_dim": 4, "window_size": 2}
        return hf.SwinForImageClassification(hf.SwinConfig(**sizes, depths=[1, 1], num_heads=[1, 1]))
    if kind == "gpt2":
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=11, bos_token_id=1, eos_token_id=2, **sizes))
    if kind == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3))
    if kind == "clip vision":
        return hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION))
    if kind == "xlnet":
        sizes = {"d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12}
        return hf.XLNetForSequenceClassification(hf.XLNetConfig(vocab_size=11, **sizes))
    if kind == "funnel":
        sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "block_sizes": [2], "num_decoder_layers": 2}
        return hf.FunnelForMaskedLM(hf.FunnelConfig(vocab_size=11, **sizes))
    if kind == "jetmoe":
        sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "kv_channels": 4}
        return hf.JetMoeForCausalLM(hf.JetMoeConfig(**NO_GROUPS, **sizes))
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**LM, num_local_experts=2))
    if kind == "llama4":
        config = hf.Llama4TextConfig(**LM, intermediate_size_mlp=12, num_local_experts=2, head_dim=4)
        return hf.Llama4ForCausalLM(config)
    assert kind == "lfm2"
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**LM, layer_types=["conv", "full_attention"]))


def in_blocks(prefix, names):
    return {f"{prefix}.{i}.{name}" for i in range(2) for name in names}


VIT = [f"attention.{x}_proj.weight" for x in "qkvo"] + ["mlp.fc1.weight", "mlp.fc2.weight"]
CLIP = [f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "out")] + ["mlp.fc1.weight", "mlp.fc2.weight"]
GPT2 = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
LLAMA4 = [f"feed_forward.{x}" for x in EXPERTS] + [f"feed_forward.shared_expert.{x[4:]}" for x in MLP]
T5 = [f"layer.0.SelfAttention.{x}.weight" for x in "qkvo"]
T5_MLP = [f"DenseReluDense.{x}.weight" for x in ("wi_0", "wi_1", "wo")]
T5_ENCODER = T5 + [f"layer.1.{x}" for x in T5_MLP]
T5_DECODER = T5 + [f"layer.1.EncDecAttention.{x}.weight" for x in "qkvo"] + [f"layer.2.{x}" for x in T5_MLP]
BERT = [f"attention.self.{x}.weight" for x in ("query", "key", "value")]
BERT += [f"{x}.dense.weight" for x in ("attention.output", "intermediate", "output")]
QWEN2_MOE = [f"mlp.{x}" for x in EXPERTS] + [f"mlp.shared_expert.{x[4:]}" for x in MLP]
XLNET = [f"rel_attn.{x}" for x in "qkvor"] + ["ff.layer_1.weight", "ff.layer_2.weight"]
FUNNEL = [f"attention.{x}.weight" for x in ("q_head", "k_head", "v_head", "post_proj")] + ["attention.r_kernel"]
FUNNEL += ["ffn.linear_1.weight", "ffn.linear_2.weight"]
JETMOE = [f"{x}.{y}_linear.weight" for x in ("mlp", "self_attention.experts") for y in ("input", "output")]
EXPECTED = {
    "xlnet": in_blocks("transformer.layer", XLNET),
    "funnel": in_blocks("funnel.encoder.blocks.0", FUNNEL) | in_blocks("funnel.decoder.layers", FUNNEL),
    "jetmoe": in_blocks("model.layers", [*JETMOE, "self_attention.kv_proj.weight"]),
    "qwen2": in_blocks("model.layers", ATTENTION + MLP),
    "qwen2 tied": in_blocks("model.layers", ATTENTION + MLP),
    "qwen3": in_blocks("model.layers", ATTENTION + MLP),
    "gemma": in_blocks("model.layers", ATTENTION + MLP),
    "t5": in_blocks("encoder.block", T5_ENCODER) | in_blocks("decoder.block", T5_DECODER),
    "bert": in_blocks("bert.encoder.layer", BERT),
    "bert tied": in_blocks("bert.encoder.layer", BERT),
    "clip": in_blocks("text_model.encoder.layers", CLIP) | in_blocks("vision_model.encoder.layers", CLIP),
    "qwen2 moe": in_blocks("model.layers", ATTENTION + QWEN2_MOE),
    "gpt oss": in_blocks("model.layers", ATTENTION + [f"mlp.{x}" for x in EXPERTS]),
    "swin": {f"swin.encoder.layers.{i}.blocks.0.{name}" for i in range(2) for name in VIT},
    "llama": in_blocks("model.layers", ATTENTION + MLP),
    "llama tied": in_blocks("model.layers", ATTENTION + MLP),
    "gpt2": in_blocks("transformer.h", GPT2),
    "vit": in_blocks("vit.layers", VIT),
    "clip vision": in_blocks("encoder.layers", CLIP),
    "mixtral": in_blocks("model.layers", ATTENTION + [f"mlp.{x}" for x in EXPERTS]),
    "llama4": in_blocks("model.layers", ATTENTION + LLAMA4),
}


def picked(predicate, module):
    return {name for name, p in module.named_parameters() if predicate(name, p)}


@pytest.mark.parametrize("kind", EXPECTED)
def test_block_linear_is_attention_and_mlp_weights_and_nothing_else(kind):
    module = make(kind)
    assert picked(where.block_linear(module), module) == EXPECTED[kind]


def test_convolution_kernels_are_not_expert_weights():
    module = make("lfm2")
    got = picked(where.block_linear(module), module)
    assert "model.layers.0.conv.conv.weight" not in got
    assert "model.layers.0.conv.in_proj.weight" in got
    assert module.model.layers[0].conv.conv.weight.ndim == 3


def test_a_head_is_left_out_tied_or_not():
    assert "lm_head.weight" in dict(make("llama").named_parameters())
    assert "lm_head.weight" not in dict(make("llama tied").named_parameters())
    tied = where.block_linear(make("llama tied"))
    assert not tied("lm_head.weight", torch.zeros(11, 8))
    assert not tied("model.embed_tokens.weight", torch.zeros(11, 8))


def test_what_lies_beside_the_masked_set():
    leaves = {kind: dict(make(kind).named_parameters()) for kind in ("qwen2 moe", "bert tied", "swin")}
    assert "model.layers.0.mlp.shared_expert_gate.weight" in leaves["qwen2 moe"]
    assert "model.layers.0.mlp.gate.weight" in leaves["qwen2 moe"]
    assert "cls.predictions.transform.dense.weight" in leaves["bert tied"]
    assert "swin.encoder.layers.0.downsample.reduction.weight" in leaves["swin"]
    assert "transformer.layer.0.rel_attn.seg_embed" in dict(make("xlnet").named_parameters())
    assert "funnel.encoder.blocks.0.0.attention.seg_embed" in dict(make("funnel").named_parameters())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.inner = nn.ModuleList([nn.Linear(3, 3)])


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 3)
        self.stem = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 3)


def test_block_linear_by_structure():
    module = Tiny()
    names = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("fc", "inner.0")]
    assert picked(where.block_linear(module), module) == set(names)


def test_a_block_weight_tied_to_an_embedding_is_left_out():
    module = Tiny()
    module.blocks[0].fc.weight = module.embed.weight
    assert "blocks.0.fc.weight" not in picked(where.block_linear(module), module)
    # the embedding's own name is the one that is left, and it is not masked
    assert not where.block_linear(module)("embed.weight", module.embed.weight)


class Mixture(nn.Module):
    """Experts as a list, and gates that no type's name gives away."""

    def __init__(self):
        super().__init__()
        self.choose = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4))
        self.share = nn.Linear(3, 1)
        self.shared = nn.Linear(3, 3)
        self.experts = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 3))
        self.positions = nn.Parameter(torch.zeros(1, 5, 3))
        self.up = nn.Parameter(torch.zeros(4, 3, 2))


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_gates_are_told_by_the_experts_they_stand_by(container):
    module = nn.Sequential()
    module.layers = container([nn.ModuleDict({"mlp": Mixture()}), nn.ModuleDict({"mlp": Mixture()})])
    names = ["mlp.shared.weight", *(f"mlp.experts.{i}.weight" for i in range(4))]
    assert picked(where.block_linear(module), module) == in_blocks("layers", names)


def test_tokens_and_positions_are_no_stacked_experts():
    module = nn.Module()
    modulated = nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3), "shift": nn.Linear(3, 9)})
    module.layers = nn.ModuleList([modulated])
    assert len(picked(where.block_linear(module), module)) == 3
    linear_attention = nn.ModuleDict({"linear_attn": nn.Linear(3, 5)})
    module.layers = nn.ModuleList([linear_attention])
    assert picked(where.block_linear(module), module) == {"layers.0.linear_attn.weight"}
    module.layers = nn.ModuleList([nn.ModuleDict({"mlp": Stacked()}), nn.ModuleDict({"mlp": Stacked()})])
    assert picked(where.block_linear(module), module) == in_blocks("layers", ["mlp.up"])


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_matrix_that_pruning_or_a_norm_keeps_under_another_name():
    def blocks():
        return nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))

    norms = nn.utils.parametrizations
    kinds = {
        "weight_orig": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        "weight_v": nn.utils.weight_norm,
        "parametrizations.weight.original1": norms.weight_norm,
        "parametrizations.weight.original": norms.spectral_norm,
    }
    for name, change in kinds.items():
        module = blocks()
        change(module[0][1])
        own = {f"{i}.{j}.weight" for i in range(2) for j in range(2)} - {"0.1.weight"} | {f"0.1.{name}"}
        assert where.block_linear(module).names == own
        assert own <= dict(module.named_parameters()).keys()


def test_attention_of_torch_itself():
    layer = nn.TransformerEncoderLayer(4, 2, 6)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    names = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert picked(where.block_linear(module), module) == in_blocks("layers", names)
    split = nn.ModuleList([nn.Sequential(nn.MultiheadAttention(4, 2, kdim=3, add_bias_kv=True))])
    names = {f"0.0.{x}_proj_weight" for x in "qkv"} | {"0.0.out_proj.weight"}
    assert picked(where.block_linear(split), split) == names


def test_lists_of_bare_layers_and_wrappers_are_no_blocks():
    module = Tiny()
    module.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    names = picked(where.block_linear(module), module)
    assert names == picked(where.block_linear(Tiny()), Tiny())
    wrapped = nn.Sequential(Tiny())
    assert picked(where.block_linear(wrapped), wrapped) == {f"0.{name}" for name in names}


class Answer(nn.Module):
    """A head for one task: of a width of its own."""

    def __init__(self, inner, classes):
        super().__init__()
        self.inner, self.out = nn.Linear(3, inner), nn.Linear(inner, classes)


class AnswerHead(Answer):
    pass


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("heads", [nn.Sequential(nn.Linear(3, 3), nn.GELU()), nn.Sequential(nn.Linear(3, 3), nn.GELU())]),
        ("task_classifiers", [Answer(3, 3), Answer(3, 3)]),
        ("lm_head", [Answer(3, 3)]),
        ("of_tasks", [AnswerHead(3, 3), AnswerHead(4, 3)]),
        ("of_tasks", [nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, n)) for n in (4, 7)]),
        ("of_tasks", [Answer(4, 8), Answer(5, 7)]),
        ("of_tasks", [nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4))]),
    ],
)
def test_a_list_of_heads_holds_no_blocks(name, heads):
    module = Tiny()
    setattr(module, name, nn.ModuleList(heads))
    names = picked(where.block_linear(Tiny()), Tiny())
    assert picked(where.block_linear(module), module) == names
    alone = nn.Module()
    setattr(alone, name, nn.ModuleList(heads))
    assert picked(where.block_linear(alone), alone) == set()
    # what runs one after the other is not a list of heads, however its widths change
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(n, n - 1), nn.Tanh()) for n in (4, 3)))
    assert picked(where.block_linear(stack), stack) == {"0.0.weight", "1.0.weight"}


def test_a_list_of_blocks_of_falling_width_is_no_list_of_heads():
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Sequential(nn.Linear(n, n - 1), nn.Tanh()) for n in (4, 3)])
    assert picked(where.block_linear(module), module) == {"layers.0.0.weight", "layers.1.0.weight"}
    module.layers = nn.ModuleList([nn.ModuleDict({"mlp": Stacked()}), nn.ModuleDict({"mlp": Mixture()})])
    assert len(picked(where.block_linear(module), module)) == 6


class CrystalConv(nn.Module):
    """A layer of a graph network: it takes two nodes and their edge, and gives a node."""

    def __init__(self):
        super().__init__()
        self.gate, self.core = nn.Linear(11, 4), nn.Linear(11, 4)


class Passing(CrystalConv):
    pass


class Residual(nn.Module):
    """A block of a UNet: a convolution, and a projection of the time to its channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.time = nn.Conv2d(4, 4, 3), nn.Linear(8, 4)


def test_layers_of_a_graph_network_and_a_middle_block_are_no_heads():
    both = {f"{i}.{name}.weight" for i in (0, 1) for name in ("gate", "core")}
    module = nn.Module()
    module.convs = nn.ModuleList([CrystalConv(), CrystalConv()])
    assert picked(where.block_linear(module), module) == {f"convs.{name}" for name in both}
    module = nn.Module()
    module.steps, module.out = nn.ModuleList([Passing(), Passing()]), nn.Linear(5, 2)
    assert picked(where.block_linear(module), module) == set()  # no layer takes what they give, as of heads
    module.out = nn.Linear(4, 2)
    assert picked(where.block_linear(module), module) == {f"steps.{name}" for name in both}
    unet = nn.ModuleDict({"mid_block": nn.ModuleDict({"resnets": nn.ModuleList([Residual(), Residual()])})})
    assert picked(where.block_linear(unet), unet) == {f"mid_block.resnets.{i}.time.weight" for i in (0, 1)}


def test_a_linear_layer_of_another_library_is_one_by_its_name():
    class Linear(nn.Module):  # as torch_geometric's
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = Linear()

    module = nn.ModuleDict({"convs": nn.ModuleList([Conv(), Conv()])})
    assert picked(where.block_linear(module), module) == {"convs.0.lin.weight", "convs.1.lin.weight"}


def test_a_mask_with_nothing_to_act_on_is_a_problem_and_never_is_not():
    module = nn.Module()
    module.first, module.second, module.heads = Block(), Block(), nn.ModuleList([Answer(3, 3)])
    leaves = dict(module.named_parameters())
    (problem,) = where.mask_problems(where.block_linear(module), leaves, 0.5)
    assert "drop_prob is 0.5, but Mask has nothing to act on: where picks none of 16 parameters" in problem
    assert "it found first.inner, second.inner" not in problem  # lists of bare layers
    assert "it found none in Module, whose linear layers are first.fc, first.inner.0, second.fc" in problem
    assert where.mask_problems(where.block_linear(module), leaves, 0.0) == []
    assert where.mask_problems(where.never, leaves, 0.5) == where.mask_problems(None, leaves, 0.5) == []
    tiny = Tiny()
    assert where.mask_problems(where.block_linear(tiny), dict(tiny.named_parameters()), 0.5) == []
    (problem,) = where.mask_problems(where.block_linear(tiny), {"head.weight": tiny.head.weight}, 0.5)
    assert "it found blocks in blocks in Tiny" in problem
    (problem,) = where.mask_problems(lambda path, leaf: False, leaves, 0.5)
    assert "It was asked for first.fc.weight, first.fc.bias, first.norm.weight and " in problem


def test_a_mask_of_names_that_differ_by_a_prefix_shows_one_of_each():
    inner, outer = Tiny(), nn.Module()
    outer.module = inner  # as wrappers for several devices have it
    picks, name = where.block_linear(inner), "blocks.0.fc.weight"
    longer = where.block_linear(outer)
    for own, of, shown in ((picks, outer, (name, f"module.{name}")), (longer, inner, (f"module.{name}", name))):
        leaves = dict(of.named_parameters())
        (problem,) = where.mask_problems(own, leaves, 0.5)
        assert problem == (
            f"drop_prob is 0.5, but Mask has nothing to act on: where picks none of {len(leaves)} parameters. Names "
            f"differ: it picks '{shown[0]}', the parameters have '{shown[1]}'. Make where from the module whose "
            "named_parameters() these are, or pass `drop_prob=0` to switch Mask off"
        )


def test_a_module_without_blocks_has_nothing_to_mask():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert picked(where.block_linear(module), module) == set()


def test_trainable_follows_requires_grad_and_names_tied_weights_once():
    module = Tiny()
    module.head.weight = module.embed.weight
    module.blocks[0].requires_grad_(False)
    module.stem.bias.requires_grad_(False)
    predicate = where.trainable(module)
    expected = {name for name, p in module.named_parameters() if p.requires_grad}
    assert picked(predicate, module) == expected
    assert "embed.weight" in expected
    assert not predicate("head.weight", module.head.weight)
    assert not predicate("stem.bias", module.stem.bias)
    assert not predicate("no.such.name", torch.zeros(1))


def test_never():
    assert not where.never("blocks.0.fc.weight", torch.zeros(1))


def test_muon_matrices_are_the_two_dimensional_leaves_of_the_masked_set():
    block = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "experts": ThreeD()})
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block, block]), "head": torch.nn.Linear(4, 3)})
    leaves = dict(module.named_parameters())
    masked, matrices = where.block_linear(module), where.muon_matrices(module)
    assert {path for path, leaf in leaves.items() if masked(path, leaf)} == {"layers.0.up.weight", "layers.0.experts.w"}
    assert {path for path, leaf in leaves.items() if matrices(path, leaf)} == {"layers.0.up.weight"}


class ThreeD(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 4, 8))


def test_one_listed_layer_is_no_mixture():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(4, 1)
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

    net = Net()
    inside = where.block_linear(net)
    picked = [path for path, leaf in net.named_parameters() if inside(path, leaf)]
    assert picked == [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("score", "layers.0")]


def test_a_gain_with_sides_of_length_one_is_not_a_stack_of_matrices():
    class Scaled(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(shape))
            self.linear = nn.Linear(4, 4)

    picked = [
        where.block_linear(nn.ModuleList([Scaled(shape), Scaled(shape)])).names for shape in ((1, 1, 4), (2, 3, 4))
    ]
    linear = {"0.linear.weight", "1.linear.weight"}
    assert picked == [linear, linear | {"0.gain", "1.gain"}]


def test_attention_is_its_projections_with_their_biases():
    assert where.attention(make("llama")).names == in_blocks("model.layers", ATTENTION)
    parts = [f"attention.{part}" for part in ("self.query", "self.key", "self.value", "output.dense")]
    both = [f"{part}.{leaf}" for part in parts for leaf in ("weight", "bias")]
    assert where.attention(make("bert")).names == in_blocks("bert.encoder.layer", both)


def test_attention_of_every_family_that_has_it():
    import transformers as hf

    from benchmarks import families

    for name in ("gpt2", "t5", "falcon", "mpt", "swin", "modernbert (the top layer)", "mixtral", "albert", "convnext"):
        family = families.FAMILIES[name]
        with torch.device("meta"):
            module = getattr(hf, family.auto or families.AUTO[family.kind]).from_config(families._config(name))
        found, linear = where.attention(module).names, where.block_linear(module).names
        assert bool(found) == (name != "convnext")
        for path in linear:
            inside = any("attn" in part.lower() or "attention" in part.lower() for part in path.split("."))
            assert (path in found) == inside, path
        assert not any("norm" in path.lower() for path in found)


def test_blocks_of_stages_are_counted_through_all_stages():
    blocks = "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2", "layer10.0"
    paths = [f"{block}.{name}.weight" for block in blocks for name in ("conv1", "bn1")]
    wanted = {path: 0.2 * blocks.index(path.rsplit(".", 2)[0]) for path in reversed(paths)}
    assert where.by_depth(reversed(paths), 0.0, 1.0) == pytest.approx(wanted)
    parallel = [f"{name}.{i}.w" for i in range(2) for name in ("attn.q", "attn.k", "layer_norm1", "layer_norm2")]
    paths = [path.replace("attn", f"attentions.{path.split('.')[-2]}") if "attn" in path else path for path in parallel]
    assert where.by_depth(paths, 0.0, 1.0) == {path: float(".1." in path) for path in paths}


def test_numbers_by_depth_are_a_line_over_the_blocks():
    paths = ["head", "encoder.0.w", "encoder.1.w", "decoder.0.w", "decoder.2.w", "decoder.2.b"]
    layers = {path: int(path.split(".")[1]) if "." in path else None for path in paths}
    numbers = where.by_depth(iter(paths), 0.5, 2.0, layer_of=layers.get)
    assert list(numbers.items()) == list(zip(paths, [0.5, 0.5, 1.25, 0.5, 2.0, 2.0], strict=True))
    assert where.by_depth([], 0.5, 2.0) == {}
    with pytest.raises(ValueError, match="high is inf, must be finite; no two blocks by the names"):
        where.by_depth(["layers.0.w", "head"], 0.5, float("inf"))


def stack(name, count, *inside):
    return [f"{name}.{i}.{leaf}" for i in range(count) for leaf in inside or ("norm.weight", "mlp.up.weight")]


LLAMA = stack("model.layers", 3, "input_layernorm.weight", "self_attn.q_proj.weight", "mlp.up_proj.weight")
RESBLOCK, ATTENDING = ("in_layers.0.weight", "out_layers.3.weight"), ("norm.weight", "transformer_blocks.0.attn1.to_q")
SDXL = [
    "diffusion.input_blocks.0.0.weight",
    *[f"diffusion.input_blocks.{i}.0.{leaf}" for i in (1, 2) for leaf in RESBLOCK],
    *[f"diffusion.input_blocks.2.1.{leaf}" for leaf in ATTENDING],
    *[f"diffusion.middle_block.{i}.{leaf}" for i, own in enumerate((RESBLOCK, ATTENDING, RESBLOCK)) for leaf in own],
    *[f"diffusion.output_blocks.{i}.0.{leaf}" for i in range(2) for leaf in RESBLOCK],
    *["diffusion.time_embed.0.weight", "diffusion.out.0.weight", "diffusion.out.2.weight"],
]
TEXT_ENCODERS = [
    *stack("conditioner.embedders.0.transformer.text_model.encoder.layers", 2),
    *stack("conditioner.embedders.1.model.transformer.resblocks", 4, "ln_1.weight", "attn.in_proj_weight"),
    "conditioner.embedders.1.model.token_embedding.weight",
]
EXPERTS = [f"moe.experts.{e}.w{i}.weight" for e in range(5) for i in (1, 2)]
# the stacks of each, up to the number, which all of their leaves are in; all others are in no block
ARCHITECTURES = {
    "Llama": ([*LLAMA, "model.embed_tokens.weight", "lm_head.weight"], ["model.layers"]),
    "Qwen2-VL": (
        [*LLAMA, *stack("visual.blocks", 5), "visual.merger.ln_q.weight"]
        + [f"visual.merger.mlp.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")],
        ["model.layers", "visual.blocks"],
    ),
    "Qwen3-VL": (
        [
            *LLAMA,
            *stack("visual.blocks", 5),
            *stack("visual.deepstack_merger_list", 2, "norm.weight", "linear_fc1.weight", "linear_fc2.weight"),
        ],
        ["model.layers", "visual.blocks"],
    ),
    "BERT with a pooler and a classifier": (
        [*stack("bert.encoder.layer", 2), "bert.pooler.dense.weight", "classifier.0.weight", "classifier.3.weight"],
        ["bert.encoder.layer"],
    ),
    "CLIP": (
        [*stack("text_model.encoder.layers", 2), *stack("vision_model.encoder.layers", 4), "visual_projection.weight"],
        ["text_model.encoder.layers", "vision_model.encoder.layers"],
    ),
    "ViT": ([*stack("blocks", 3), "patch_embed.proj.weight", "norm.weight", "head.weight"], ["blocks"]),
    "ViT, the last two blocks": (stack("blocks", 4)[4:], ["blocks"]),
    "GPT-2": (
        [*stack("transformer.h", 2, "ln_1.weight", "attn.c_attn.weight"), "transformer.wte.weight"],
        ["transformer.h"],
    ),
    "T5": (
        [
            *stack("encoder.block", 2, "layer.0.SelfAttention.q.weight", "layer.1.DenseReluDense.wi.weight"),
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "shared.weight",
            *stack("decoder.block", 3, *[f"layer.{i}.layer_norm.weight" for i in range(3)]),
        ],
        ["encoder.block", "decoder.block"],
    ),
    "Mixtral": (stack("model.layers", 2, "norm.weight", *EXPERTS), ["model.layers"]),
    "DeepSeek, whose first layer has no experts": (
        [*stack("model.layers", 1, "mlp.up.weight"), *stack("model.layers", 3, *EXPERTS)[10:]],
        ["model.layers"],
    ),
    "experts outside of layers": ([*stack("layers", 2), *EXPERTS], ["layers"]),
    "experts without layers": (EXPERTS, []),
    "Mamba": (
        [*stack("backbone.layers", 2, "mixer.A_log", "norm.weight"), "backbone.norm_f.weight"],
        ["backbone.layers"],
    ),
    "Swin, by stage": (
        [f"swin.layers.{i}.blocks.{j}.mlp.{n}.weight" for i in range(3) for j in range(2) for n in "ab"]
        + ["swin.layers.0.downsample.reduction.weight"],
        ["swin.layers"],
    ),
    "ConvNeXt, by stage": (
        [f"encoder.stages.{i}.layers.{j}.dwconv.weight" for i in range(2) for j in range(3)]
        + [f"encoder.stages.1.downsampling_layer.{i}.weight" for i in range(2)],
        ["encoder.stages"],
    ),
    "torchvision's ResNet, within each stage": (
        [
            *stack("layer1", 2, "conv1.weight", "bn1.weight"),
            *stack("layer2", 3, "conv1.weight", "bn1.weight"),
            "layer2.0.downsample.0.weight",
            "conv1.weight",
            "fc.weight",
        ],
        ["layer1", "layer2"],
    ),
    "SegFormer": (
        [
            *stack("encoder.block", 2, "0.attention.weight", "0.mlp.weight"),
            *stack("encoder.layer_norm", 2, "weight"),
            *stack("encoder.patch_embeddings", 2, "proj.weight"),
            *stack("decoder.linear_c", 2, "proj.weight"),
        ],
        ["encoder.block", "encoder.layer_norm", "encoder.patch_embeddings"],
    ),
    "XLM, blocks in several lists": (
        [
            *stack("attentions", 2, "q_lin.weight", "k_lin.weight"),
            *stack("layer_norm1", 2, "weight"),
            "x.weight",
            *stack("pred_layer.proj", 3, "weight"),
        ],
        ["attentions", "layer_norm1"],
    ),
    "text encoders of SDXL": (
        TEXT_ENCODERS,
        [
            "conditioner.embedders.0.transformer.text_model.encoder.layers",
            "conditioner.embedders.1.model.transformer.resblocks",
        ],
    ),
    "DETR's head of single layers": (
        [*stack("model.encoder.layers", 2), *stack("bbox_predictor.layers", 3, "weight", "bias")],
        ["model.encoder.layers"],
    ),
    "a head of compiled layers": ([*stack("h", 2), *stack("head.layers", 3, "_orig_mod.weight")], ["h"]),
    "nearly like members": ([*stack("trunk", 3), "trunk.0.relative_bias.weight"], ["trunk"]),
    "single layers alone": ([*stack("layers", 3, "weight", "bias"), "head.0.weight", "head.1.weight"], ["layers"]),
    "compiled single layers alone": (stack("layers", 3, "_orig_mod.weight"), ["layers"]),
    "compiled blocks": (stack("trunk", 2, "_orig_mod.a.weight", "_orig_mod.b.weight"), ["trunk"]),
    "a trunk of another name": ([*stack("trunk", 3), *stack("mlp", 2, "weight", "bias"), "mlp2.0.weight"], ["trunk"]),
    "a projector": (stack("mlp", 2, "weight", "bias"), []),
    "compiled layers of a projector": (stack("mlp", 2, "_orig_mod.weight"), []),
    "wrapped layers of a projector": (stack("mlp", 2, "conv.weight"), []),
    "numbers with a gap": (stack("trunk", 4)[4:] + stack("trunk", 1), []),
    "numbers from one": (stack("trunk", 3)[2:], []),
    "unlike members": ([f"trunk.{i}.{leaf}.w" for i, own in enumerate(("abc", "ade")) for leaf in own], []),
    "heads": (stack("task_heads", 2), []),
    "heads beside as many blocks": ([*stack("blocks", 2), *stack("heads", 2)], ["blocks"]),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_blocks_of_an_architecture(name):
    paths, stacks = ARCHITECTURES[name]

    def wanted(path):
        inside = next((own for own in stacks if path.startswith(own + ".")), None)
        return "" if inside is None else ".".join(path.split(".")[: inside.count(".") + 2])

    found = where.blocks_of(iter(paths))
    assert list(found.items()) == [(path, wanted(path)) for path in paths]
    last = max((int(block.rpartition(".")[2]) for block in found.values() if block), default=0)
    if not last:
        with pytest.raises(ValueError, match="no two blocks by the names"):
            where.by_depth(paths, 0.25, 1.0)
        return
    if "layer2" in stacks:  # stages, which follow each other
        return
    number = {path: int(block.rpartition(".")[2]) if block else 0 for path, block in found.items()}
    assert where.by_depth(paths, 0.25, 1.0) == {path: 0.25 + 0.75 * number[path] / last for path in paths}


@pytest.mark.parametrize("paths", [SDXL, [*SDXL, *TEXT_ENCODERS], stack("down_blocks", 3) + stack("up_blocks", 3)])
def test_a_unet_has_no_depth(paths):
    with pytest.raises(ValueError, match=r"(input|down)_blocks and \S*(output|up)_blocks are the two halves of a UNet"):
        where.by_depth(paths, 0.25, 1.0)
    assert len(set(where.by_depth(paths, 0.0, 1.0, layer_of=where.block_of).values())) > 1
    where.by_depth([path for path in paths if "output" not in path and "up_" not in path], 0.0, 1.0)
    # an encoder and a decoder, each with a depth of its own
    where.by_depth([f"{path.partition('_')[0]}.{path}" for path in paths if "_blocks" in path], 0.0, 1.0)
