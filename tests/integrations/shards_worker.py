"""One of two processes: the Trainer with SMAT on FSDP2 shards, its findings saved for test_shards.py."""

import gc
import logging
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import accelerate  # noqa: F401  # before the fork
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers.distributed import DistributedConfig

from smat_fn import draw, execution, parallel
from smat_fn.integrations.trainer import attach
from smat_fn.parallel.shards import ShardWeights

from .test_trainer import KEY, STRENGTHS, llama, rows, trainer_of

STEPS, SIZE = 4, 33  # a vocabulary of unequal shards
FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": True,
    },
}  # fmt: skip


def whole(module):
    """The weights of a module, gathered."""
    found = {name: p.detach() for name, p in module.named_parameters()}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for name, p in found.items()}


class Looks(transformers.TrainerCallback):
    """Gathered weights after every step, and the losses of evaluations."""

    def __init__(self):
        self.after, self.losses = [], []

    def on_step_end(self, args, state, control, model=None, **_):
        self.after.append(whole(model))

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.losses.append(metrics["eval_loss"])


class Writes(transformers.TrainerCallback):
    """Changes the shards of the second process before the first step."""

    def on_train_begin(self, args, state, control, model=None, **_):
        with torch.no_grad():
            model.model.norm.weight.to_local().add_(dist.get_rank())


class Inside(transformers.Trainer):
    """Keeps theta~ of the first simulated step, and evaluates in a loss of the second one."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.simulated, self.around, self.inside = None, [], None

    def compute_loss(self, model, *args, **options):
        if self.inside is not None:
            self.inside.append(whole(model))
        elif torch.is_grad_enabled() and self.state.global_step == 1:
            self.simulated = self.simulated or whole(model)
        elif torch.is_grad_enabled() and self.state.global_step == 3 and not self.around:
            self.around.append(whole(model))
            self.inside = []
            self.evaluate()
            self.around.append(self.inside)
            self.around.append(whole(model))
            self.inside = None
        return super().compute_loss(model, *args, **options)


class Fails(transformers.Trainer):
    """Has errors in forward and backward passes of clean steps, and in the forward pass of a simulated one."""

    count, loss = 0, None

    def training_step(self, *args, **options):
        self.count += 1
        try:
            return super().training_step(*args, **options)
        except RuntimeError:
            if self.count == 8:
                self.loss = self.evaluate()["eval_loss"]
            raise

    def compute_loss(self, model, *args, **options):
        hook = model.model.layers[1].mlp.register_forward_hook(self.fail)
        try:
            return super().compute_loss(model, *args, **options)
        finally:
            hook.remove()

    def fail(self, module, inputs, output):
        if torch.is_grad_enabled() and self.count == 4:
            output.register_hook(self.stop)
        elif torch.is_grad_enabled() and self.count in (2, 8):
            self.stop()

    def stop(self, *_):
        raise RuntimeError("no memory")


def trained(module, folder, *, batch, name="out", resume=None, kind=Inside, given=None, **options):
    """A training of this module, and everything that was seen in it."""
    looks, told = Looks(), []
    trainer = trainer_of(
        module, folder / name, batch=batch, accumulate=2, callbacks=[looks], kind=kind, max_steps=STEPS,
        more={"eval_dataset": rows(4)}, per_device_eval_batch_size=batch, **options,
    )  # fmt: skip
    attach(trainer, key=KEY, **STRENGTHS, **(given or {}))
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("smat_fn.integrations.trainer")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    trainer.train(resume_from_checkpoint=resume)
    logger.setLevel(level)
    logger.removeHandler(handler)
    seen = {name: getattr(trainer, name, None) for name in ("simulated", "around")}
    record = trainer.state.stateful_callbacks["smat_fn"]
    return trainer, {**seen, "after": looks.after, "losses": looks.losses, "told": told, "record": record}


def loaded(folder):
    """A model that transformers shards as it loads it."""
    return transformers.LlamaForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(fsdp_size=2)
    )


def refused(call):
    """The message of a ValueError."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


@contextmanager
def accelerators():
    """Inside, accelerate takes processes on a CPU for processes on GPUs, to which alone it gives FSDP."""
    begin = PartialState.__init__

    def on_gpus(self, *args, **options):
        new = not PartialState._shared_state
        begin(self, *args, **options)
        if new:
            self.distributed_type = DistributedType.MULTI_GPU

    with patch.object(PartialState, "__init__", on_gpus), patch.dict(os.environ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def emptied(module):
    """The module of a process to which the first one sends its weights."""
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 - dist.get_rank())
    return module


def by_hand(folder):
    """Weights before a simulated step of one's own loop, theta~ in it, and the weights afterwards."""
    module = loaded(folder)
    base, before = parallel.base_shards(module), whole(module)
    with parallel.simulated_shards(module, base, draw(KEY, alpha_min=0.2, drop_prob=0.0, sigma=0.02)):
        module(input_ids=rows(1)[0]["input_ids"][None]).logits.sum().backward()
        inside = whole(module)
    return before, inside, whole(module)


def failing(folder):
    """Gradient norms of trainings that had an error and of two after them, the loss after one and that of theta."""
    with accelerators():
        trainer = trainer_of(
            emptied(llama(SIZE)), folder / "failing", batch=1, accumulate=2, kind=Fails, max_steps=2, learning_rate=0.0,
            more={"eval_dataset": rows(4)}, per_device_eval_batch_size=1, **FSDP,
        )  # fmt: skip
        attach(trainer, key=KEY, **STRENGTHS)
        norms = []
        for _ in range(5):
            with suppress(RuntimeError):
                trainer.train()
            norms.append([own["grad_norm"] for own in trainer.state.log_history if "grad_norm" in own])
        return norms, trainer.loss, trainer.evaluate()["eval_loss"]


def waited(folder):
    """A shard at each wait for copies of shards to a GPU, as FSDP2 makes them of shards in host memory, and theta~."""
    module, seen = loaded(folder), []
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    shards, shard = parallel.base_shards(module), module.model.norm.weight.to_local().detach()
    drawn = draw(KEY, alpha_min=0.2, drop_prob=0.0, sigma=0.02)
    weights = ShardWeights(module, dict(module.named_parameters()), base, where=lambda *_: True)
    gpu = SimpleNamespace(synchronize=lambda: seen.append(shard.clone()))
    with patch.object(DeviceMesh, "device_type", "cuda"), patch.object(torch, "get_device_module", lambda _: gpu):
        for block in (weights.at(drawn), parallel.simulated_shards(module, shards, drawn)):
            with block:
                simulated = shard.clone()
    return seen, simulated


def dropped(dtype):
    """A gradient, and again after a failed step of one's own loop, whose first micro-batch was not averaged."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    module = fully_shard(torch.nn.Linear(4, 4), mp_policy=policy)
    base, found = parallel.base_shards(module), []
    for _ in range(2):
        module(torch.ones(2, 4)).sum().backward()
        found.append(module.weight.grad.full_tensor())
        module.zero_grad()
        with suppress(RuntimeError), parallel.simulated_shards(module, base, None):
            module.set_requires_gradient_sync(False)
            module(torch.ones(2, 4)).sum().backward()
            raise RuntimeError
        module.set_requires_gradient_sync(True)
    return found


def copied(sizes):
    """theta~, and theta where it climbed along the gradient, of weights on a mesh of copies and shards."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    base = {name: p.detach() * 0.5 for name, p in module.named_parameters()}
    fully_shard(module, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")))
    weights = ShardWeights(module, dict(module.named_parameters()), base, where=lambda *_: True)
    with weights.at(draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.02)):
        simulated = whole(module)
    module(torch.ones(2, 3)).square().sum().backward()
    with weights.climbed(rho=0.3):
        climbed = whole(module)
    return simulated, climbed, whole(module)


def again(trainer, folder):
    """The errors of attaching to a trainer a second time, and to another one of its model."""
    other = trainer_of(trainer.model, folder / "out")
    return [refused(lambda own=own: attach(own, key=KEY, **STRENGTHS)) for own in (trainer, other)]


def errors(folder):
    """The errors of attach for shards that it does not take."""
    module = loaded(folder)
    trainer = trainer_of(module, folder / "out")
    found = [refused(lambda: attach(trainer, key=KEY, base="host", **STRENGTHS))]
    across = llama(SIZE)
    fully_shard(across, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    found.append(refused(lambda: attach(trainer_of(across, folder / "out"), key=KEY, **STRENGTHS)))
    with accelerators():
        trainer = trainer_of(llama(SIZE), folder / "out", callbacks=[Writes()], **FSDP)
        attach(trainer, key=KEY, **STRENGTHS)
        found.append(refused(trainer.train))
    return found


def main(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    if rank == 0:
        llama(SIZE, tied=False).save_pretrained(folder / "model")
    dist.barrier()
    found = {"by hand": by_hand(folder)}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    trainer, found["loaded"] = trained(loaded(folder), folder, batch=1, **evaluated)
    trainer.save_model(folder / "saved")
    found["again"] = again(trainer, folder)
    for climb in ("both", "asam"):
        module = loaded(folder)
        base = whole(module) if climb == "both" else {name: p.detach().clone() for name, p in module.named_parameters()}
        options = {"kind": transformers.Trainer, "given": {"climb": climb, "base": base}}
        _, found[climb] = trained(module, folder, batch=1, **options)
    with accelerators():
        options = {"batch": 1, "name": "fsdp", "save_strategy": "steps", "save_steps": 2, **FSDP}
        trainer, found["accelerate"] = trained(emptied(llama(SIZE)), folder, **options)
        found["type"] = str(trainer.accelerator.state.distributed_type), trainer.accelerator.is_fsdp2
        options["resume"] = str(folder / "fsdp/checkpoint-2")
        _, found["resumed"] = trained(emptied(llama(SIZE)), folder, **options)
    found["failing"] = failing(folder)
    found["dropped"] = [dropped(dtype) for dtype in (None, torch.bfloat16)]
    found["waited"] = waited(folder)
    found["copied"] = [copied(sizes) for sizes in ((2, 1), (1, 2))]
    found["errors"] = errors(folder)
    torch.save(found, folder / f"found{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    execution.loops()
    gc.freeze()
    child = os.fork()  # after the imports, which take longer than all else
    main(0 if child else 1, Path(sys.argv[1]))
    if child:
        sys.exit(os.waitpid(child, 0)[1] != 0)
