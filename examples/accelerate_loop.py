"""SMAT in a loop with accelerate, for several processes, mixed precision and gradient accumulation.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py          # or accelerate launch, as you configured it

The lines of SMAT are marked. The model is a tiny Llama with random weights, the data are random tokens: use your own.
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from smat_fn import draw
from smat_fn.mat.simulated import SimulatedWeights
from smat_fn.random import fold_in, key
from smat_fn.where import block_linear

PERIOD, SEED = 4, 0


def tiny_model():
    """A Llama of 14,000 random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(*, steps=8, batch=4, accumulate=2, lr=1e-3, period=PERIOD):
    """Train; with ``period`` 0 by fine-tuning. Returns the trained parameters by name."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=not torch.cuda.is_available())
    model = tiny_model()
    rows = torch.randint(0, 64, (steps * accumulate * batch * accelerator.num_processes, 8))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=lr), DataLoader(rows, batch_size=batch)
    )
    module = accelerator.unwrap_model(model)
    weights = {name: w for name, w in module.named_parameters() if w.requires_grad}
    base = {name: w.detach().clone() for name, w in weights.items()}  # SMAT: theta_0, before any step
    masked = block_linear(module)  # SMAT: the weights that Mask may remove
    states = SimulatedWeights(weights, base, where=masked)  # SMAT: one buffer, for theta~

    step, drawn = 0, None
    for ids in loader:
        if drawn is None and period and (step + 1) % period == 0:  # SMAT: one draw for all micro-batches of a step
            drawn = draw(fold_in(key(SEED), step), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
        with accelerator.accumulate(model):
            with states.at(drawn):  # SMAT: forward and backward at theta~, in a clean step (None) at theta
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
            if accelerator.sync_gradients:
                if drawn is not None:
                    states.reweight({name: w.grad for name, w in weights.items()}, drawn)  # SMAT: before clipping
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step, drawn = step + 1, None
    accelerator.print(f"{step} steps in {accelerator.num_processes} process(es)")
    return {name: w.detach().clone() for name, w in weights.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="rows of a micro-batch in a process")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--period", type=int, default=PERIOD, help="every so many steps one is simulated; 0: none")
    main(**vars(parser.parse_args()))
