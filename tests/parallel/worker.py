"""One of two processes: everything that needs a group, its findings saved for the test."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from smat_fn import draw, optim, parallel, random
from smat_fn.data.batching import split_rows
from smat_fn.grad import ModuleLoss
from smat_fn.mat import asam, finetune, smat
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


def method(name, loss_fn, base):
    options = {"max_grad_norm": 0.5}
    if name == "smat":
        return smat.build(loss_fn, optim.adam(1e-2), base, period=2, **STRENGTHS, **options)
    return {"ft": finetune, "asam": asam}[name].build(loss_fn, optim.adam(1e-2), base, **options)


def trained(name, *, rank=None, size=1):
    """Parameters and losses after some steps; the last batch has fewer rows than there are parts."""
    module = model()
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    loss_fn = ModuleLoss(module, squares)
    own = method(name, loss_fn if rank is None else parallel.replicated(loss_fn), base)
    state, losses = own.init(base), []
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


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = {name: trained(name, rank=rank, size=2) for name in ("ft", "smat", "asam")}
    found["independent"] = independent(rank)
    found["sharded"] = sharded()
    torch.save(found, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
