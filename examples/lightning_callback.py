"""SMAT in PyTorch Lightning's automatic optimization: a callback, with gradient accumulation and clipping.

    pip install lightning
    python examples/lightning_callback.py

The model is a tiny Llama with random weights, the data are random tokens: take `Smat` into your own script.
"""

from contextlib import ExitStack

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from smat_fn import Schedule, SimulatedWeights
from smat_fn.random import key


class Smat(lightning.Callback):
    """Forward and backward of every simulated step at theta~; a key and a schedule are those of one expert."""

    def __init__(self, key, schedule):
        self.key, self.schedule = key, schedule
        self.base, self.states, self.step, self.drawn, self.block = None, None, -1, None, ExitStack()

    def setup(self, trainer, module, stage):
        if stage == "fit" and not module.automatic_optimization:  # without it alone Lightning takes several optimizers
            raise ValueError(
                "Smat needs automatic_optimization: its steps are those of trainer.global_step. With an optimization "
                "of your own use SimulatedWeights in training_step, docs/own_loop.md"
            )
        if stage == "fit" and self.base is None:  # theta_0 is a copy, before a checkpoint is loaded
            self.base = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    def on_fit_start(self, trainer, module):  # on its device now
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if late := [name for name in trained if name not in self.base]:
            raise ValueError(
                f"{len(late)} parameters ({late[0]}, ...) were made or unfrozen after setup, which copies theta_0: "
                "make them in the module's __init__, not in configure_model, or set `base` of Smat to theta_0 by name"
            )
        base = {name: self.base[name].to(p.device) for name, p in trained.items()}
        self.states = SimulatedWeights.of(module, base=base)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.step != trainer.global_step:  # one draw for all micro-batches of a step
            self.step = trainer.global_step
            self.drawn = self.schedule.draw(self.key, self.step)
        self.block.enter_context(self.states.at(self.drawn))

    def on_after_backward(self, trainer, module):
        self.block.close()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.block.close()  # of a batch that training_step skipped by returning None
        if any(p.grad is not None for p in module.parameters()):
            self.states.reweight_grads(self.drawn)  # before clipping

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.block.close()

    def on_exception(self, trainer, module, exception):
        self.block.close()


class Model(lightning.LightningModule):
    """A Llama of 14,000 random weights."""

    def __init__(self, lr=1e-3):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        self.lr, self.model = lr, LlamaForCausalLM(config)

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, ids, batch_idx):
        return self(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def rows(count):
    """Random tokens."""
    return torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))


def main(*, steps=8, batch=4, accumulate=2, period=4):
    """Train; returns the trained parameters by name."""
    model = Model()
    schedule = Schedule(alpha_min=0.2, drop_prob=0.5, sigma=2e-3, period=period)
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, callbacks=[Smat(key(0), schedule)],
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows(steps * accumulate * batch), batch_size=batch))
    print(f"{trainer.global_step} steps")
    return {name: w.detach().cpu().clone() for name, w in model.named_parameters()}


if __name__ == "__main__":
    main()
