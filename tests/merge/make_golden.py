"""Writes golden/mergekit.safetensors: one tiny Llama-like family merged by mergekit 0.1.5, offline and in memory.

    pip install torch==2.13.0 && pip install mergekit==0.1.5 && python make_golden.py

Inputs: ``<dtype>/base/<leaf>`` and ``<dtype>/e<i>/<leaf>``. Outputs, always computed in float32 and rounded once:
``<dtype>/<run>/<leaf>`` for the runs linear (weights 1), task_arithmetic (lambda 0.3), ties_mean and ties_sum (density
0.3, lambda 0.3, normalize true and false). In float32 alone: dare_linear (density 0.5, lambda 0.3, unscaled) and its
masks, ``dare_linear/mask/e<i>/<leaf>``; della (density 0.5, epsilon 0.07), of which only the keep probabilities are
stored, ``della/keep/e<i>/<leaf>``: mergekit does not divide by them.
"""

from pathlib import Path

import torch
from mergekit.merge_methods.api import merge_state_dicts
from safetensors.torch import save_file

COEF, DENSITY = 0.3, 0.3
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.norm.weight": (16,),
}


def family(dtype):
    generator = torch.Generator().manual_seed(0)

    def leaves(scale):
        return {path: scale * torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}

    base = leaves(0.02)
    experts = {f"e{i}": {path: base[path] + delta for path, delta in leaves(1e-3).items()} for i in range(3)}
    return {
        name: {path: leaf.to(dtype) for path, leaf in tree.items()} for name, tree in {"base": base, **experts}.items()
    }


def merge(models, method, dtype, **parameters):
    if method == "linear":
        models = {name: tree for name, tree in models.items() if name != "base"}
    return merge_state_dicts(
        models,
        method,
        parameters={"weight": 1.0, **parameters},
        base=None if method == "linear" else "base",
        dtype=torch.float32,
        out_dtype=dtype,
    )


def recorded(models, method, **parameters):
    """The merge, and the (probabilities, mask) of every draw by expert and leaf: mergekit draws leaf by leaf."""
    draws, bernoulli = [], torch.bernoulli

    def record(probabilities, *args, **kwargs):
        mask = bernoulli(probabilities, *args, **kwargs)
        draws.append((probabilities.clone(), mask.clone()))
        return mask

    torch.bernoulli = record
    try:
        torch.manual_seed(0)
        merged = merge(models, method, torch.float32, **parameters)
    finally:
        torch.bernoulli = bernoulli
    slots = [(f"e{i}", path) for path in SHAPES for i in range(3)]
    assert len(draws) == len(slots)
    return merged, dict(zip(slots, draws, strict=True))


def main():
    out = {}

    def put(prefix, leaves):
        out.update({f"{prefix}/{path}": leaf.contiguous() for path, leaf in leaves.items()})

    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        models = family(dtype)
        for model, leaves in models.items():
            put(f"{name}/{model}", leaves)
        put(f"{name}/linear", merge(models, "linear", dtype))
        put(f"{name}/task_arithmetic", merge(models, "task_arithmetic", dtype, **{"lambda": COEF}))
        for run, mean in {"ties_mean": True, "ties_sum": False}.items():
            put(f"{name}/{run}", merge(models, "ties", dtype, density=DENSITY, normalize=mean, **{"lambda": COEF}))

    models = family(torch.float32)
    options = {"density": 0.5, "rescale": False, "lambda": COEF}
    merged, draws = recorded(models, "dare_linear", normalize=False, **options)
    put("float32/dare_linear", merged)
    put(
        "dare_linear/mask", {f"{e}/{path}": mask.bool().reshape(SHAPES[path]) for (e, path), (_, mask) in draws.items()}
    )
    _, draws = recorded(models, "della", epsilon=0.07, **options)
    put("della/keep", {f"{e}/{path}": keep.reshape(SHAPES[path]) for (e, path), (keep, _) in draws.items()})
    save_file(out, Path(__file__).parent / "golden" / "mergekit.safetensors")


if __name__ == "__main__":
    main()
