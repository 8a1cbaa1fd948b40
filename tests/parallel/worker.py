"""One of two processes: everything that needs a group, its findings saved for the test."""

import copy as copy_module
import gc
import os
import signal
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import torch
import torch._dynamo  # DistributedDataParallel imports it at its first use, in each process
import torch.distributed as dist
import torch.utils.checkpoint
from safetensors.torch import load_file
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from smat_fn import checkpoint, draw, execution, lora, optim, parallel, random, simulate, tree
from smat_fn.config import Adapters, Dev, Finetune, Msam, Orthoreg, Smat, Training
from smat_fn.data.batching import split_rows
from smat_fn.grad import ModuleLoss, value_and_grad, with_master_weights
from smat_fn.mat import asam, finetune, l2sp, mergopt, mixout, msam, orthoreg, smat, talos
from smat_fn.mat.offload.storage import held
from smat_fn.mat.weights import SimulatedWeights
from smat_fn.models.modules import FullLoss
from smat_fn.parallel import World, replicas
from smat_fn.parallel import sharded as sharded_module
from smat_fn.scripts.train import loop, resuming
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.resuming import Stop
from smat_fn.scripts.train.training import train_run
from smat_fn.suites.suite import BaseSuite
from smat_fn.types import Micro, Optimizer

KEY, STEPS = random.key(8), 4
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.05}


def model(dtype=torch.float64):
    torch.manual_seed(0)
    # odd shapes: shards of 4 and 3 rows, of 2 and 1, and one that is empty
    layers = [torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)]
    return torch.nn.Sequential(*layers).to(dtype)


def masked(path, leaf):
    return path != "2.weight"


def squares(module, batch):
    x, y = batch
    return ((module(x) - y) ** 2).mean(), None


def batch(step, rows=6):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 5, generator=generator).double(), torch.randn(rows, 1, generator=generator).double()


METHODS = {"ft": finetune, "asam": asam, "mergopt": mergopt, "orthoreg": orthoreg, "msam": msam, "l2sp": l2sp}
TRAINED = (*METHODS, "talos", "smat", "adapters")
ADAPTERS = lora.Lora(("0.weight", "2.weight"), rank=2)


def method(name, loss_fn, base, around):
    options = {"max_grad_norm": 0.5}
    if name == "smat":
        return smat.build(around(loss_fn), optim.adam(1e-2), base, period=2, **STRENGTHS, **options)
    if name == "adapters":
        return lora.build(loss_fn, optim.adam(1e-2), base, ADAPTERS, around=around, period=2, **STRENGTHS, **options)
    if name == "talos":
        options |= {"sparsity": 0.5, "rounds": 2, "calibration": 2}
        return talos.build(around(loss_fn), optim.adam(1e-2), base, **options)
    return METHODS[name].build(around(loss_fn), optim.adam(1e-2), base, **options)


def trained(name, *, rank=None, size=1):
    """Parameters and losses after some steps; the last batch has fewer rows than there are parts."""
    module = model()
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    loss_fn = ModuleLoss(module, squares)
    around = parallel.replicated if rank is not None else lambda loss_fn: loss_fn
    own = method(name, loss_fn, base, around)
    state, losses = own.init(base if name != "adapters" else lora.init(KEY, base, ADAPTERS)), []
    for step in range(STEPS):
        whole = batch(step, rows=5 if step < 3 else 1)
        given = whole if rank is None else parallel.share(split_rows(whole, 2 * size), rank=rank, size=size)
        state, info = own.update(KEY, state, given)
        losses.append(info.loss)
    return state.params, torch.stack(losses)


def independent(rank):
    """The gradient of one SGD step in which each process draws for itself."""
    module = model()
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    start = {path: leaf + 0.1 for path, leaf in base.items()}
    sgd = Optimizer(
        lambda params: None, lambda grads, state, params: ({p: params[p] - grads[p] for p in params}, state)
    )
    own = parallel.independent_smat(ModuleLoss(module, squares), sgd, base, period=1, **STRENGTHS)
    state, _ = own.update(KEY, own.init(start), parallel.share([Micro(batch(0), 1.0)] * 2, rank=rank, size=2))
    return {path: start[path] - leaf for path, leaf in state.params.items()}


def sharded():
    """The simulated state of shards put together, and the weights after some steps of one's own loop."""
    module = model(torch.float32)
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    base, states = parallel.base_shards(module), {}
    for step in range(STEPS):
        x, y = (part.float() for part in batch(step))
        drawn = draw(random.fold_in(KEY, step), **STRENGTHS)
        with parallel.simulated_shards(module, base, drawn, where=masked):
            states[step] = {path: p.full_tensor().detach().clone() for path, p in module.named_parameters()}
            squares(module, (x, y))[0].backward()
        parallel.reweight_grads(module, drawn, where=masked)
        optimizer.step()
        optimizer.zero_grad()
    return {"states": states, "params": {path: p.full_tensor().detach() for path, p in module.named_parameters()}}


def shards_literally():
    """Weights of FSDP2 shards after steps of which every second is simulated, on batches that all processes share."""
    module = model(torch.float32)
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(module)
    optimizer, base = torch.optim.SGD(module.parameters(), lr=0.1), parallel.base_shards(module)
    for step in range(STEPS):
        x, y = (part.float() for part in batch(step))
        drawn = draw(random.fold_in(KEY, step), **STRENGTHS) if smat.is_simulated(step, 2) else None
        if step == 2 and replicas.OVERLAPS:  # torch 2.13
            failed_pass(module, base, drawn, (x, y))
            optimizer.zero_grad()
        with parallel.simulated_shards(module, base, drawn, where=masked):
            squares(module, (x, y))[0].backward()
        with torch.no_grad():
            module(x)  # leaves weights gathered
        if drawn is not None:
            parallel.reweight_grads(module, drawn, where=masked)
        optimizer.step()
        optimizer.zero_grad()
    return {path: p.full_tensor().detach() for path, p in module.named_parameters()}


def failed_pass(module, base, drawn, one):
    """A pass that runs out of memory when the last layers have gradients."""
    hook, Fails.now = module[1].register_forward_hook(lambda layer, given, out: Fails.apply(out)), True
    try:
        with parallel.simulated_shards(module, base, drawn, where=masked):
            squares(module, one)[0].backward()
    except torch.OutOfMemoryError:
        Fails.now = False
    hook.remove()


def literally():
    """The same steps as the paper writes them, in one process."""

    def update(grads, state, params, donate=False):
        return {path: torch.add(leaf, grads[path], alpha=-0.1) for path, leaf in params.items()}, state

    module = model(torch.float32)
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    state = smat.State(base, None, 0)
    for step in range(STEPS):
        state, _ = smat.literal_step(
            KEY, state, tuple(part.float() for part in batch(step)), loss_fn=ModuleLoss(module, squares),
            optimizer=Optimizer(lambda params: None, update), base=base, where=masked, period=2, **STRENGTHS,
        )  # fmt: skip
    return state.params


def evaluated():
    """Outputs of forward passes alone, before, inside and after a simulated state; the root has weights of its own."""
    module = model(torch.float32)
    fully_shard(module[0])
    fully_shard(module)
    x, drawn = batch(0)[0].float(), draw(KEY, **STRENGTHS)
    base = parallel.base_shards(module)
    with torch.no_grad():
        for p in module.parameters():
            p.to_local().add_(0.5)
        outputs = [module(x)]
        with parallel.simulated_shards(module, base, drawn, where=masked):
            outputs.append(module(x))
        outputs.append(module(x))
    again = parallel.base_shards(module)
    return outputs, {path: (leaf.shape, base[path].shape) for path, leaf in again.items()}


def drawn(*, rank=None, size=1):
    """The weights that the loss meets in a simulated step that starts from given ones."""
    module = model(torch.float32)
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    seen = []

    def loss(module, one):
        seen.append({path: p.detach().clone() for path, p in module.named_parameters()})
        return squares(module, one)

    loss_fn, whole = ModuleLoss(module, loss), tuple(part.float() for part in batch(0))
    loss_fn = loss_fn if rank is None else parallel.replicated(loss_fn)
    own = smat.build(loss_fn, optim.adam(1e-2), base, where=masked, period=1, **STRENGTHS)
    given = whole if rank is None else parallel.share(split_rows(whole, size), rank=rank, size=size)
    own.update(KEY, own.init({path: leaf + 0.1 for path, leaf in base.items()}), given)
    return seen


def wrapped(*, rank=None):
    """One's own loop around torch's DistributedDataParallel, or around the module alone: (states, weights)."""
    module = model(torch.float32)
    engine = module if rank is None else DistributedDataParallel(module)
    weights = dict(module.named_parameters())
    base = {path: p.detach().clone() for path, p in weights.items()}
    optimizer, states = torch.optim.SGD(module.parameters(), lr=0.1), []
    simulated = SimulatedWeights(weights, base, where=masked)
    for step in range(STEPS):
        whole = tuple(part.float() for part in batch(step))
        one = draw(random.fold_in(KEY, step), **STRENGTHS)
        states.append(simulate({path: p.detach() for path, p in weights.items()}, base, one, where=masked))
        with simulated.at(one):
            assert all(torch.equal(p, states[-1][path]) for path, p in weights.items())
            squares(engine, whole if rank is None else tuple(part[rank::2] for part in whole))[0].backward()
        simulated.reweight({path: p.grad for path, p in weights.items()}, one)
        optimizer.step()
        optimizer.zero_grad()
    return states, {path: p.detach() for path, p in weights.items()}


def tiny(data):
    """A suite of one task on these batches."""
    module = model(torch.float32)
    return BaseSuite(
        name="tiny",
        tasks=("task",),
        base={path: p.detach().clone() for path, p in module.named_parameters()},
        where=masked,
        loss_fn=lambda task: ModuleLoss(module, squares),
        batch=data,
        recipe={},
        seed=0,
    )


class After(Stop):
    """Asks to stop after some steps."""

    def __init__(self, steps):
        self.left = steps

    @property
    def signal(self):
        self.left -= 1
        return 15 if self.left < 0 else None


def apart(rank, folder):
    """What processes say whose disks, or settings, are not the same; and how often one opened a snapshot of another."""
    suite, out = tiny(lambda task, key, step: tuple(part.float() for part in batch(step))), folder / f"disk{rank}"
    path, read, opened, told = resuming.path_of(out, "task"), resuming.read, [], []
    resuming.read = lambda path: opened.append(path) or read(path)

    def run(lr=1e-2, **options):
        stop = After(options.pop("steps", 10))
        try:
            training = Training(steps=7, lr=lr)
            train_run(
                suite, Finetune(), training, RunOptions(out, ["task"], 1, **options), world=World(rank, 2), stop=stop
            )
        except (ValueError, resuming.Interrupted) as error:
            told.append(str(error))
        dist.barrier()

    run(steps=2)
    told.append(len(opened))
    run(resume=True)
    if rank == 1:
        out.mkdir()
        copy(folder / "disk0" / path.name, path)
    run(resume=True, steps=2)
    run(resume=True)
    run(overwrite=True, lr=[1e-2, 2e-2][rank])
    resuming.read = read
    return told


def interrupted(rank, folder):
    """What becomes of a run of train.py's loop whose second process gets a signal: errors, snapshots, hashes."""
    world, found, signalled = World(rank, 2), {}, []

    def data(task, key, step):
        if rank == 1 and step == 3 and not signalled and found:
            signalled.extend(os.kill(os.getpid(), signal.SIGTERM) for _ in range(2))
        return tuple(part.float() for part in batch(step))

    suite = tiny(data)
    method, training = Smat(noise="uniform", period=2, **STRENGTHS), Training(steps=7, lr=1e-2)

    def run(out, **options):
        around = {name: options.pop(name) for name in ("stop", "report") if name in options}
        folders = train_run(suite, method, training, RunOptions(out, ["task"], 1, **options), world=world, **around)
        dist.barrier()
        return checkpoint.load_manifest(folders[0])["fingerprint"]

    found["whole"] = run(folder / "whole")
    write = checkpoint.save_shared

    def slowly(*args, **options):
        time.sleep(0.3)
        write(*args, **options)

    checkpoint.save_shared = slowly
    try:
        with resuming.on_signals(second_ends=False) as stop:
            run(folder / "cut", stop=stop)
    except resuming.Interrupted as ended:
        # at once: another process that ended sooner would take the writing one with it
        last = resuming.read(resuming.path_of(folder / "cut", "task"))
        found["ended"] = (str(ended), ended.status, None if last is None else last.step)
    checkpoint.save_shared = write
    found["resumed"] = run(folder / "cut", resume=True)
    return found


class Blocks(torch.nn.Module):
    """Layers in a list, as a transformer's, of odd shapes, and a leaf with fewer rows than there are processes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)])
        self.last = torch.nn.Linear(3, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def blocks(dtype=torch.float32, **members):
    """A suite of one task on `Blocks`."""
    torch.manual_seed(0)
    module = Blocks().to(dtype)
    own = {
        "tasks": ("task",),
        "base": {path: p.detach().clone() for path, p in module.named_parameters()},
        "loss_fn": lambda task: ModuleLoss(module, squares),
    }
    return BaseSuite(
        name="blocks",
        where=lambda path, leaf: path.startswith("layers") and leaf.ndim == 2,
        batch=lambda task, key, step: tuple(part.to(dtype) for part in batch(step, rows=5)),
        recipe={},
        seed=0,
        **own | members,
    )


OF_TRAIN_PY = {
    "smat": Smat(noise="uniform", period=2, **STRENGTHS),
    "auto": Smat(noise="uniform", period=2, **STRENGTHS | {"sigma": "auto"}),
    "off": Smat(noise="uniform", period=2, alpha_min=1.0, drop_prob=0.0, sigma=0.0),
    "ft": Finetune(),
    "msam": Msam(along="gradient"),
    "orthoreg": Orthoreg(lambda_reg=0.01),
}
ON_SHARDS = {
    "ft": (finetune, {}),
    "clipped": (finetune, {"max_grad_norm": 0.3}),
    "asam": (asam, {}),
    "sam": (asam, {"adaptive": False}),
    "msam": (msam, {}),
    "msam along gradients": (msam, {"along": "gradient"}),
    "mergopt": (mergopt, {"b": 1e-2, "k_max": 3}),
    "l2sp": (l2sp, {"pull": 0.5}),
    "mixout": (mixout, {"drop_prob": 0.3}),
    "smat": (smat, {"period": 2}),
    "climbing in clean steps": (smat, {"period": 2, "climb": "clean"}),
    "climbing in all steps": (smat, {"period": 2, "climb": "both", "sigma_of": "update"}),
    "by leaf": (smat, {"period": 1, "sigma_of": "leaf", "noise": "laplace", "antithetic": True}),
    "by depth": (smat, {"period": 2, "alpha_depth": (0.5, 1.5), "alpha_max": 1.2}),
    "mixed": (smat, {"lam": 0.3}),
    "rounded": (smat, {"period": 2}),
    "rounded, frozen": (smat, {"period": 2}),
    "muon": (smat, {"period": 2, "muon": True}),
}
SHARDED = Training(steps=7, lr=1e-2, optimizer="adamw", weight_decay=0.1, max_grad_norm=0.3, accumulate=2)


def of_train_py(folder, name, training, *, world, stop=None, suite=None, read=None, tasks=("task",), **options):
    """The weights of a run of train.py's loop, or what it said as it ended. Args: read: of the expert's folder."""
    run = RunOptions(folder, list(tasks), 1, **options)
    try:
        train_run(suite or blocks(), OF_TRAIN_PY[name], training, run, world=world, stop=stop)
    except (resuming.Interrupted, torch.OutOfMemoryError, ValueError, OSError) as ended:
        return str(ended)
    finally:
        if world.size > 1:
            dist.barrier()
    return read(folder / "task") if read else checkpoint.load_leaves(folder / "task")[0]


def shards_of_train_py(rank, folder):
    """Experts of sharded runs, whole and resumed, and the sizes of what a process holds."""
    world, found, training = World(rank, 2), {}, replace(SHARDED, shard=True)
    for name in ("ft", "smat", "off", "auto"):
        found[name] = of_train_py(folder / f"shards-{name}", name, training, world=world)
    found["ended"] = of_train_py(folder / "shards-cut", "smat", training, world=world, stop=After(4))
    found["resumed"] = of_train_py(folder / "shards-cut", "smat", training, world=world, resume=True)
    found["saved"] = of_train_py(folder / "shards-saved", "smat", training, world=world, save_every_steps=3)
    averaging = replace(training, average="ema:0.7")
    found["msam"] = of_train_py(folder / "shards-msam", "msam", averaging, world=world)
    of_train_py(folder / "shards-late", "msam", averaging, world=world, stop=After(4))
    found["msam resumed"] = of_train_py(folder / "shards-late", "msam", averaging, world=world, resume=True)
    found["block by block"] = sharded_block_by_block()
    found["numbers stay"] = numbers_stay()
    found["by task"] = sharded_by_task(folder / "shards-tasks", world=world)
    suite = blocks()
    own = parallel.Sharded(suite.loss_fn("task"), optim.adamw(1e-2, weight_decay=0.1))
    state = own.init(suite.base)
    sizes = [sum(leaf.numel() for leaf in leaves.values()) for leaves in (state.params, state.opt_state.mu)]
    found["sizes"] = [*sizes, sum(leaf.numel() for leaf in suite.base.values())]
    return found


def sharded_block_by_block():
    """Coordinates that the copy holds whole in the shards' dtype as each part is sharded; what comes of it."""
    suite, found, roots = blocks(dtype=torch.bfloat16), [], []
    module, before = suite.loss_fn("task").module, tree.clone(suite.base)

    def copied(*given):
        roots.append(deepcopy(*given))
        return roots[-1]

    def counted(part, **options):
        leaves = [p for p in roots[0].parameters() if not isinstance(p, DTensor)]
        found.append(sum(p.numel() for p in leaves if p.dtype == torch.float32))
        return fully_shard(part, **options)

    sharded_module.copy, fsdp.fully_shard = SimpleNamespace(deepcopy=copied), counted
    try:
        own = parallel.Sharded(with_master_weights(ModuleLoss(module, squares)), optim.adam(1e-2))
        state = own.init(suite.base, torch.float32)
    finally:
        sharded_module.copy, fsdp.fully_shard = copy_module, fully_shard
    start = tree.clone(own.whole(state).params)
    state, _ = own.update(KEY, state, [Micro(parallel.Share(suite.batch("task", KEY, 0), 1.0))])
    stays = all(torch.equal(p, before[path]) and p.requires_grad for path, p in module.named_parameters())
    moved = not torch.equal(own.whole(state).params["layers.0.weight"], start["layers.0.weight"])
    return found, start, stays and moved


class Clamps(torch.nn.Module):
    """Changes a number in its forward pass, as CLIP's logit scale, and has a frozen layer of another dtype."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(5, 3), torch.nn.Parameter(torch.tensor(2.0), False)
        self.tower = torch.nn.Linear(3, 1).bfloat16().requires_grad_(False)

    def forward(self, x):
        self.scale.data.clamp_(max=1.5)
        return self.tower((self.layer(x) * self.scale).bfloat16()).float()


def numbers_stay():
    """The number of the module and of base that shards were made of, dtypes on shards, and losses."""
    module = Clamps()
    loss_fn, part = ModuleLoss(module, squares), [Micro(parallel.Share(blocks().batch("task", KEY, 0), 1.0))]
    with torch.inference_mode():
        params = {path: p.clone() for path, p in module.layer.named_parameters("layer")}
    own = parallel.Sharded(loss_fn, optim.adam(1e-2))
    _, info = own.update(KEY, own.init(params), part)
    base = {**params, "scale": module.scale.detach().clone()}
    frozen = parallel.frozen_shards(loss_fn, base, stored=torch.float64)
    dtypes = frozen.module.scale.dtype, frozen.module.tower.weight.dtype, frozen.module.layer.weight.dtype
    frozen = parallel.frozen_shards(loss_fn, base)
    loss, _ = frozen({}, blocks().batch("task", KEY, 0))
    return (float(module.scale), float(base["scale"])), dtypes, (float(info.loss), float(loss))


def sharded_by_task(folder, *, world):
    """The modules that are on shards when each expert of a run begins, without a search for garbage meanwhile."""
    suite, found = blocks(tasks=("task", "other")), {}
    given = suite.batch

    def data(task, key, step):
        found.setdefault(task, sum(isinstance(one, FSDPModule) for one in gc.get_objects()))
        return given(task, key, step)

    suite.batch = data
    gc.collect()
    gc.disable()
    of_train_py(folder, "ft", replace(SHARDED, shard=True), world=world, suite=suite, tasks=suite.tasks)
    gc.enable()
    return found


VALUES = [1.0, 3.0, 2.0, 0.0]  # dev scores after 2, 4, 6 and 7 steps
EVALUATED = replace(SHARDED, dev=Dev(2))


def evaluated_by(folder, values, training, make=blocks, **options):
    """The weights of a run with these dev scores, those that were scored, and the manifest; errors are raised."""
    told, seen = iter(values), []

    def score(params, task, split):
        seen.append({path: leaf.clone() for path, leaf in params.items()})
        if isinstance(value := next(told), Exception):
            raise value
        return value

    found = of_train_py(folder, "smat", training, suite=make(score=score), **options)
    return found, seen, checkpoint.load_manifest(folder / "task") if isinstance(found, dict) else None


def kept_by(folder, training, **options):
    """The weights of a run, its snapshots after 2 and 4 steps, and its moments."""
    found = of_train_py(folder, "smat", training, keep_snapshots=2, keep_moments=True, **options)
    snapshots = [checkpoint.load_leaves(folder / "snapshots" / str(i) / "task")[0] for i in (1, 2)]
    return found, snapshots, load_file(folder / "task" / "adam.safetensors")


def beside_shards(rank, folder):
    """Weights that runs evaluate and keep, of shards and of replicas, and errors where the first process fails."""
    world, found, training = World(rank, 2), {}, replace(EVALUATED, shard=True)
    found["replicas"] = evaluated_by(folder / "replicas", VALUES, EVALUATED, world=world)
    found["evaluated"] = evaluated_by(folder / "curve", VALUES, training, world=world)
    patient = replace(training, dev=Dev(2, patience=1))
    found["patient"] = evaluated_by(folder / "patient", [2.0, 1.0], patient, world=world)
    evaluated_by(folder / "curve-cut", VALUES[:2], training, world=world, stop=After(4))
    found["resumed"] = evaluated_by(folder / "curve-cut", VALUES[2:], training, world=world, resume=True)
    for name, value in {"nan": float("nan"), "failed": torch.OutOfMemoryError("no more")}.items():
        found[name] = evaluated_by(folder / name, [1.0, value], training, world=world)[0]
    found["kept"] = kept_by(folder / "kept", replace(SHARDED, shard=True), world=world)
    write = checkpoint.save_expert

    def full(path, *args, **options):
        if "snapshots" in path.parts:
            raise OSError(28, "the disk is full")
        write(path, *args, **options)

    checkpoint.save_expert = full
    options = {"world": world, "keep_snapshots": 1}
    found["unwritten"] = of_train_py(folder / "full", "smat", replace(SHARDED, shard=True), **options)
    checkpoint.save_expert = write
    return found


class Block(torch.nn.Module):
    """Two layers, which the backward pass may run again."""

    reads = False  # the weight of a layer, outside of the layer

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(5, 7), torch.nn.Linear(7, 5)

    def forward(self, x):
        x = x + self.up.weight.sum() if self.reads else x
        return x + self.down(self.up(x).tanh())


class Inside(Block):
    """A block that is checkpointed inside of its call, as those of transformers are."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Stack(torch.nn.Module):
    """Blocks whose layers adapters find, the first and the last one checkpointed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)
        self.layers = torch.nn.ModuleList([Inside(), Block(), Block()])

    def forward(self, x):
        x = self.layers[1](self.layers[0](self.first(x.to(self.first.weight.dtype))))
        return self.last(torch.utils.checkpoint.checkpoint(self.layers[2], x, use_reentrant=False))


def stack(loss=squares, reads=False, **options):
    """A suite of one task on a `Stack`."""
    torch.manual_seed(0)
    module = Stack()
    module.layers[1].reads = reads
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    return blocks(base=base, loss_fn=lambda task: FullLoss(module, loss), **options)


def read_later(module, batch):
    return squares(module, batch)[0] + module.layers[1].up.weight.sum(), None


# method, where SMAT simulates, precision, dropout
ON_FROZEN = {
    "smat": ("smat", "merged", None, 0.0),
    "auto": ("auto", "merged", None, 0.0),
    "factors": ("smat", "factors", None, 0.0),
    "orthoreg": ("orthoreg", "merged", None, 0.0),
    "mixed": ("smat", "merged", "mixed", 0.3),
    "bf16": ("smat", "merged", "bf16", 0.0),
}


def adapted(folder, name, *, world, shard, stop=None, suite=None, **options):
    """The adapters of a run of train.py's loop, or what it said as it ended."""
    method, simulate, precision, dropout = ON_FROZEN[name]
    adapters = Adapters(2, 4.0, simulate=simulate, dropout=dropout)
    training = replace(SHARDED, lora=adapters, precision=precision, shard=shard)
    options |= {"world": world, "stop": stop, "suite": suite or stack(), "read": lambda path: lora.load_peft(path)[0]}
    return of_train_py(folder, method, training, **options)


@contextmanager
def unreadable(leaves, kept):
    """`offloaded` of leaves on the CPU, whose memory cannot be freed once NumPy has seen it: they are NaN meanwhile."""

    def fill(own=None):
        for path, leaf in leaves.items():
            leaf.fill_(torch.nan) if own is None else leaf.copy_(own[path])

    @contextmanager
    def present():
        fill(held(kept, leaves))
        yield
        fill()

    fill()
    yield present
    fill(held(kept, leaves))


def beside_frozen(folder, *, world):
    """`evaluated_by` of adapters on shards and of replicas, and a snapshot, where base is off the device meanwhile."""
    read, again = lambda path: lora.load_peft(path)[0], {"world": world, "resume": True}
    training, suite = replace(EVALUATED, lora=Adapters(2, 4.0), shard=True), stack()
    options = {"make": stack, "world": world, "read": read}
    found = {"replicas": evaluated_by(folder / "replicas", VALUES, replace(training, shard=False), **options)}
    was = loop.on_gpu, loop.offloaded
    loop.on_gpu, loop.offloaded = lambda leaves: True, unreadable
    found["evaluated"] = evaluated_by(folder / "curve", VALUES, training, **options)
    evaluated_by(folder / "cut", VALUES[:2], training, stop=After(4), **options)
    found["resumed"] = evaluated_by(folder / "cut", VALUES[2:], training, **options | again)
    options = {"suite": suite, "world": world, "read": read, "keep_snapshots": 2}
    of_train_py(folder / "kept", "smat", replace(training, dev=None), **options)
    loop.on_gpu, loop.offloaded = was
    place = folder / "kept" / "snapshots" / "2" / "task"
    found["kept"] = read(place), checkpoint.load_manifest(place)["fingerprint"]
    return found | {"restored": checkpoint.same(suite.base, stack().base)}


def after_failures(count, rank):
    """Adapters after a step in one's own loop, which is taken again after so many that ran out of memory."""
    suite, adapters = stack(), lora.Lora(("layers.0.up.weight", "layers.2.down.weight"), rank=2)
    frozen, base = parallel.frozen_shards(suite.loss_fn("task"), suite.base), suite.base
    # in the middle of the block that comes last, when all weights are gathered
    frozen.module.layers[0].down.register_forward_hook(lambda layer, given, out: Fails.apply(out))
    options = {"where": suite.where, "around": parallel.replicated, "period": 1, **STRENGTHS}
    own = lora.build(frozen, optim.adam(1e-2), base, adapters, **options)
    parts = parallel.share(split_rows(suite.batch("task", KEY, 0), 2), rank=rank, size=2)
    state = own.init(lora.init(KEY, base, adapters))
    for tried in range(count + 1):
        Fails.now = tried < count
        try:
            state, _ = own.update(KEY, state, parts)
        except torch.OutOfMemoryError:
            continue
    return state.params


def evaluated_between_steps(rank, shards):
    """Adapters of a module without blocks after two steps, between which it runs forward alone; what is gathered."""
    module = model()
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    loss_fn = ModuleLoss(module, squares)
    if shards:
        loss_fn = parallel.frozen_shards(loss_fn, base)
    own = method("adapters", loss_fn, base, parallel.replicated)
    state = own.init(lora.init(KEY, base, ADAPTERS))
    for step in range(2):
        state, _ = own.update(KEY, state, parallel.share(split_rows(batch(step), 2), rank=rank, size=2))
        with torch.no_grad():
            lora.with_lora(loss_fn, base, ADAPTERS)(state.params, batch(9))
    return state.params, [path for path, p in loss_fn.module.named_parameters() if not hasattr(p, "to_local")]


def on_frozen(rank, folder):
    """Adapters of runs whose base is frozen on shards, and of replicas."""
    world = World(rank, 2)
    found = {name: adapted(folder / f"frozen-{name}", name, world=world, shard=True) for name in ON_FROZEN}
    for name in ("mixed", "bf16"):
        found["replicas", name] = adapted(folder / f"whole-{name}", name, world=world, shard=False)
    adapted(folder / "frozen-cut", "smat", world=world, shard=True, stop=After(4))
    found["resumed"] = adapted(folder / "frozen-cut", "smat", world=world, shard=True, resume=True)
    for name, own in {"in its block": stack(reads=True), "later": stack(read_later)}.items():
        found[name] = adapted(folder / name, "smat", world=world, shard=True, suite=own)
    found["beside"] = beside_frozen(folder / "frozen-beside", world=world)
    suite = stack()
    own = parallel.frozen_shards(suite.loss_fn("task"), suite.base).module
    held = sum(p.to_local().numel() for p in own.parameters())
    found["sizes"] = held, sum(leaf.numel() for leaf in suite.base.values())
    found["again"] = [after_failures(count, rank) for count in range(2)]
    found["between"] = [evaluated_between_steps(rank, shards) for shards in (True, False)]
    saving, base = replace(ADAPTERS, paths=("layers.0.up.weight",), saved=("last.weight", "last.bias")), suite.base
    loss_fn = parallel.frozen_shards(suite.loss_fn("task"), base)
    wrong = {
        "saved": lambda: lora.with_lora(loss_fn, base, saving),
        "whole": lambda: with_master_weights(loss_fn)({}, batch(0)),
        "otherwise": lambda: parallel.frozen_shards(parallel.replicated(suite.loss_fn("task")), base),
    }
    for name, call in wrong.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def on_shards():
    """Weights, moments and norms of every method on shards whose processes have the same batch."""
    return {name: stepped(name, Sharded, lambda part: parallel.Share(part, 1.0)) for name in ON_SHARDS}


def stepped(name, build, batch_of=lambda part: part):
    """Weights and second moments after five steps of a method on two micro-batches, and the norms of the steps."""
    method, options = ON_SHARDS[name]
    rounded = "rounded" in name
    suite = blocks(dtype=torch.bfloat16 if name == "rounded" else torch.float32)
    start, loss_fn = tree.cast(suite.base, torch.float32), suite.loss_fn("task")
    if name == "rounded, frozen":
        loss_fn.module.layers[1].bias.requires_grad_(False)
        del start["layers.1.bias"]
    if rounded:
        loss_fn = with_master_weights(loss_fn)
    strengths = STRENGTHS if method is smat else {}
    given = {"where": suite.where, **strengths, **options}
    optimizer = optim.adamw(1e-2, weight_decay=0.1, decays=not_of_four_rows)
    if given.pop("muon", False):
        optimizer = optim.muon(1e-2, rest=optimizer, where=not_of_four_rows, weight_decay=0.1)
    own = build(method.build, loss_fn, optimizer, start, **given)
    state, norms = own.init(start), []
    for step in range(5):
        found = [suite.batch("task", KEY, 2 * step + half) for half in range(2)]
        parts = [Micro(batch_of(tuple(part.bfloat16() if rounded else part for part in one))) for one in found]
        state, info = own.update(KEY, state, parts)
        norms.append(info.grad_norm)
    whole = getattr(own, "whole", lambda leaves: leaves)
    return tree.flatten(whole(state).params), whole(optim.second_moments(state.opt_state)), norms


def not_of_four_rows(path, leaf):
    """Holds for all of `Blocks`; a shard of the first layer has four rows."""
    return leaf.shape[0] != 4


class Odd(Blocks):
    """A weight of two layers, another that is transposed in memory, a frozen number, a layer that few batches need."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)])
        self.layers[1].weight = self.layers[0].weight
        self.layers[2].weight.data = torch.randn(5, 3).T
        self.scale = torch.nn.Parameter(torch.tensor(1.3), requires_grad=False)
        self.first, self.seldom = torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)

    def forward(self, x):
        out = super().forward(Fails.apply(self.first(x))) * self.scale
        return out + self.seldom(x) if len(x) == 4 or not replicas.OVERLAPS else out


class Fails(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory while ``now`` is set."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            raise torch.OutOfMemoryError("no more")
        return grad


def odd(build, parts):
    """Weights after steps of `Odd` on these micro-batches; on shards the first one fails, and is taken again."""
    torch.manual_seed(0)
    module = Odd()
    start = {path: p.detach().clone() for path, p in module.named_parameters() if p.requires_grad}
    own = build(
        smat.build, ModuleLoss(module, squares), optim.adamw(1e-2, weight_decay=0.1), start, period=1, **STRENGTHS
    )
    state = own.init(start)
    if build is Sharded and replicas.OVERLAPS:
        Fails.now = True
        try:
            own.update(KEY, state, parts(0))
        except torch.OutOfMemoryError:
            Fails.now = False
    for step in range(3):
        state, _ = own.update(KEY, state, parts(step))
    return getattr(own, "whole", lambda state: state)(state).params


def odd_batches(step):
    """A batch for each of two processes, of which the first one alone needs the layer."""
    return [Micro(tuple(part.float() for part in batch(step, rows=rows))) for rows in (4, 5)]


def Sharded(build, loss_fn, optimizer, base, **options):  # as a method's build
    return parallel.Sharded(loss_fn, optimizer, build, **options)


# a loss that touches no leaf in one process is known while the buckets are torch's
KINDS = ("whole", "partly", "narrow", "wrapped", "again", *(("nothing",) if replicas.OVERLAPS else ()))


class Events(list):
    """What happened: sizes of reductions as they start, and the start of the first layer's backward pass."""

    def __enter__(self):
        self.reduce, self.buckets = dist.all_reduce, replicas.BUCKETS_MB
        dist.all_reduce, replicas.BUCKETS_MB = self.told, [32 / 2**20]
        return self

    def __exit__(self, *_):
        dist.all_reduce, replicas.BUCKETS_MB = self.reduce, self.buckets

    def told(self, tensor, *args, **options):
        if tensor.ndim:  # no loss
            self.append((tensor.numel(), tensor.dtype))
        return self.reduce(tensor, *args, **options)


def mean_gradients(kind, rank):
    """Mean gradients in buckets of 32 bytes, those of whole leaves, events, and reducers that are left.

    In the second process "partly" does not touch the middle layer, "nothing" no leaf of the module. "again" uses a
    layer twice, once checkpointed, and leaves a parameter frozen.
    """
    module, events = model(torch.bfloat16 if kind == "narrow" else torch.float32), Events()
    params = {path: p.detach().clone() for path, p in module.named_parameters()}
    if kind == "again":
        del params["4.bias"]
    x, y = (part.to(params["0.weight"].dtype) for part in batch(rank))

    def loss(module, batch):
        if kind == "nothing" and rank == 1:
            return y.sum(), None
        inner = module[0](x)
        if inner.requires_grad:
            inner.register_hook(lambda grad: events.append("first layer"))
        middle = inner[:, :3] if kind == "partly" and rank == 1 else module[2](inner.tanh())
        if kind == "again":
            middle = middle + torch.utils.checkpoint.checkpoint(module[1:3], inner.sin(), use_reentrant=False)
        return ((module[4](middle.tanh()) - y) ** 2).mean(), None

    one = ModuleLoss(module, loss)
    averaged = parallel.replicated(one)
    gc.collect()  # of this pass alone, see `main`
    gc.disable()
    with events:
        _, found = value_and_grad(
            with_master_weights(averaged, torch.float32) if kind == "wrapped" else averaged, engine="autograd"
        )(params, parallel.Share(None, 0.5))
    left = sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects())
    gc.enable()
    happened = list(events)
    if kind == "nothing" and rank == 1:  # alone, it is an error
        own = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    else:
        (_, _), own = value_and_grad(one, engine="autograd")(params, None)
    wanted = {path: 0.5 * grad.float() for path, grad in own.items()}
    for grad in wanted.values():
        dist.all_reduce(grad)
    wanted = {path: (grad / 2).to(own[path].dtype) for path, grad in wanted.items()}
    return found, wanted, happened, left, all(p.grad is None for p in module.parameters())


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = {name: trained(name, rank=rank, size=2) for name in TRAINED}
    gc.collect()
    gc.freeze()  # what is there is not looked through
    found["means"] = {kind: mean_gradients(kind, rank) for kind in KINDS}
    found["independent"] = independent(rank)
    found["sharded"] = sharded()
    found["literally"] = shards_literally()
    found["evaluated"] = evaluated()
    found["drawn"] = drawn(rank=rank, size=2)
    found["wrapped"] = wrapped(rank=rank)
    found["interrupted"] = interrupted(rank, Path(folder))
    found["apart"] = apart(rank, Path(folder))
    found["on shards"] = on_shards()
    found["odd"] = odd(Sharded, lambda step: [Micro(parallel.Share(odd_batches(step)[rank].batch, 1.0))])
    found["train.py"] = shards_of_train_py(rank, Path(folder))
    found["beside"] = beside_shards(rank, Path(folder))
    found["frozen"] = on_frozen(rank, Path(folder))
    torch.save(found, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    execution.loops()
    gc.freeze()  # nothing of it is garbage, and what is looked through in a fork is copied
    child = os.fork()  # after the imports, which take longer than all else
    main(0 if child else 1, sys.argv[1])
    if child:
        sys.exit(os.waitpid(child, 0)[1] != 0)
