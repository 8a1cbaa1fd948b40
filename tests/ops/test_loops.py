"""The compiled loops give torch's bits, are taken where they can be."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch.func import vmap

from smat_fn import execution, merge, ops, random
from smat_fn.merge.parts.looped import ByField, Terms, Window, ranked, sources
from smat_fn.ops import cpu
from smat_fn.ops.cpu import centered_fields
from smat_fn.testing import assert_trees_equal

ROOT = Path(__file__).resolve().parents[2]
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 5000)
STARTS = (0, 3, 8, 4093, 2**32 - 9, 2**35 + 5, 2**63 - 5, 2**63 + 3)
LEAVES = {"a": (3, 5), "b": (4097,), "c": (), "d": (0, 3), "e": (16, 64), "f": (9,)}
ANY = torch.zeros(1)


@pytest.fixture(autouse=True)
def _numba():
    if os.environ.get("SMAT_FN_NUMBA") == "0":
        pytest.skip("numba is switched off")
    assert execution.loops_for(ANY) is not None


@pytest.fixture
def calls(monkeypatch):
    """Names of the loops that are called."""
    loops, names = execution.loops_for(ANY), []

    def spy(name, loop, *args):
        names.append(name)
        return loop(*args)

    for name in ("words", "fields", "simulate", "reweight", "dropped", "ranked_by_buckets", "ranked_in_order", "agree"):
        monkeypatch.setattr(loops, name, partial(spy, name, getattr(loops, name)))
    return names


def both(run):
    """``run()`` by the loops and without them."""
    with execution.off():
        assert execution.loops_for(ANY) is None
        without = run()
    return run(), without


def same_bits(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.mark.parametrize("start", STARTS)
def test_fields_are_those_of_random_bits(start, calls):
    streams = torch.stack([random.split(random.key(1))[0], torch.tensor([-7, -3]), torch.tensor([2**62, 2**63 - 1])])
    got = centered_fields([key for key in streams for _ in SIZES], [(start, start + size) for size in SIZES] * 3)
    assert calls == ["words", "fields"]
    with execution.off():
        expected = [random.bits(key, size, start=start) - 32768 for key in streams for size in SIZES]
    same_bits(got, [field.to(torch.int16) for field in expected])


def test_blocks_of_any_keys_and_counters(calls):
    edges = torch.tensor([0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)])
    for seed, counter in ((edges[:, None], edges), (edges[0], edges), (edges[2], edges[3]), (edges[:0], edges[:0])):
        same_bits(*both(lambda s=seed, c=counter: random.philox(s, c)))
    assert calls == ["words"] * 3  # none for no key


@pytest.mark.parametrize("noise", ["uniform", "laplace"])
@pytest.mark.parametrize("masked", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_simulated_states_and_weighted_gradients(case, calls, dtype, masked, noise):
    for base_dtype in (torch.float32, torch.bfloat16):
        for start in (0, 3, 2**35 + 16):
            c = case(LEAVES, dtype, base_dtype, noise=noise, masked=masked, start=start)
            (states, weighted), (expected, expected_weighted) = both(c.chunked)
            assert_trees_equal(states, expected)
            assert_trees_equal(weighted, expected_weighted)
    assert set(calls) == {"words", "simulate", "reweight"}


def test_rounding_to_bfloat16_of_every_kind_of_number(case):
    bits = torch.arange(0, 2**32, 2**32 // 80_021)[:80_000]  # all exponents, both signs
    ties = (torch.arange(2**16)[:, None] * 65536 + torch.tensor([0, 0x7FFF, 0x8000, 0x8001])).flatten()
    values = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    # alpha = 0 and no noise: base, rounded to the dtype of params
    c = case({"w": values.shape}, torch.bfloat16, torch.float32, masked=False, alpha_min=0.0, sigma=0.0)
    c = c._replace(base={"w": values}, params={"w": torch.zeros_like(c.params["w"])})
    numbers = c.numbers._replace(scale=torch.zeros(()))
    (state,) = ops.simulate(list(c.params.values()), list(c.base.values()), numbers, c.masked, c.starts)
    expected = values.to(torch.bfloat16)
    same_bits([state + 0.0], [expected + 0.0])  # -0 + 0 is 0 in the sum
    assert state.isinf().any()


def test_leaves_of_all_dtypes_and_outputs_that_are_inputs(case, calls):
    c = case({"a": (40,), "b": (50,), "c": (60,), "d": (1025,)})
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    c = c._replace(params={p: leaf.to(d) for (p, leaf), d in zip(c.params.items(), dtypes, strict=True)})

    def in_place():
        params, base = ([leaf.clone() for leaf in leaves.values()] for leaves in (c.params, c.base))
        ops.simulate_into(params, base, params, *c.numbers, c.masked, c.starts)
        grads = [leaf.clone() for leaf in c.params.values()]
        ops.reweight_into(grads, grads, *c.numbers[:3], c.masked, c.starts)
        return [*params, *grads]

    same_bits(*both(in_place))
    assert calls.count("simulate") == calls.count("reweight") == 2
    assert "fields" in calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_leaves_at_odd_addresses_as_a_file_may_place_them(case, dtype, calls):
    c = case({"a": (5,), "b": (1025,)}, dtype)

    def moved(leaf):
        memory = bytearray(1 + leaf.nbytes)
        odd = torch.frombuffer(memory, dtype=dtype, offset=1, count=leaf.numel())
        assert odd.data_ptr() % leaf.itemsize
        return odd.copy_(leaf)

    odd = c._replace(params={p: moved(v) for p, v in c.params.items()}, base={p: moved(v) for p, v in c.base.items()})
    for got, expected in zip(odd.chunked(), c.chunked(), strict=True):
        assert_trees_equal(got, expected)
    assert {"simulate", "reweight"} <= set(calls)


def test_threads_share_the_coordinates(case, monkeypatch):
    c = case({"a": (3, 5), "b": (4097,), "c": (3000,)})
    expected = c.chunked()
    monkeypatch.setattr(cpu, "SPAN", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for got, wanted in zip(c.chunked(), expected, strict=True):
        assert_trees_equal(got, wanted)


FAMILY = {"rows": (9, 300), "short": (50, 7), "edge": (3, 64), "next": (3, 65), "vector": (2049,), "ones": (5, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_merges_with_random_masks(dtype, calls):
    generator = torch.Generator().manual_seed(0)

    def tree(scale):
        leaves = {path: scale * torch.randn(shape, generator=generator) for path, shape in FAMILY.items()}
        leaves["rows"][:3].mul_(4).round_()  # equal magnitudes
        leaves["rows"][3:5] = 0
        return {path: leaf.to(dtype) for path, leaf in leaves.items()}

    base, key = tree(0.1), random.key(3)
    experts = {name: tree(1.0) for name in ("x", "y", "z")}

    def merged():
        results = [merge.dare_vector(key, base, experts, drop_prob=p) for p in (0.0, 0.3, 0.9)]
        results += [merge.dare_ties_vector(key, base, experts, drop_prob=0.4, aggregate=a) for a in ("sum", "mean")]
        results += [merge.della_vector(key, base, experts, drop_prob=p, window=0.2) for p in (0.1, 0.5)]
        return [leaf for vector in results for leaf in vector.values()]

    same_bits(*both(merged))
    used = {"words", "fields"} | ({"dropped", "ranked_by_buckets", "agree"} if dtype != torch.float64 else set())
    assert set(calls) == used


def _differences(rows):
    """Of bfloat16 numbers in float32, some of which have lower bits."""
    return (rows + 0.1 * rows.roll(1)).bfloat16().float() - rows.bfloat16().float()


def _descending(rows):
    """Numbers of which one row has so many in one bin that inserting them takes too long."""
    rows = rows.bfloat16().float()
    rows[0] = 1 + 2.0**-8 - 2.0**-22 * torch.arange(rows.shape[1])
    return rows


def _huge(x):
    """Rows with one number far above the others."""
    return x.index_fill(1, torch.tensor([3]), 1e30)


COUNTED, BUCKETS, SORTED = "by counts", "ranked_by_buckets", "ranked_in_order"
RANKED = {  # rows of n normal numbers, and how magnitudes are ranked
    "differences": (
        [(19, 300), (2, 1024), (1, 70000)],
        COUNTED,
        lambda x: (x + 0.1 * x.roll(1)).bfloat16() - x.bfloat16(),
    ),
    "few": ([(8, 4096)], COUNTED, lambda x: (3 * x).round()),
    "far below": ([(9, 512)], COUNTED, lambda x: x.bfloat16().float().index_fill(1, torch.arange(0, 40), 1e-30)),
    "zeros": ([(3, 256)], COUNTED, lambda x: 0 * x),
    "short": ([(16, 255)], BUCKETS, lambda x: x.bfloat16().float()),
    "float32": ([(7, 7), (16, 300), (9, 4097), (3, 32768), (1, 65535)], BUCKETS, lambda x: x),
    "long": ([(2, 65536)], SORTED, lambda x: x),
    "one": ([(5, 1)], BUCKETS, lambda x: x),
    "equal": ([(9, 8), (3, 200)], BUCKETS, lambda x: (4 * x).round()),
    "half zeros": ([(9, 513)], BUCKETS, lambda x: x * (x > 0)),
    "far apart": ([(9, 1000)], SORTED, lambda x: x * torch.exp(4 * x.roll(1))),
    "subnormal": ([(9, 1000)], SORTED, lambda x: 1e-40 * x),
    "one bin": ([(16, 300)], SORTED, _huge),
    "a few in one bin": ([(40, 6)], BUCKETS, _huge),
    "close": ([(9, 1000)], SORTED, lambda x: x.sign() + 1e-6 * x),
    "descending": ([(8, 8192)], SORTED, _descending),
    "infinite": ([(8, 300)], COUNTED, lambda x: (x * 2e38).bfloat16().float()),
}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(case, kind, marks=[pytest.mark.slow] * (case[1] > 1 << 16))  # another dtype of counts to compile
        for kind, (cases, *_) in RANKED.items()
        for case in cases
    ],
)
def test_magnitudes_are_ranked_by_counts_else_by_buckets_else_sorted(shape, kind, calls):
    _, way, made = RANKED[kind]
    delta = made(torch.randn(shape, generator=torch.Generator().manual_seed(1))).float().contiguous()
    by_rank = numpy.random.default_rng(0).integers(0, 1 << 16, shape[1]).astype(numpy.uint16)
    found = numpy.empty((1, delta.numel()), numpy.uint16)
    ranked(execution.loops(), sources([delta]), by_rank[None], found)
    order = delta.abs().argsort(dim=-1, stable=True).numpy()
    wanted = numpy.empty(shape, numpy.uint16)
    numpy.put_along_axis(wanted, order, numpy.broadcast_to(by_rank, shape), 1)
    assert (found == wanted.reshape(-1)).all()
    assert (calls or [COUNTED])[-1] == way


def test_special_numbers_in_merges():
    special = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, float("inf"), -float("inf")]
    expert = torch.tensor(special * 30).view(3, 100)
    base, experts = {"w": torch.zeros_like(expert)}, [{"w": expert}, {"w": -expert.flip(0)}]

    def merged():
        dare = merge.dare_vector(random.key(0), base, experts, drop_prob=0.5)["w"]
        return [dare.nan_to_num(7), merge.della_vector(random.key(0), base, experts, drop_prob=0.5, window=0.4)["w"]]

    same_bits(*both(merged))


@pytest.mark.parametrize("start", [0, 5, 8, 2**33 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropped_changes_are_merged_in_one_pass(dtype, start):
    base, *leaves = parts = list(torch.randn(3, 4099).to(dtype))
    loops, keys = execution.loops(), torch.stack([random.key(3), random.key(4)])
    fields, threshold = [random.bits(key, 4099, start=start) for key in keys], int(random.threshold(0.9))

    def merged(parts):
        out = torch.empty_like(base)
        window = Window(
            loops, start, len(out), sources(parts), parts, execution.array(keys).reshape(-1, 2), 0.5, out, torch.empty
        )
        return out, ByField([threshold] * 2).merge(window, Terms([1, 1], [1, 1]))

    def kept(leaf, field):
        return (leaf.float() - base.float()) / (1 - threshold / 65536) * (field >= threshold)

    change = 0.5 * (kept(leaves[0], fields[0]) + kept(leaves[1], fields[1]))
    exact = change + base.float()
    out, told = merged(parts)
    assert torch.equal(out, exact.to(dtype))
    assert told.finite
    assert told.fits
    assert told.change == pytest.approx(float(change.double().square().sum()), rel=1e-6)
    assert told.error == pytest.approx(float((exact - out.float()).double().square().sum()), rel=1e-6)
    for value in (float("inf"), float("nan")):  # also where it is dropped
        broken = leaves[0].index_fill(0, (fields[0] < threshold).nonzero()[0], value)
        assert not merged([base, broken, leaves[1]])[1].finite


def test_traced_batched_and_foreign_tensors_are_left_to_torch():
    seen = []

    def fn(x):
        seen.append(execution.loops_for(x))
        return x * 1

    vmap(fn)(torch.zeros(3))
    torch.func.grad(lambda x: fn(x).sum())(torch.zeros(3))
    torch.compile(fn, backend="eager", fullgraph=True)(torch.zeros(3))
    torch.fx.experimental.proxy_tensor.make_fx(fn)(torch.zeros(3))
    with torch._subclasses.FakeTensorMode():
        fn(torch.zeros(3))
    fn(torch.zeros(3, device="meta"))
    assert seen == [None] * len(seen)
    assert len(seen) >= 6
    assert execution.loops_for(torch.zeros(3), torch.nn.Parameter(torch.zeros(3))) is not None


def python(code, **environment):
    """Output of a fresh Python in which warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


DRAW = "from smat_fn import execution, random; import torch; print(random.bits(random.fold_in(random.key(4), 2), 9))"
LOADED = "; import sys; print([name for name in ('numba', 'smat_fn._loops') if sys.modules.get(name)])"


@pytest.mark.slow
def test_loops_are_compiled_anew_where_no_folder_keeps_them():
    expected = str(random.bits(random.fold_in(random.key(4), 2), 9))
    got = python(DRAW + LOADED, NUMBA_CACHE_LOCATOR_CLASSES="ZipCacheLocator")
    assert got == f"{expected}\n['numba', 'smat_fn._loops']"


@pytest.mark.slow
def test_numba_is_loaded_on_first_use(monkeypatch):
    expected = str(random.bits(random.fold_in(random.key(4), 2), 9))
    rooms = "import smat_fn.folders, smat_fn.mat, smat_fn.simulation"
    assert python(f"{rooms}{LOADED}; {DRAW}{LOADED}") == f"[]\n{expected}\n['numba', 'smat_fn._loops']"
    monkeypatch.setenv("SMAT_FN_NUMBA", "0")
    assert execution._imported.__wrapped__() is None
