"""What every merger owes: a file of mergers without an entry in ``RUNS`` fails."""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from smat_fn import merge, random, tree

KEY = random.key(5)
OTHERS = {"registry", "statistics", "adamerging", "reg_mean_plus"}  # the last two need data: no options of merge_by


def some(experts, count):
    """The first experts by name."""
    return {name: experts[name] for name in sorted(experts)[:count]}


def in_order(experts):
    """Experts by name."""
    return some(experts, len(experts))


def weighted(experts, total, normalize):
    """Weights that sum to ``total``: of equal experts the average is exact."""
    shares = {1: [1], 2: [0.5, 0.5], 3: [0.5, 0.25, 0.25], 4: [0.25] * 4}[len(experts)]
    weights = {name: total * share for name, share in zip(sorted(experts), shares, strict=True)}
    return merge.weighted_average(experts, weights=weights, normalize=normalize)


def drawn(name, path, shape):
    """Random numbers of an expert's leaf, the same whenever it is asked for."""
    return random.uniform(random.fold_in(random.fold_in(KEY, name), path), shape)


def fishers(base, experts):
    """A diagonal of each expert."""
    leaves = {path: leaf for path, leaf in tree.flatten(base).items() if leaf.is_floating_point()}
    return {str(name): {path: drawn(str(name), path, leaf.shape) for path, leaf in leaves.items()} for name in experts}


def grams(base, experts):
    """Gram matrices of each expert, of 9 inputs a layer; of two layers some inputs are 0."""

    def gram(name, path, size):
        rows = drawn(name, path, (9, size)) - 0.5
        if path != "matrix":
            rows[:, ::2] = 0
        return (rows.double().mT @ rows.double() / 9).float()  # which torch.autocast does not round

    shapes = {path: leaf.shape[1] for path, leaf in tree.flatten(base).items() if leaf.ndim == 2 and leaf.numel()}
    return {str(name): {path: gram(str(name), path, size) for path, size in shapes.items()} for name in experts}


# module name -> runs(base, experts, key) by label, every option at least once
RUNS = {
    "weight_average": {"wa": lambda base, experts, key: merge.weight_average(experts)},
    "task_arithmetic": {"ta": lambda base, experts, key: merge.task_arithmetic(base, experts, coef=0.5)},
    "ties": {
        f"ties-{scope}-{aggregate}": lambda base, experts, key, scope=scope, aggregate=aggregate: merge.ties(
            base, experts, coef=0.5, keep=0.4, scope=scope, aggregate=aggregate
        )
        for scope in ("global", "tensor")
        for aggregate in ("sum", "mean")
    }
    | {
        "ties-all": lambda base, experts, key: merge.ties(
            base, experts, coef=0.5, keep=0.4, scope="tensor", elect=False, aggregate="mean"
        )
    },
    "dare": {"dare": lambda base, experts, key: merge.dare(key, base, experts, coef=0.5, drop_prob=0.5)},
    "della": {
        "della": lambda base, experts, key: merge.della(key, base, experts, coef=0.5, drop_prob=0.4, window=0.2),
        "della-flat": lambda base, experts, key: merge.della(key, base, experts, coef=0.5, drop_prob=0.5, window=0.0),
    },
    "weighted_average": {
        "weighted": lambda base, experts, key: weighted(experts, 2, True),
        "weighted-sum": lambda base, experts, key: weighted(experts, 1, False),
    },
    "wise_ft": {"wise-ft": lambda base, experts, key: merge.wise_ft(base, some(experts, 1), coef=0.5)},
    "slerp": {"slerp": lambda base, experts, key: merge.slerp(some(experts, 2), coef=0.5)},
    "metagpt": {"metagpt": lambda base, experts, key: merge.metagpt(base, experts, coef=0.5)},
    "model_stock": {
        "model-stock": lambda base, experts, key: merge.model_stock(base, experts, coef=0.5),
        "model-stock-rows": lambda base, experts, key: merge.model_stock(base, experts, coef=0.5, along="last"),
    },
    "dare_ties": {
        f"dare-ties-{aggregate}": lambda base, experts, key, aggregate=aggregate: merge.dare_ties(
            key, base, experts, coef=0.5, drop_prob=0.5, aggregate=aggregate
        )
        for aggregate in ("sum", "mean")
    },
    "breadcrumbs": {
        "breadcrumbs": lambda base, experts, key: merge.breadcrumbs(
            base, experts, coef=0.5, drop_smallest=0.4, drop_largest=0.1
        )
    },
    "magmax": {"magmax": lambda base, experts, key: merge.magmax(base, experts, coef=0.5)},
    "tsv_merge": {
        "tsv": lambda base, experts, key: merge.tsv_merge(base, experts, coef=0.5),
        "tsv-all": lambda base, experts, key: merge.tsv_merge(base, experts, coef=0.5, others="zero", share=1.0),
    },
    "iso_c": {"iso-c": lambda base, experts, key: merge.iso_c(base, experts, coef=0.5)},
    "iso_cts": {
        "iso-cts": lambda base, experts, key: merge.iso_cts(base, experts, coef=0.5),
        "iso-cts-zero": lambda base, experts, key: merge.iso_cts(base, experts, coef=0.5, others="zero", common=0.3),
    },
    "wudi": {
        "wudi": lambda base, experts, key: merge.wudi(base, experts, coef=0.5),
        "act-mat": lambda base, experts, key: merge.wudi(base, experts, coef=0.5, ridge=0.0, norms=False),
    },
    "nuslerp": {
        f"nuslerp-{along}": lambda base, experts, key, along=along: merge.nuslerp(
            base, some(experts, 2), coef=0.5, t=0.25, along=along
        )
        for along in ("leaf", "first", "last")
    },
    "karcher": {"karcher": lambda base, experts, key: merge.karcher(experts)},
    "sce": {
        "sce": lambda base, experts, key: merge.sce(base, experts, coef=0.5),
        "sce-half": lambda base, experts, key: merge.sce(base, experts, coef=0.5, density=0.5, floor=0.0),
    },
    "arcee_fusion": {"arcee": lambda base, experts, key: merge.arcee_fusion(some(experts, 2), coef=0.5)},
    "multislerp": {"multislerp": lambda base, experts, key: merge.multislerp(base, experts, coef=0.5)},
    "cart": {"cart": lambda base, experts, key: merge.cart(experts, coef=0.5, share=0.3)},
    "consensus": {"consensus": lambda base, experts, key: merge.consensus(base, experts, coef=0.5, ratio=0.4, least=1)},
    "svc": {"svc": lambda base, experts, key: merge.svc(base, in_order(experts), coef=0.5, alpha=0.2)},
    "emr": {"emr": lambda base, experts, key: merge.emr(base, experts, coef=0.5, task=min(experts))},
    "fisher": {
        "fisher": lambda base, experts, key: merge.fisher(base, experts, fishers(base, experts), coef=0.5),
        "fisher-raw": lambda base, experts, key: merge.fisher(
            base, experts, fishers(base, experts), coef=0.5, normalize=False, weights={min(experts): 0.5}
        ),
    },
    "reg_mean": {
        "reg-mean": lambda base, experts, key: merge.reg_mean(base, experts, grams(base, experts), coef=0.5),
        "reg-mean-full": lambda base, experts, key: merge.reg_mean(
            base, experts, grams(base, experts), coef=0.5, scale=1.0, others="zero"
        ),
    },
    "pcb": {
        "pcb": lambda base, experts, key: merge.pcb(base, experts, coef=0.5),
        "pcb-half": lambda base, experts, key: merge.pcb(base, experts, coef=0.5, ratio=0.5, clip=0.1),
    },
    "nearswap": {"nearswap": lambda base, experts, key: merge.nearswap(base, some(experts, 1), t=0.1, coef=0.5)},
    "ram": {
        "ram": lambda base, experts, key: merge.ram(base, experts, coef=0.5),
        "ram-plus": lambda base, experts, key: merge.ram(base, experts, coef=0.5, threshold=0.1, boost=0.2),
        "ram-tensor": lambda base, experts, key: merge.ram(
            base, experts, coef=0.5, threshold=0.1, boost=0.2, scope="tensor"
        ),
    },
    "opcm": {
        "opcm": lambda base, experts, key: merge.opcm(base, in_order(experts), coef=0.5),
        "opcm-raw": lambda base, experts, key: merge.opcm(base, in_order(experts), coef=0.5, share=0.2, norms=False),
    },
    "dc_merge": {
        "dc": lambda base, experts, key: merge.dc_merge(base, experts, coef=0.5),
        "dc-mean": lambda base, experts, key: merge.dc_merge(
            base, experts, coef=0.5, others="zero", keep=0.5, elect=False, smooth="mean"
        ),
        "dc-linear": lambda base, experts, key: merge.dc_merge(
            base, experts, coef=0.5, share=0.4, keep=0.5, smooth="linear"
        ),
    },
    "tall_mask": {
        "tall-mask": lambda base, experts, key: merge.tall_mask(base, experts, coef=0.5, task=min(experts), ratio=0.4)
    },
}
SCALED = {  # by file, of mergers whose weights multiply task vectors: other options
    **{name: {} for name in ("magmax", "tsv_merge", "iso_c", "iso_cts", "wudi", "dc_merge", "opcm", "pcb", "sce")},
    "consensus": {"ratio": 0.4, "least": 1},
}


def with_weights(name, base, experts, **options):
    """A run in which one expert is halved; the order of the experts plays a part in opcm."""
    return getattr(merge, name)(base, in_order(experts), weights={min(experts): 0.5}, **options)


for name, own in SCALED.items():
    RUNS[name][f"{name}-weights"] = lambda base, experts, key, name=name, own=own: with_weights(
        name, base, experts, coef=0.5, **own
    )
ALL = {name: run for runs in RUNS.values() for name, run in runs.items()}
RANDOM = ["dare", "della", "della-flat", "dare-ties-sum", "dare-ties-mean"]
NO_BASE = {"wa", "weighted", "weighted-sum", "slerp", "karcher", "arcee", "cart"}
NUSLERP = {"nuslerp-leaf", "nuslerp-first", "nuslerp-last"}
TWO_OR_MORE = {"slerp", "model-stock", "model-stock-rows", "arcee", "sce-half", "svc", *NUSLERP}
VECTORS = {  # by label, of every run with a base
    "ta": lambda base, experts, key: merge.task_arithmetic_vector(base, experts),
    "ties-global-sum": lambda base, experts, key: merge.ties_vector(base, experts, keep=0.4),
    "ties-global-mean": lambda base, experts, key: merge.ties_vector(base, experts, keep=0.4, aggregate="mean"),
    "ties-tensor-sum": lambda base, experts, key: merge.ties_vector(base, experts, keep=0.4, scope="tensor"),
    "ties-tensor-mean": lambda base, experts, key: merge.ties_vector(
        base, experts, keep=0.4, scope="tensor", aggregate="mean"
    ),
    "ties-all": lambda base, experts, key: merge.ties_vector(
        base, experts, keep=0.4, scope="tensor", elect=False, aggregate="mean"
    ),
    "dare": lambda base, experts, key: merge.dare_vector(key, base, experts, drop_prob=0.5),
    "della": lambda base, experts, key: merge.della_vector(key, base, experts, drop_prob=0.4, window=0.2),
    "della-flat": lambda base, experts, key: merge.della_vector(key, base, experts, drop_prob=0.5, window=0.0),
    "wise-ft": lambda base, experts, key: merge.wise_ft_vector(base, some(experts, 1)),
    "metagpt": lambda base, experts, key: merge.metagpt_vector(base, experts),
    "model-stock": lambda base, experts, key: merge.model_stock_vector(base, experts),
    "model-stock-rows": lambda base, experts, key: merge.model_stock_vector(base, experts, along="last"),
    "dare-ties-sum": lambda base, experts, key: merge.dare_ties_vector(key, base, experts, drop_prob=0.5),
    "dare-ties-mean": lambda base, experts, key: merge.dare_ties_vector(
        key, base, experts, drop_prob=0.5, aggregate="mean"
    ),
    "breadcrumbs": lambda base, experts, key: merge.breadcrumbs_vector(
        base, experts, drop_smallest=0.4, drop_largest=0.1
    ),
    "magmax": lambda base, experts, key: merge.magmax_vector(base, experts),
    "tsv": lambda base, experts, key: merge.tsv_merge_vector(base, experts),
    "tsv-all": lambda base, experts, key: merge.tsv_merge_vector(base, experts, others="zero", share=1.0),
    "iso-c": lambda base, experts, key: merge.iso_c_vector(base, experts),
    "iso-cts": lambda base, experts, key: merge.iso_cts_vector(base, experts),
    "iso-cts-zero": lambda base, experts, key: merge.iso_cts_vector(base, experts, others="zero", common=0.3),
    "wudi": lambda base, experts, key: merge.wudi_vector(base, experts),
    "act-mat": lambda base, experts, key: merge.wudi_vector(base, experts, ridge=0.0, norms=False),
    **{
        f"nuslerp-{along}": lambda base, experts, key, along=along: merge.nuslerp_vector(
            base, some(experts, 2), t=0.25, along=along
        )
        for along in ("leaf", "first", "last")
    },
    "sce": lambda base, experts, key: merge.sce_vector(base, experts),
    "sce-half": lambda base, experts, key: merge.sce_vector(base, experts, density=0.5, floor=0.0),
    "multislerp": lambda base, experts, key: merge.multislerp_vector(base, experts),
    "consensus": lambda base, experts, key: merge.consensus_vector(base, experts, ratio=0.4, least=1),
    "svc": lambda base, experts, key: merge.svc_vector(base, in_order(experts), alpha=0.2),
    "emr": lambda base, experts, key: merge.emr_vector(base, experts, task=min(experts)),
    "fisher": lambda base, experts, key: merge.fisher_vector(base, experts, fishers(base, experts)),
    "fisher-raw": lambda base, experts, key: merge.fisher_vector(
        base, experts, fishers(base, experts), normalize=False, weights={min(experts): 0.5}
    ),
    "reg-mean": lambda base, experts, key: merge.reg_mean_vector(base, experts, grams(base, experts)),
    "reg-mean-full": lambda base, experts, key: merge.reg_mean_vector(
        base, experts, grams(base, experts), scale=1.0, others="zero"
    ),
    "pcb": lambda base, experts, key: merge.pcb_vector(base, experts),
    "pcb-half": lambda base, experts, key: merge.pcb_vector(base, experts, ratio=0.5, clip=0.1),
    "nearswap": lambda base, experts, key: merge.nearswap_vector(base, some(experts, 1), t=0.1),
    "ram": lambda base, experts, key: merge.ram_vector(base, experts),
    "ram-plus": lambda base, experts, key: merge.ram_vector(base, experts, threshold=0.1, boost=0.2),
    "ram-tensor": lambda base, experts, key: merge.ram_vector(base, experts, threshold=0.1, boost=0.2, scope="tensor"),
    "opcm": lambda base, experts, key: merge.opcm_vector(base, in_order(experts)),
    "opcm-raw": lambda base, experts, key: merge.opcm_vector(base, in_order(experts), share=0.2, norms=False),
    "dc": lambda base, experts, key: merge.dc_merge_vector(base, experts),
    "dc-mean": lambda base, experts, key: merge.dc_merge_vector(
        base, experts, others="zero", keep=0.5, elect=False, smooth="mean"
    ),
    "dc-linear": lambda base, experts, key: merge.dc_merge_vector(base, experts, share=0.4, keep=0.5, smooth="linear"),
    "tall-mask": lambda base, experts, key: merge.tall_mask_vector(base, experts, task=min(experts), ratio=0.4),
    **{
        f"{name}-weights": lambda base, experts, key, name=name, own=own: with_weights(
            f"{name}_vector", base, experts, **own
        )
        for name, own in SCALED.items()
    },
}
# one number or matrix of a leaf depends on all experts, or there is but one
DC = "dc", "dc-mean", "dc-linear"
SPECTRAL = {
    *("tsv", "tsv-all", "iso-c", "iso-cts", "iso-cts-zero", "wudi", "act-mat", "opcm", "opcm-raw", *DC),
    *(f"{name}-weights" for name in ("tsv_merge", "iso_c", "iso_cts", "wudi", "dc_merge", "opcm")),
}
STATISTICS = {"fisher", "fisher-raw", "reg-mean", "reg-mean-full"}
ROUNDED = {
    *SPECTRAL,
    *STATISTICS,
    "pcb",
    "pcb-half",
    "pcb-weights",
    "cart",
    "karcher",
    "metagpt",
    "multislerp",
    "sce",
    "sce-half",
    "sce-weights",
}
JOINT = {
    "wise-ft",
    "nearswap",
    "ram",
    "ram-plus",
    "ram-tensor",
    "model-stock",
    "model-stock-rows",
    "svc",
    "emr",
    "multislerp",
    "consensus",
    *(f"{name}-weights" for name in SCALED),
    "tall-mask",
    *NUSLERP,
    *ROUNDED,
}
# decompositions, transcendental functions, sums in an order of the library: other last bits on CUDA
OF_A_DEVICE = {
    *SPECTRAL,
    *("reg-mean", "reg-mean-full", "cart", "svc", "pcb", "pcb-half", "pcb-weights", "arcee"),
    *("nuslerp-first", "nuslerp-last", "model-stock-rows"),
}
DTYPES = [
    *(torch.float32, torch.bfloat16),
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.float16)),
]
every_run = pytest.mark.parametrize("run", ALL.values(), ids=ALL)
every_vector = pytest.mark.parametrize("name", VECTORS)


@pytest.fixture(scope="module")
def plain(family):
    """``plain(run)``: the merge of the family as it is, made once."""
    return cache(lambda run: run(*family(), KEY))


def same(left, right):
    left, right = tree.flatten(left), tree.flatten(right)
    assert list(left) == list(right)
    for path in left:
        assert left[path].dtype == right[path].dtype, path
        assert torch.equal(left[path], right[path]), path


def test_every_merger_file_has_an_entry():
    files = {p.stem for p in Path(merge.__file__).parent.glob("*.py") if not p.stem.startswith("_")} - OTHERS
    assert files == set(RUNS)
    classes = [*merge.MERGERS, *merge.MORE_MERGERS]
    assert sorted(files) == sorted(merger.__module__.rpartition(".")[2] for merger in classes)
    assert [merger.name for merger in merge.MERGERS] == ["wa", "ta", "ties", "dare", "della"]
    assert set(VECTORS) == set(ALL) - NO_BASE


@every_run
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_shapes_dtypes_and_buffers_are_those_of_base(run, dtype, family):
    base, experts = family(dtype)
    merged = run(base, experts, KEY)
    assert list(merged) == list(base)
    for path, leaf in base.items():
        assert (merged[path].shape, merged[path].dtype) == (leaf.shape, leaf.dtype), path
        assert merged[path].isfinite().all()
        if not leaf.is_floating_point():
            assert torch.equal(merged[path], leaf)
    assert not torch.equal(merged["matrix"], base["matrix"])


@every_run
def test_inputs_are_neither_mutated_nor_aliased(run, family):
    base, experts = family()
    before = tree.clone({"base": base, **experts})
    merged = run(base, experts, KEY)
    same({"base": base, **experts}, before)
    for leaf in merged.values():
        leaf.zero_()
    same({"base": base, **experts}, before)


@every_run
def test_no_operation_lacks_a_deterministic_form_on_cuda_and_few_mergers_have_other_bits_there(
    run, family, plain, as_on_cuda, request
):
    base, experts = family()
    with as_on_cuda() as mode:  # in which no compiled loop runs, as on CUDA
        merged = run(base, experts, KEY)
    assert bool(mode.inexact) == (request.node.callspec.id in OF_A_DEVICE), mode.inexact
    same(merged, plain(run))


def test_no_merger_of_a_device_is_searched_on_a_gpu():
    classes = {own.__module__.rpartition(".")[2]: own for own in (*merge.MERGERS, *merge.MORE_MERGERS)}
    assert not [module for module, runs in RUNS.items() if classes[module].same_on_gpu and OF_A_DEVICE & {*runs}]
    assert all(own.same_on_gpu for own in merge.MERGERS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_most_mergers_have_the_bits_of_the_cpu_and_the_others_agree(run, dtype, family, request):
    here = dict(zip(("base", "experts"), family(dtype), strict=True))
    there = tree.tree_map(lambda leaf: leaf.cuda(), here)
    merged = tree.flatten(run(there["base"], there["experts"], KEY))
    expected = tree.flatten(run(here["base"], here["experts"], KEY))
    assert all(leaf.is_cuda for leaf in merged.values())
    merged = {path: leaf.cpu() for path, leaf in merged.items()}
    if request.node.callspec.params["run"] not in [ALL[name] for name in OF_A_DEVICE]:
        same(merged, expected)
        return
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 1e-2)
    chooses = request.node.callspec.id.endswith("-arcee")  # the importance of a coordinate may be at the threshold
    for path, leaf in expected.items():
        close = torch.isclose(merged[path].double(), leaf.double(), rtol=rtol, atol=atol)
        assert close.sum() >= close.numel() - chooses, path


@every_run
def test_an_autocast_of_the_caller_plays_no_part(run, family, plain):
    base, experts = family()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        merged = run(base, experts, KEY)
    same(merged, plain(run))


@every_run
def test_torchs_default_device_plays_no_part(run, family, plain):
    base, experts = family()
    with torch.device("meta"):
        merged = run(base, experts, random.key(5))
    same(merged, plain(run))


@every_run
def test_the_key_decides_everything_random(run, family, plain, request):
    base, experts = family()
    same(run(base, experts, KEY.clone()), plain(run))
    other = run(base, experts, random.key(6))
    is_random = request.node.callspec.id in RANDOM
    assert is_random != torch.equal(other["matrix"], plain(run)["matrix"])


def test_the_order_of_experts_plays_a_part_in_rounding_alone(family):
    base, experts = family(torch.float64)
    for name in ROUNDED:
        merged = [ALL[name](base, dict(order), KEY) for order in (experts.items(), reversed(experts.items()))]
        for path, leaf in merged[0].items():
            torch.testing.assert_close(leaf, merged[1][path], msg=f"{name}: {path}")


# the quotients of della do not stay on the grid, singular vectors are rounded in the order of their columns
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("della", *ROUNDED)])
def test_the_order_of_named_experts_plays_no_part(name, family):
    base, experts = family(grid=2**-6)
    same(ALL[name](base, experts, KEY), ALL[name](base, dict(reversed(experts.items())), KEY))


@pytest.mark.parametrize("name", [name for name in VECTORS if name not in JOINT])
def test_other_experts_play_no_part_in_a_mask(name, family):
    base, experts = family(count=4)
    for position, expert in enumerate(experts.values()):  # disjoint supports: every coordinate belongs to one expert
        for path, leaf in base.items():
            if leaf.is_floating_point():
                owned = torch.arange(leaf.numel()).reshape(leaf.shape) % 4 == position
                expert[path] = torch.where(owned, expert[path], leaf)
    together = VECTORS[name](base, experts, KEY)
    alone = [VECTORS[name](base, {expert: leaves}, KEY) for expert, leaves in experts.items()]
    same(together, {path: sum(vector[path] for vector in alone) for path in together})


def test_a_list_names_experts_by_position(family):
    base, experts = family()
    numbered = {str(i): expert for i, expert in enumerate(experts.values())}
    for name in RANDOM:
        same(ALL[name](base, list(experts.values()), KEY), ALL[name](base, numbered, KEY))
        same(ALL[name](base, tuple(experts.values()), KEY), ALL[name](base, numbered, KEY))


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


def nested(flat):
    return {
        "layers": [Layer(flat["matrix"], flat["vector"]), Layer(flat["row"], flat["scalar"])],
        "head": {"conv": flat["conv"], "rest": (flat["column"], flat["empty"], flat["steps"])},
    }


@every_run
def test_nested_trees_keep_their_structure(run, family):
    base, experts = family()
    merged = run(nested(base), {name: nested(expert) for name, expert in experts.items()}, KEY)
    assert type(merged["layers"][0]) is Layer
    assert type(merged["head"]["rest"]) is tuple
    flat = run(tree.flatten(nested(base)), {n: tree.flatten(nested(e)) for n, e in experts.items()}, KEY)
    same(tree.flatten(merged), flat)


@every_run
@pytest.mark.parametrize("chunk", [3, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (16, 100))])
def test_chunk_size_changes_no_bit(run, chunk, family, plain, monkeypatch):
    base, experts = family()
    whole = plain(run)
    monkeypatch.setattr("smat_fn.merge.parts.chunks.CHUNK", chunk)
    same(run(base, experts, KEY), whole)


@pytest.mark.parametrize("name", [*(n for n in ALL if n.startswith("ties")), "breadcrumbs", "sce-half", "arcee"])
def test_ranks_that_are_counted_are_those_that_are_sorted(name, family, monkeypatch):
    base, experts = family(grid=2**-4)  # many equal magnitudes
    expected = ALL[name](base, experts, KEY)
    for name_of, number in (("SMALL", 0), ("SORTED", 0), ("STEP", 5)):  # as beyond 2**31 - 1 numbers
        monkeypatch.setattr(f"smat_fn.merge.parts.ranks.{name_of}", number)
    same(ALL[name](base, experts, KEY), expected)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ALL
        if name not in ("fisher", "ram-plus", "opcm", "opcm-weights", "metagpt")
        and not name.startswith(("emr", "pcb", "ties-global"))
    ],
)
def test_leaves_may_be_merged_one_at_a_time(name, family, plain):
    base, experts = family()
    merged = {}
    for path in base:
        alone = {expert: {path: leaves[path]} for expert, leaves in experts.items()}
        merged |= ALL[name]({path: base[path]}, alone, KEY)
    same(merged, plain(ALL[name]))


@every_run
def test_views_and_parameters_give_the_same_bits(run, family, plain):
    base, experts = family()

    def view(leaf):
        if leaf.ndim < 2 or not leaf.is_floating_point():
            return leaf
        return torch.nn.Parameter(leaf.transpose(0, -1).contiguous().transpose(0, -1))

    assert not view(base["matrix"]).is_contiguous()
    merged = run(tree.tree_map(view, base), {n: tree.tree_map(view, e) for n, e in experts.items()}, KEY)
    same(merged, plain(run))
    assert not any(leaf.requires_grad for leaf in merged.values())


@every_run
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16, torch.float64)),
    ],
    ids=str,
)
def test_experts_equal_to_base_give_base(run, dtype, family):
    base, experts = family(dtype, count=4)
    same(run(base, {name: tree.clone(base) for name in experts}, KEY), base)


@pytest.mark.parametrize("name", [name for name in ALL if name not in TWO_OR_MORE])
def test_one_expert_alone_is_accepted(name, family):
    base, experts = family(count=1)
    merged = ALL[name](base, experts, KEY)
    assert not torch.equal(merged["matrix"], base["matrix"])


@every_vector
def test_a_merger_is_its_vector_applied(name, family):
    base, experts = family(torch.bfloat16)
    vector = VECTORS[name](base, experts, KEY)
    assert all(leaf.dtype == torch.float32 for leaf in vector.values())
    assert set(vector) == {path for path, leaf in base.items() if leaf.is_floating_point()}
    same(merge.apply_vector(base, vector, coef=0.5), ALL[name](base, experts, KEY))


MADE = [kind for kind in (*merge.MERGERS, *merge.MORE_MERGERS) if "__signature__" in vars(kind.function)]


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.name)
def test_the_help_of_a_vector_explains_its_options(kind):
    text = inspect.getdoc(kind.function)
    explained = {name for line in re.findall(r"^    (\w[\w, ]*): ", text, flags=re.M) for name in line.split(", ")}
    assert set(inspect.signature(kind.function).parameters) <= explained | {"base", "experts"}
    assert "coef" not in explained


@every_vector
def test_dtypes_may_differ_and_the_widest_computes(name, family):
    base, experts = family(torch.bfloat16)
    first = min(experts)
    experts[first] = tree.cast(experts[first], torch.float64)
    vector = VECTORS[name](base, experts, KEY)
    assert all(leaf.dtype == torch.float64 for leaf in vector.values())
    merged = merge.apply_vector(base, vector, coef=0.5)
    assert all(merged[path].dtype == leaf.dtype for path, leaf in base.items())
