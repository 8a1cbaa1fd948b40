"""Writes golden/mergekit.safetensors: one tiny Llama-like family merged by mergekit 0.1.5, offline and in memory.

    pip install torch==2.13.0 && pip install mergekit==0.1.5 && python make_golden.py [FILE]

Inputs: ``<dtype>/base/<leaf>`` and ``<dtype>/e<i>/<leaf>``. Outputs, always computed in float32 and rounded once:
``<dtype>/<run>/<leaf>`` for the runs linear (weights 1), task_arithmetic (lambda 0.3), ties_mean and ties_sum (density
0.3, lambda 0.3, normalize true and false). In float32 alone: dare_linear (density 0.5, lambda 0.3, unscaled) and its
masks, ``dare_linear/mask/e<i>/<leaf>``; della (density 0.5, epsilon 0.07), of which only the keep probabilities are
stored, ``della/keep/e<i>/<leaf>``: mergekit does not divide by them.

For the mergers beyond the paper, in both dtypes: linear_weighted (weights 0.5, 2, 0.3, normalized) and linear_sum (the
same, not normalized), slerp (e0 as base, e1, t 0.3) and slerp_line (base, e0, t 0.3 where the embedding of e0 is that
of base times 1.25, a parallel leaf), model_stock (of e0 and of the means of e0 with e1 and with e2), breadcrumbs
(density 0.625, gamma 0.125, lambda 0.3, unscaled). In float32 alone: dare_ties (density 0.5, lambda 0.3, unscaled),
whose masks are those of dare_linear.

Under ``random/<scale>``, for the scales large (task vectors of size 0.3) and small (1e-4), in float32: base, e0 to e3
and outputs of checkpoints that are not related to each other, of sizes that no share divides, where pairs of task
vectors have negative cosines: `UNRELATED`.
"""

import sys
from pathlib import Path

import torch
from mergekit.merge_methods.api import merge_state_dicts
from safetensors.torch import save_file

COEF, DENSITY = 0.3, 0.3
WEIGHTS = {"e0": 0.5, "e1": 2.0, "e2": 0.3}
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.norm.weight": (16,),
}

ODD = {"m": (13, 7), "tall": (29, 3), "wide": (2, 17), "bias": (5,), "one": (1,), "column": (3, 1), "cube": (2, 3, 5)}
SCALES = {"large": 0.3, "small": 1e-4}
PLAIN = {"normalize": False, "lambda": COEF}
# run -> method, parameters; of every expert, of e0 (one), of e0 and e1 (pairs), or of these without a base (alone)
UNRELATED = {
    "linear": ("linear", {"weight": 1.0}),
    "linear_weighted": ("linear", {"weight": WEIGHTS | {"e3": -0.4}}),
    "task_arithmetic": ("task_arithmetic", {"weight": 1.0, "lambda": COEF}),
    "ties_37": ("ties", {"weight": 1.0, "density": 0.37, "lambda": COEF}),
    "ties_9": ("ties", {"weight": 1.0, "density": 0.09, "lambda": COEF}),
    "breadcrumbs_37": ("breadcrumbs", {"weight": 1.0, "density": 0.37, "gamma": 0.11, "rescale": False, **PLAIN}),
    "breadcrumbs_85": ("breadcrumbs", {"weight": 1.0, "density": 0.85, "gamma": 0.05, "rescale": False, **PLAIN}),
    "model_stock": ("model_stock", {}),
    "model_stock_rows": ("model_stock", {"filter_wise": True}),
    "slerp": ("slerp", {"t": 0.3}),
    "nuslerp": ("nuslerp", {"weight": {"e0": 0.6, "e1": 0.2}}),
    "nuslerp_rows": ("nuslerp", {"weight": {"e0": 0.6, "e1": 0.2}, "nuslerp_flatten": False}),
    "nuslerp_columns": (
        "nuslerp", {"weight": {"e0": 0.6, "e1": 0.2}, "nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "karcher": ("karcher", {}),
    "multislerp": ("multislerp", {"weight": 1.0}),
    "multislerp_weighted": ("multislerp", {"weight": WEIGHTS | {"e3": 0.4}}),
    "multislerp_raw": ("multislerp", {"weight": WEIGHTS | {"e3": -2.8}, "normalize_weights": False}),
    "sce": ("sce", {}),
    "sce_37": ("sce", {"select_topk": 0.37}),
    "arcee_fusion": ("arcee_fusion", {}),
    "nearswap": ("nearswap", {"t": 5e-5}),
    "ram": ("ram", {"epsilon": 1e-4}),
    "ram_plus": ("ramplus_tl", {"epsilon": 1e-4}),
    "ram_plus_5": ("ramplus_tl", {"epsilon": 1e-4, "r": 0.3, "alpha": 5.0}),
}  # fmt: skip
ONE = ("nearswap",)
PAIRS = "slerp", "nuslerp", "nuslerp_rows", "nuslerp_columns", "arcee_fusion"
ALONE = "linear", "linear_weighted", "karcher", "slerp", "arcee_fusion"


def unrelated(scale):
    """Base, experts, and mergekit's runs on them, by name."""
    generator = torch.Generator().manual_seed(7)

    def leaves(size):
        return {path: size * torch.randn(shape, generator=generator) for path, shape in ODD.items()}

    base = leaves(10 * scale)  # small enough that no two changes are equal
    changes = [leaves(scale) for _ in range(4)]
    models = {f"e{i}": {path: base[path] + delta for path, delta in change.items()} for i, change in enumerate(changes)}
    models = {"base": base, **models}
    for run, (method, parameters) in UNRELATED.items():
        names = ["e0", "e1", "e2", "e3"][: 1 if run in ONE else 2 if run in PAIRS else 4]
        origin = "e0" if run in PAIRS and run in ALONE else None if run in ALONE else "base"
        chosen = {name: models[name] for name in (["base"] if origin == "base" else []) + names}
        models[run] = merge_state_dicts(chosen, method, parameters=parameters, base=origin, dtype=torch.float32)
    return models


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


def more(models, dtype):
    """Runs of the mergers beyond the paper, by name."""
    options = {"dtype": torch.float32, "out_dtype": dtype}
    experts = {name: tree for name, tree in models.items() if name != "base"}
    for name, normalize in {"linear_weighted": True, "linear_sum": False}.items():
        parameters = {"weight": WEIGHTS, "normalize": normalize}
        yield name, merge_state_dicts(experts, "linear", parameters=parameters, **options)
    embed = "model.embed_tokens.weight"
    line = {"e0": {**experts["e0"], embed: models["base"][embed] * 1.25}, "base": models["base"]}
    pairs = {"slerp": ("e0", {name: experts[name] for name in ("e0", "e1")}), "slerp_line": ("base", line)}
    for name, (base, pair) in pairs.items():
        yield name, merge_state_dicts(pair, "slerp", parameters={"t": 0.3}, base=base, **options)
    e0 = experts["e0"]
    near = {"base": models["base"], "e0": e0}
    for name in ("e1", "e2"):
        near[name] = {path: ((leaf.float() + experts[name][path].float()) / 2).to(dtype) for path, leaf in e0.items()}
    yield "model_stock", merge_state_dicts(near, "model_stock", parameters={}, base="base", **options)
    trimmed = {"density": 0.625, "gamma": 0.125, "rescale": False, "normalize": False, "lambda": COEF}
    yield "breadcrumbs", merge(models, "breadcrumbs", dtype, **trimmed)


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
        for run, merged in more(models, dtype):
            put(f"{name}/{run}", merged)

    for scale, size in SCALES.items():
        for name, leaves in unrelated(size).items():
            put(f"random/{scale}/{name}", leaves)

    models = family(torch.float32)
    options = {"density": 0.5, "rescale": False, "lambda": COEF}
    merged, draws = recorded(models, "dare_linear", normalize=False, **options)
    put("float32/dare_linear", merged)
    put(
        "dare_linear/mask", {f"{e}/{path}": mask.bool().reshape(SHAPES[path]) for (e, path), (_, mask) in draws.items()}
    )
    merged, same = recorded(models, "dare_ties", normalize=False, **options)
    assert all(torch.equal(same[slot][1], mask) for slot, (_, mask) in draws.items())
    put("float32/dare_ties", merged)
    _, draws = recorded(models, "della", epsilon=0.07, **options)
    put("della/keep", {f"{e}/{path}": keep.reshape(SHAPES[path]) for (e, path), (keep, _) in draws.items()})
    save_file(out, sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "golden" / "mergekit.safetensors")


if __name__ == "__main__":
    main()
