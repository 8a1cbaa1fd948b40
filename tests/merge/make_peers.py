"""Writes golden/peers.safetensors: tiny unrelated checkpoints merged by the functions of other projects, on the CPU.

    python make_peers.py CLONES [FILE]

CLONES holds a checkout of every repository of `COMMITS` as OWNER+NAME. Functions and classes are taken out of their
files by name and run as they are: what stands around them there (models, data, logs of experiments) is not loaded.

Inputs: ``base/<leaf>``, ``e<i>/<leaf>``, ``diagonal/e<i>/<leaf>`` of Fisher matrices, ``gram/e<i>/<leaf>``,
``mask/e<i>/<leaf>`` (what `dare` keeps), ``a/e<i>/<module>`` and ``b/e<i>/<module>`` of adapters, and under ``net/``
those of mergers that look at rows. Outputs: ``<run>/<leaf>``, the merged leaf less base's.
"""

import __future__

import ast
import collections
import contextlib
import copy
import functools
import math
import sys
import time
from collections import OrderedDict, defaultdict
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

COMMITS = {
    "AntoAndGar/task_singular_vectors": "a6c9718",
    "EnnengYang/AdaMerging": "cea1165",
    "Tobeginwith/DC-Merge": "3c443e4",
    "apanariello4/core-space-merging": "85176fa",
    "apanariello4/merge-and-rebase": "345c570",
    "danielm1405/iso-merging": "d34010a",
    "duguodong7/pcb-merging": "5897888",
    "gstoica27/KnOTS": "baa35e8",
    "harveyhuang18/EMR_Merging": "cc225ec",
    "lyymuwu/SVC": "6ad2b31",
    "nathanielyvo/WUDI-Merging": "dc3cd12",
    "nik-dim/tall_masks": "d10af8b",
    "prateeky2806/ties-merging": "44e7891",
    "r-three/mats": "cb52c38",
    "tanganke/fusion_bench": "54c9e8c",
    "uiuctml/Localize-and-Stitch": "109d206",
    "wang-kee/LiNeS": "43a7bdd",
    "xiangchi-yuan/mrl": "e2d930d",
    "yule-BUAA/MergeLM": "6d49ad9",
}
COEF, SIZE = 0.3, 0.05
WEIGHTS = 0.5, -2.0, 1.3  # of the experts, where a run has some
SHAPES = {
    "net.blocks.0.fc.weight": (13, 7),
    "net.blocks.0.fc.bias": (13,),
    "net.blocks.1.fc.weight": (29, 4),
    "net.blocks.2.fc.weight": (2, 17),  # fewer rows than experts
    "net.conv": (2, 3, 5),
    "net.head.weight": (9, 16),
    "net.scale": (1,),
}
MODULES = {"first.weight": (11, 7), "second.weight": (5, 13)}  # (outputs, inputs)
NAMES = "e0", "e1", "e2"
FUSION = "tanganke/fusion_bench", "fusion_bench/method/"
KNOWN = {
    "torch": torch, "nn": nn, "math": math, "copy": copy, "deepcopy": copy.deepcopy, "defaultdict": defaultdict,
    "OrderedDict": OrderedDict, "partial": functools.partial, "tqdm": lambda rows, **_: rows, "time": time,
    "collections": collections, "timeit_context": contextlib.nullcontext,
}  # fmt: skip


def take(clones, repository, path, *names, **given):
    """Functions and classes of a file by globs of names, all without any; ``given`` is in place of what it imports."""
    source = (Path(clones) / repository.replace("/", "+") / path).read_text()
    kinds = ast.FunctionDef | ast.ClassDef
    body = ast.parse(source).body
    nodes = [n for n in body if isinstance(n, kinds) and any(fnmatch(n.name, name) for name in names or "*")]
    for node in nodes:  # registers of theirs
        node.decorator_list = [d for d in node.decorator_list if "register" not in ast.unparse(d)]
    constants = (n for n in body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant | ast.Set))
    nodes += [n for n in constants if isinstance(n.targets[0], ast.Name)]
    space = {**KNOWN, **given}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(nodes, []), path, "exec", flags=flags, dont_inherit=True), space)
    return SimpleNamespace(**space)


def flat(trees):
    """(experts, n) in the order of sorted names, as their state_dict_to_vector."""
    return torch.stack([torch.cat([tree[path].reshape(-1) for path in sorted(tree)]) for tree in trees])


def unflat(vector):
    leaves, start = {}, 0
    for path in sorted(SHAPES):
        size = math.prod(SHAPES[path])
        leaves[path] = vector[start : start + size].reshape(SHAPES[path])
        start += size
    return leaves


def inputs():
    generator = torch.Generator().manual_seed(11)

    def leaves(size, shapes=SHAPES):
        return {path: size * torch.randn(shape, generator=generator) for path, shape in shapes.items()}

    def uniform(shapes):
        return {path: 0.1 + torch.rand(shape, generator=generator) for path, shape in shapes.items()}

    base = leaves(10 * SIZE)
    experts = {name: {path: base[path] + delta for path, delta in leaves(SIZE).items()} for name in NAMES}
    fishers = {name: uniform(SHAPES) for name in NAMES}
    rows = {p: (40, shape[1]) for p, shape in SHAPES.items() if p.endswith("weight")}
    grams = {name: {p: x.T @ x for p, x in leaves(1.0, rows).items()} for name in NAMES}
    masks = {name: {p: u > 0.6 for p, u in uniform(SHAPES).items()} for name in NAMES}
    a = {name: leaves(0.3, {m: (2, shape[1]) for m, shape in MODULES.items()}) for name in NAMES}
    b = {name: leaves(0.3, {m: (shape[0], 2) for m, shape in MODULES.items()}) for name in NAMES}
    return SimpleNamespace(base=base, experts=experts, diagonal=fishers, gram=grams, mask=masks, a=a, b=b)


def by_matrices(clones, found):
    """Mergers of task vectors leaf by leaf, by run: the merged vector, {leaf: tensor}."""
    base, experts = found.base, list(found.experts.values())
    vectors = [{path: own[path] - base[path] for path in base} for own in experts]
    held = [SimpleNamespace(vector=vector) for vector in vectors]
    config = SimpleNamespace(
        device="cpu",
        num_tasks=3,
        DATASETS=list(NAMES),
        method=SimpleNamespace(common_space_fraction=0.8),
        right_only=False,
        target=-1,
    )
    tsv, iso = "src/utils/TSVM_utils.py", "src/utils/iso.py"
    with_file = functools.partial(take, clones)
    theirs = with_file("AntoAndGar/task_singular_vectors", tsv)
    yield "tsv_merge", theirs.compute_and_sum_svd_mem_reduction(held, config)
    yield "tsv_merge_lossless", theirs.compute_and_sum_svd_mem_reduction_lossless(held, config)
    theirs = with_file("danielm1405/iso-merging", iso)
    yield "iso_c", theirs.iso_c(held, config)
    yield "iso_cts", theirs.iso_cts(held, config)
    config.method.common_space_fraction = 0.4
    yield "iso_cts_40", theirs.iso_cts(held, config)
    dc = with_file("Tobeginwith/DC-Merge", "vision_fft_merge/src/utils/DC_utils.py", "dc_*", "keep_*", "ties_*")
    yield "dc_merge", dc.dc_merge(held, config)
    kept = dc.keep_topk_percent
    dc.dc_merge.__globals__["keep_topk_percent"] = lambda cores, _: kept(cores, 0.4)
    yield "dc_merge_40", dc.dc_merge(held, config)
    ram = with_file("xiangchi-yuan/mrl", "ram-main.py", "agentic_reinforcement_merge_rescale_v2")
    for run, factor in {"ram": 1.0, "ram_plus": 1.5}.items():
        merged = ram.agentic_reinforcement_merge_rescale_v2(base, vectors, 1.6 * SIZE, factor)
        yield run, _less(merged, base)
    emr = with_file("harveyhuang18/EMR_Merging", "merge_vit/src/main_emr_merging.py", "emr_merge")
    merged, masks, scales = emr.emr_merge(held)
    for i, name in enumerate(NAMES):
        yield f"emr_{name}", {path: merged[path] * masks[path][i] * scales[i] for path in merged}
    task_arithmetic = {path: sum(vector[path] for vector in vectors) * COEF for path in base}
    theirs = with_file("lyymuwu/SVC", "merge_func.py", "coef_cal_multi_ranks", "Align", "layer_wise_Align")
    config.alpha = 0.1
    yield "svc", theirs.layer_wise_Align(SimpleNamespace(vector=dict(task_arithmetic)), held, config).vector
    lines = with_file("wang-kee/LiNeS", "src/eval/eval.py", "LiNeS_scaling")
    yield "lines", lines.LiNeS_scaling(SimpleNamespace(vector=task_arithmetic), 0.5, 1.3, 3).vector
    wudi = with_file("nathanielyvo/WUDI-Merging", "vit/wudi_main.py", "get_redundant_task_vector")
    small = {
        p: torch.stack([v[p] for v in vectors]) * 0.1 for p in ("net.blocks.0.fc.weight", "net.blocks.1.fc.weight")
    }
    for steps in (300, 6000):
        yield f"wudi_{steps}", {p: wudi.get_redundant_task_vector(p, own, steps) * 10 for p, own in small.items()}


def by_merge_and_rebase(clones, found):
    """The functions of merge-and-rebase, leaf by leaf."""
    base, experts = found.base, list(found.experts.values())
    vectors = [{path: own[path] - base[path] for path in base} for own in experts]
    with_file = functools.partial(take, clones)
    functional = "src/merge_and_rebase/merge/methods/functional/"
    parts = vars(take(clones, "apanariello4/merge-and-rebase", functional + "_common.py"))
    for run, file, function, options in (
        ("wudi", "wudi.py", "wudi_impl", {"work_dtype": "float64"}),
        ("actmat", "actmerge.py", "actmerge_impl", {}),
        ("cart", "cart_merge.py", "cart_merge_impl", {"pruning_rank": 0.3, "scaling_coeffs": COEF}),
        ("iso_c_mr", "isoc_merge.py", "isoc_merge_impl", {}),
        ("tsv_merge_mr", "tsv_merge.py", "tsv_merge_impl", {}),
    ):
        impl = vars(with_file("apanariello4/merge-and-rebase", functional + file, **parts))[function]
        trees = experts if run == "cart" else vectors
        leaves = {p: [tree[p] for tree in trees] for p, shape in SHAPES.items() if len(shape) == 2}
        merged = {p: impl(own, torch.ones(3), options) for p, own in leaves.items()}
        yield run, {p: leaf - base[p] for p, leaf in merged.items()} if run == "cart" else merged
        if run in ("wudi", "iso_c_mr", "tsv_merge_mr"):
            yield f"{run}_weights", {p: impl(own, torch.tensor(WEIGHTS), options) for p, own in leaves.items()}
    parts["merge_functional"] = lambda _, *, matrices, weights, **__: sum(
        weight * matrix for weight, matrix in zip(weights, matrices, strict=True)
    )
    impl = vars(with_file("apanariello4/merge-and-rebase", functional + "dc_merge.py", Mapping=dict, **parts))[
        "dc_merge_impl"
    ]
    options = {"cover_merge_method": "ta", "whiten_eps": 1e-12}
    yield "dc_merge_mr", {p: impl(own, torch.ones(3), options) for p, own in leaves.items()}


def by_vectors(clones, found):
    """Mergers of all coordinates at once, by run."""
    base, experts = found.base, list(found.experts.values())
    rows, origin = flat(experts), flat([base])[0]
    vectors = rows - origin
    theirs = take(clones, "prateeky2806/ties-merging", "src/utils/merge_utils.py", "topk_values_mask", "resolve_sign",
                  "resolve_zero_signs", "disjoint_merge")  # fmt: skip
    for keep in (20, 37):
        trimmed, *_ = theirs.topk_values_mask(vectors.clone(), K=keep)
        signs = theirs.resolve_sign(trimmed, "mass")
        for how in ("sum", "mean"):
            yield f"ties_{keep}_{how}", unflat(COEF * theirs.disjoint_merge(trimmed, f"dis-{how}", signs))
    pcb = take(clones, "duguodong7/pcb-merging", "pcb-merging.py", "normalize", "clamp", "act", "PCB_merge")
    for ratio in (0.1, 0.3):
        yield f"pcb_{int(100 * ratio)}", unflat(pcb.PCB_merge(vectors, pcb_ratio=ratio)[0])
    theirs = take(clones, "nik-dim/tall_masks", "src/utils/tallmask_utils.py", "generate_task_masks",
                  "construct_consensus_mask", log_wandb_mask_sparsity=lambda _: None,
                  state_dict_to_vector=lambda tree, remove_keys: flat([tree])[0])  # fmt: skip
    masks = theirs.generate_task_masks(vectors, rows, origin, tall_mask_lambda=0.4)
    for i, name in enumerate(NAMES):
        yield f"tall_mask_{name}", unflat(masks[i] * vectors.sum(0))
    theirs.construct_consensus_mask.__globals__["load_tall_mask"] = lambda *_: dict(
        zip(NAMES, [unflat(m.float()) for m in masks], strict=True)
    )
    yield "consensus", unflat(COEF * theirs.construct_consensus_mask(base, 2, None) * vectors.sum(0))
    kept = flat([found.mask[name] for name in NAMES])
    mask = take(clones, "yule-BUAA/MergeLM", "model_merging_methods/mask_weights_utils.py", "mask_input_with_mask_rate")
    bernoulli, torch.bernoulli = torch.bernoulli, lambda _: 1 - kept.float()
    try:
        dropped = mask.mask_input_with_mask_rate(vectors, 0.5, True, "random")
    finally:
        torch.bernoulli = bernoulli
    yield "dare", unflat(COEF * dropped.sum(0))


def by_stitching(clones, found):
    """Localize-and-Stitch without data: masks of the largest changes, where experts share coordinates their mean."""

    class Model(nn.Module):
        def __init__(self, leaves):
            super().__init__()
            for place, leaf in enumerate(leaves.values()):
                self.register_parameter(str(place), nn.Parameter(leaf.clone()))

    base, experts = Model(found.base), [Model(own) for own in found.experts.values()]
    names, args = dict(base.named_parameters()), SimpleNamespace(sparsity=0.4, sigmoid_bias=5)
    theirs = take(clones, "uiuctml/Localize-and-Stitch", "localize_utils.py", "Localizer", "Stitcher")
    masks = [
        theirs.Localizer(names, Model(found.base), base, own, None, None, args).interpolate_model(True, True)[0]
        for own in experts
    ]
    merged = theirs.Stitcher(names, Model(found.base), base, experts, masks).interpolate_models()
    yield "localize_and_stitch", _less(dict(zip(found.base, merged.parameters(), strict=True)), found.base)


def by_statistics(clones, found):
    """Fisher and RegMean of given statistics."""
    base, fishers = found.base, [found.diagonal[name] for name in NAMES]
    ops = vars(take(clones, "r-three/mats", "src/merging/utils/model_ops.py"))
    ops |= vars(take(clones, "r-three/mats", "src/merging/utils/model_utils.py", "scale_nonDiagonalElements"))
    quiet = SimpleNamespace(info=lambda _: None)
    file, named = "src/merging/diagonal_fisherMerging.py", {"getDataset_fromCheckpointFilepath": lambda name: name}
    theirs = take(clones, "r-three/mats", file, "diagonal_fisherMerging", **ops, **named, logging=quiet)
    merged, _ = theirs.diagonal_fisherMerging(1.0, found.experts, found.diagonal)
    yield "fisher_plain", {path: leaf - base[path] for path, leaf in merged.items()}
    theirs = take(clones, "r-three/mats", "src/merging/regmean.py", "regmean", **ops, **named, logging=quiet)
    grams = {name: {p.removesuffix(".weight"): gram for p, gram in own.items()} for name, own in found.gram.items()}
    merged, _ = theirs.regmean(0.9, found.experts, grams)
    yield "reg_mean_mats", {path: leaf - base[path] for path, leaf in merged.items()}
    repository, method = FUSION
    theirs = take(clones, repository, method + "fisher_merging/fisher_merging.py", "merging_with_fisher_weights",
                  "get_models_fisher_norm")  # fmt: skip
    values = {path: [own[path] for own in found.experts.values()] for path in base}
    merged = theirs.merging_with_fisher_weights(values, fishers, torch.ones(3) / 3, True, 1e-6)
    yield "fisher", {path: leaf - base[path] for path, leaf in merged.items()}
    theirs = take(clones, repository, method + "regmean/regmean.py", "reduce_non_diagonal_elements",
                  "merging_with_regmean_weights")  # fmt: skip
    merged = theirs.merging_with_regmean_weights(values, [grams[name] for name in NAMES], 0.9)
    yield "reg_mean", {path: leaf - base[path] for path, leaf in merged.items()}


def by_fusion_bench(clones, found):
    """FusionBench's own versions of what needs no data."""
    repository, method = FUSION
    base, experts = found.base, list(found.experts.values())
    vectors = [{path: own[path] - base[path] for path in base} for own in experts]
    file = functools.partial(take, clones, repository)
    arithmetic = vars(file("fusion_bench/utils/state_dict_arithmetic.py", "*state_dict*", "_validate*"))
    add = arithmetic["state_dict_add"]
    yield "fb_simple_average", _less(arithmetic["state_dict_avg"](experts), base)
    weights = [0.5, 2.0, 0.3]
    yield "fb_weighted_average", _less(arithmetic["state_dict_weighted_sum"](experts, weights), base)
    summed = arithmetic["state_dict_mul"](arithmetic["state_dict_sum"](vectors), COEF)
    yield "fb_task_arithmetic", _less(add(base, summed), base)
    yield "fb_magmax", file(method + "magmax/magmax.py", "_magmax_select")._magmax_select(vectors)
    slerp = file(method + "slerp/slerp_utils.py")
    yield "fb_slerp", {p: slerp.slerp(0.3, experts[0][p], experts[1][p]) - base[p] for p in base}
    stock = file(method + "model_stock/model_stock.py", "compute_angle", "compute_ratio", "merge_weights",
                 np=__import__("numpy"))  # fmt: skip
    near = [experts[0], {p: (experts[0][p] + experts[1][p]) / 2 for p in base}]
    ratios = stock.compute_ratio(stock.compute_angle(*near, base))
    yield "fb_model_stock", _less(stock.merge_weights(*near, base, ratios), base)
    utils = vars(file(method + "task_singular_vector/utils/TSVM_utils.py"))
    yield "fb_tsv_merge", utils["compute_and_sum_svd_mem_reduction"](vectors, accelerator="cpu")
    iso = file(method + "isotropic_merging/iso_utils.py")
    yield "fb_iso_c", iso.iso_c(vectors, accelerator="cpu")
    yield "fb_iso_cts", iso.iso_cts(vectors, 0.8, accelerator="cpu")
    emr = file(method + "emr_merging/utils.py", "_sign", "emr_merge", state_dict_sum=arithmetic["state_dict_sum"])
    merged, masks, scales = emr.emr_merge(vectors)
    yield "fb_emr_e1", {path: merged[path] * masks[path][1] * scales[1] for path in merged}
    ties = file(method + "ties_merging/ties_merging_utils.py")
    rows = flat(vectors)
    yield "fb_ties", unflat(COEF * ties.ties_merging(rows, reset_thresh=20, merge_func="sum"))
    kept, drop = flat([found.mask[name] for name in NAMES]), file(method + "dare/utils.py")
    like, torch.rand_like = torch.rand_like, lambda _: kept.float()
    try:
        param = nn.Parameter(rows.clone(), requires_grad=False)
        drop.param_random_drop_(param, 0.5, rescale=True)
    finally:
        torch.rand_like = like
    # a threshold above the share that is kept trims nothing
    yield "fb_dare_ties", unflat(COEF * ties.ties_merging(param.data, reset_thresh=85, merge_func="sum"))
    tall = file(method + "tall_mask/task_arithmetic.py", "generate_task_masks", **arithmetic)
    total = arithmetic["state_dict_sum"](vectors)
    zeros = {path: torch.zeros_like(leaf) for path, leaf in base.items()}
    found_mask = tall.generate_task_masks(total, vectors[1], zeros, 0.4)
    yield "fb_tall_mask_e1", {path: found_mask[path] * total[path] for path in total}
    svc = file(method + "singular_value_calibration/utils.py")
    calibrate = svc.subspace_consistency_spectral_calibration_accelerated
    matrices = [p for p, shape in SHAPES.items() if len(shape) == 2]
    merged = {
        p: calibrate(base[p], [own[p] for own in experts], base[p] + COEF * total[p], 0.1, torch.device("cpu"))
        for p in matrices
    }
    yield "fb_svc", _less(merged, base)


def by_sequence(clones, found):
    """OPCM, which takes one expert after the other, on a model whose leaves are those of the checkpoints."""
    repository, method = FUSION
    linear = {path: path.removesuffix(".weight") for path, shape in SHAPES.items() if len(shape) == 2}

    class Leaf(nn.Module):
        def __init__(self, leaf):
            super().__init__()
            self.value = nn.Parameter(leaf.clone())

    def name_of(path):
        return str(list(SHAPES).index(path))

    def model_of(leaves):
        model = nn.Module()
        for path, leaf in leaves.items():
            layer = nn.Linear(*leaf.shape[::-1], bias=False) if path in linear else Leaf(leaf)
            if path in linear:
                layer.weight.data = leaf.clone()
            model.add_module(name_of(path), layer)
        return model

    file = functools.partial(take, clones, repository)
    tools = vars(file("fusion_bench/utils/parameters.py", "state_dict_to_vector"))
    tools |= vars(file("fusion_bench/utils/state_dict_arithmetic.py", "state_dict_sub", "_validate*"))
    tools |= vars(file("fusion_bench/models/utils.py", "is_leaf_module"))
    tools |= vars(file(method + "opcm/utils.py", **tools))
    parents = {name: type(name, (), {}) for name in ("LightningFabricMixin", "SimpleProfilerMixin", "BaseAlgorithm")}
    theirs = file(method + "opcm/opcm.py", "OPCMForCLIP", **parents, cast=lambda _, pool: pool,
                  CLIPVisionModelTaskPool=None, np=__import__("numpy"), **tools)  # fmt: skip

    class Ours(theirs.OPCMForCLIP):
        """Stands in for the program that runs it."""

        _program, log_dir = SimpleNamespace(taskpool=SimpleNamespace(_test_datasets={})), None
        fabric = SimpleNamespace(device="cpu", log=lambda *_, **__: None)

        def profile(self, _):
            return contextlib.nullcontext()

        def print_profile_summary(self): ...

    pool = SimpleNamespace(
        model_names=list(NAMES), load_pretrained_model=lambda: model_of(found.base),
        load_model=lambda name: model_of(found.experts[name]),
    )  # fmt: skip
    for run, share in {"opcm": 0.5, "opcm_70": 0.7}.items():
        merged = Ours(share, shuffle_order=False, save_on_every_step=False).run(pool).state_dict()
        leaves = {path: merged[name_of(path) + (".weight" if path in linear else ".value")] for path in SHAPES}
        yield run, _less(leaves, found.base)


def _less(tree, base):
    return {path: leaf - base[path] for path, leaf in tree.items()}


def by_factors(clones, found):
    """Adapters in coordinates that they share."""
    zeros = {module: torch.zeros(shape) for module, shape in MODULES.items()}

    class Model(nn.Module):
        def __init__(self, leaves, handler):
            super().__init__()
            for module, leaf in leaves.items():
                self.add_module(module.split(".")[0], nn.Linear(*leaf.shape[::-1], bias=False))
                self.get_parameter(module).data = leaf.clone()
            self.requires_grad_(False)
            self.handler = handler

    def model(name):
        factors = OrderedDict((module, (found.a[name][module], found.b[name][module])) for module in sorted(MODULES))
        dense = OrderedDict((module, b @ a) for module, (a, b) in factors.items())
        handler = SimpleNamespace(get_ft_parameters=lambda: dense, get_ft_ab_parameters=lambda: factors)
        return Model(zeros, handler)

    for repository, space in (("gstoica27/KnOTS", "knots"), ("apanariello4/core-space-merging", "core_space")):
        masks = vars(take(clones, repository, "masking_ops.py"))
        rules = vars(take(clones, repository, "merging_functions.py", chunked_sum=masks["chunked_sum"]))
        theirs = take(clones, repository, "task_merger.py", einops=None, masked_merge=masks["masked_merge"],
                      get_mask_fn=lambda name, masks=masks: masks[f"{name}_masking"], get_merging_fn=None,
                      tv_merging=rules["tv_merging"], ties_merging=rules["ties_merging"])  # fmt: skip
        start = Model(zeros, SimpleNamespace(get_ft_parameters=lambda: dict(zeros)))
        options = {"param_handler": lambda own: own.handler, "device": "cpu", "merge_config": {}}
        if space == "knots":
            merger = theirs.SVDMerger([model(name) for name in NAMES], start, **options)
            for run, config in {
                "sum": {"merge_method": "tv", "topK": 100, "merging_type": "sum"},
                "ties": {"merge_method": "ties", "topK": 37, "merging_type": "mean"},
            }.items():
                merger.transform(config)
                yield f"knots_{run}", merger.merge(config).state_dict()
            continue
        merger = theirs.MatrixPerLayerMerger([model(name) for name in NAMES], start, **options)
        merger.set_scaling_coeffs(1.0)
        for run, config in {
            "sum": {"merge_method": "sum"},
            "iso_c": {"merge_method": "sum", "isotropize": True},
            "tsv_merge": {"merge_method": "tsv"},
            "ties": {"merge_method": "ties", "topK": 37},
        }.items():
            yield f"core_space_{run}", merger.merge({"merge_space": "core", **config}).state_dict()


class Stack(nn.Module):
    """A linear layer and two blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def rows_of_tasks():
    """Base, experts, rows and heads of the tasks."""
    generator = torch.Generator().manual_seed(12)
    like = Stack().state_dict()
    base = {path: torch.randn(leaf.shape, generator=generator) for path, leaf in like.items()}
    experts = {
        name: {path: leaf + 0.5 * torch.randn(leaf.shape, generator=generator) for path, leaf in base.items()}
        for name in NAMES
    }
    rows = {name: torch.randn(24, 3, generator=generator) for name in NAMES}
    heads = {name: torch.randn(5, 4, generator=generator) for name in NAMES}
    return SimpleNamespace(base=base, experts=experts, rows=rows, heads=heads)


def module_of(leaves):
    module = Stack()
    module.load_state_dict(leaves)
    return module.requires_grad_(False)


def by_rows(clones, found):
    """AdaMerging's coefficients, (experts, leaves), after each of some steps; RegMean++ of the stack."""
    base, experts = found.base, found.experts

    def head(_, name):
        layer = nn.Linear(4, 5, bias=False)
        layer.weight.data = found.heads[name].clone()
        return layer

    names = "AdaMerging", "softmax_entropy", "make_functional", "load_weights", "del_attr", "set_attr", "ModelWrapper"
    for run, file in {"layer": "main_layer_wise_adamerging.py", "task": "main_task_wise_adamerging.py"}.items():
        theirs = take(clones, "EnnengYang/AdaMerging", f"src/{file}", *names, args=SimpleNamespace(device="cpu"),
                      get_classification_head=head)  # fmt: skip
        model = theirs.ModelWrapper(module_of(base))
        _, order = theirs.make_functional(model)
        assert [name.removeprefix("model.") for name in order] == list(base)
        leaves = [tuple(base.values()), *(tuple(own[p] - base[p] for p in base) for own in experts.values())]
        merged = theirs.AdaMerging(leaves, model, order, list(NAMES))
        # the optimizer of the script, which is no function there
        adam = torch.optim.Adam(merged.collect_trainable_params(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
        for _ in range(60):
            loss = sum(theirs.softmax_entropy(merged(found.rows[name], name)).mean(0) for name in NAMES)
            adam.zero_grad()
            loss.backward()
            adam.step()
        coefs = merged.lambdas()[:, 1:].detach().T
        yield f"adamerging_{run}", {"coefs": coefs, "entropy": loss.detach().reshape(1)}

    repository, method = FUSION
    names = "reduce_non_diagonal_elements", "regmean_params_merge", "merging_with_regmean_weights"
    parts = vars(take(clones, repository, method + "regmean_plusplus/regmean_plusplus.py", *names))
    nothing = contextlib.nullcontext
    profiler = type("Profiler", (), {"profile": lambda *_: nothing(), "print_profile_summary": lambda _: None})
    pool = type("Pool", (), {
        "named_models": lambda _: {name: module_of(own) for name, own in experts.items()}.items(),
        "load_pretrained_model": lambda _: module_of(base),
        "load_train_dataset": lambda _, name: found.rows[name],
    })  # fmt: skip
    parent = take(clones, repository, method + "regmean_plusplus/regmean_plusplus.py", "RegMeanAlgorithmPlusPlus",
                  SimpleProfilerMixin=profiler, BaseAlgorithm=object, BaseModelPool=pool, **parts,
                  regmean_utils=take(clones, repository, method + "regmean/utils.py"))  # fmt: skip
    child = take(clones, repository, method + "regmean_plusplus/clip_regmean_plusplus.py",
                 "RegMeanAlgorithmForCLIPPlusPlus", RegMeanAlgorithmPlusPlus=parent.RegMeanAlgorithmPlusPlus,
                 CLIPClassificationMixin=type("Mixin", (), {}), Tensor=torch.Tensor, cast=lambda _, x: x)  # fmt: skip

    class Ours(child.RegMeanAlgorithmForCLIPPlusPlus):
        """Its abstract methods, for the stack in place of CLIP."""

        config = {"weight_transpose": True}  # noqa: RUF012
        reduce_non_diagonal_ratio, exclude_param_names_regex = 0.7, []
        fabric = SimpleNamespace(setup=lambda layer: layer)

        def __init__(self): ...

        def on_regmean_start(self): ...

        def merge_embedding_layer(self, models_to_merge_dict):
            trees = [model.state_dict() for model in models_to_merge_dict.values()]
            return {"embed.weight": torch.stack([own["embed.weight"] for own in trees]).mean(0)}

        def get_input_for_first_layer(self, model, train_dataset):
            return [model.embed(train_dataset)]

        def get_layers(self, model):
            return model.layers

        def update_merged_params_dict(self, merged_params_dict, new_merged_params, layer_idx):
            return merged_params_dict | {f"layers.{layer_idx}.{p}": leaf for p, leaf in new_merged_params.items()}

        def layer_batches_forward(self, layer, batches_input):
            return [layer(batch) for batch in batches_input]

    yield "reg_mean_plus", _less(Ours().run(pool()).state_dict(), base)


def by_transport(clones, found):
    """Changes of the first expert of the stack moved to the second one, as if that were a base."""
    old, new, rows = found.base, found.experts["e1"], found.rows["e0"]
    delta = {path: leaf - old[path] for path, leaf in found.experts["e0"].items()}
    methods = "src/merge_and_rebase/rebase/methods/"
    modes = {"VALID_MASK_MODES": ("normal", "force")}
    mask = take(clones, "apanariello4/merge-and-rebase", methods + "gradfix.py", "apply_gradfix_mask", **modes)
    yield "gradfix_mr", mask.apply_gradfix_mask(found.experts["e2"], delta)  # any numbers have signs
    names = "_compute_procrustes_map_from_cov", "_transport_weight", "_transport_bias"
    theirs = take(clones, "apanariello4/merge-and-rebase", methods + "theseus.py", *names)
    seen = [activations(tree, rows) for tree in (old, new)]
    moved = {}
    for path, leaf in delta.items():
        layer, _, kind = path.rpartition(".")
        ins, outs = (
            theirs._compute_procrustes_map_from_cov(seen[0][layer, side].mT @ seen[1][layer, side])
            for side in ("in", "out")
        )
        weight = kind == "weight"
        moved[path] = (
            theirs._transport_weight(leaf, ins, outs, key=path) if weight else theirs._transport_bias(leaf, outs)
        )
    yield "theseus_mr", moved


def activations(tree, rows):
    """Inputs and outputs of the stack's linear layers, float64."""
    module, seen = module_of(tree).double(), {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):

            def hook(_, inputs, output, name=name):
                seen[name, "in"], seen[name, "out"] = (x.detach().reshape(-1, x.shape[-1]) for x in (inputs[0], output))

            layer.register_forward_hook(hook)
    module(rows.double())
    return seen


def main():
    torch.set_num_threads(1)
    clones = sys.argv[1]
    out = {}

    def put(prefix, leaves):
        out.update({f"{prefix}/{path}": leaf.detach().clone().contiguous() for path, leaf in leaves.items()})

    torch.Tensor.cuda = lambda own, *_: own  # theirs ask for a device
    found, tasks = inputs(), rows_of_tasks()
    put("base", found.base)
    for name in NAMES:
        put(name, found.experts[name])
        for kind in ("diagonal", "gram", "mask", "a", "b"):
            put(f"{kind}/{name}", getattr(found, kind)[name])
        put(f"net/{name}", tasks.experts[name])
    put("net/base", tasks.base)
    put("net/rows", tasks.rows)
    put("net/heads", tasks.heads)
    runs = (
        *(by_matrices, by_merge_and_rebase, by_vectors, by_stitching),
        *(by_statistics, by_fusion_bench, by_sequence, by_factors),
    )
    for run, leaves in (pair for part in runs for pair in part(clones, found)):
        put(run, leaves)
    for run, leaves in (pair for part in (by_rows, by_transport) for pair in part(clones, tasks)):
        put(run, leaves)
    save_file(out, sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent / "golden" / "peers.safetensors")


if __name__ == "__main__":
    main()
