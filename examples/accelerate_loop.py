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

from smat_fn import Schedule, SimulatedWeights
from smat_fn.random import key

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
    states = SimulatedWeights.of(accelerator.unwrap_model(model))  # SMAT: theta_0 is a copy, before any step
    schedule = Schedule(alpha_min=0.2, drop_prob=0.5, sigma=2e-3, period=period) if period else None

    step, drawn = 0, None
    for ids in loader:
        if drawn is None and schedule is not None:
            drawn = schedule.draw(key(SEED), step)  # SMAT: one draw for all micro-batches of a step
        with accelerator.accumulate(model):
            with states.at(drawn):  # SMAT: forward and backward at theta~, in a clean step at theta
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
            if accelerator.sync_gradients:
                states.reweight_grads(drawn)  # SMAT: before clipping
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step, drawn = step + 1, None
    accelerator.print(f"{step} steps in {accelerator.num_processes} process(es)")
    return {
        name: w.detach().clone() for name, w in accelerator.unwrap_model(model).named_parameters() if w.requires_grad
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="rows of a micro-batch in a process")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--period", type=int, default=PERIOD, help="every so many steps one is simulated; 0: none")
    main(**vars(parser.parse_args()))
