"""One of the processes of torchrun: the Trainer of test_trainer.py with SMAT attached, half of every batch each."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from smat_fn.integrations.trainer import attach

from .test_trainer import KEY, STRENGTHS, tiny_llama, trainer_of


def main(folder):
    trainer = trainer_of(tiny_llama(), folder / "out", batch=2)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save(weights, folder / f"weights{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
