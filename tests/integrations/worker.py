"""One of the processes of torchrun: the Trainer of test_trainer.py with SMAT attached, half of every batch each."""

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from smat_fn.integrations.trainer import attach

from .test_trainer import KEY, STRENGTHS, tiny_llama, trainer_of


def refused(folder, rank):
    """The error of training a model with a part that each process made of its own random numbers."""
    module = tiny_llama()
    torch.nn.init.constant_(module.model.norm.weight, rank)
    trainer = trainer_of(module, folder / "out", batch=2)
    attach(trainer, key=KEY, **STRENGTHS)
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return None


def main(folder):
    found = refused(folder, int(os.environ["RANK"]))
    assert re.match("hash of theta_0 is .* in process 0, and .* in process 1; theta_0 is", found), found
    weights = {}
    for climb in (None, "both", "asam"):
        micro = 2 if climb == "asam" else 1
        trainer = trainer_of(tiny_llama(), folder / "out", batch=2 // micro, accumulate=micro)
        attach(trainer, key=KEY, climb=climb, **STRENGTHS)
        trainer.train()
        weights[climb] = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save(weights, folder / f"weights{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
