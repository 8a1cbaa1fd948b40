"""transformers.Trainer with SMAT attached does what the library's own loop does, and never keeps theta~."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset

from smat_fn import random
from smat_fn.grad import ModuleLoss
from smat_fn.integrations.trainer import attach
from smat_fn.mat import smat
from smat_fn.models.causal_lm import next_token_loss
from smat_fn.optim import adamw
from smat_fn.where import block_linear

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.02, "period": 2}
STEPS, LR = 5, 1e-2
KEY = random.key(3)
CHECKPOINTING = next(  # the newer name first: the older one warns where both are known
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if hasattr(transformers.TrainingArguments, name)
)


def tiny_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(count):
    ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


class Stream(IterableDataset):
    """Rows in their own order."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def trainer_of(module, tmp_path, *, batch=4, accumulate=1, callbacks=(), **options):
    given = {
        "output_dir": str(tmp_path), "max_steps": STEPS, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate, "learning_rate": LR, "lr_scheduler_type": "constant",
        "optim": "adamw_torch", "weight_decay": 0.0, "max_grad_norm": 0.5, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**given)
    data = Stream(rows(4 * STEPS))
    return transformers.Trainer(module, arguments, train_dataset=data, callbacks=list(callbacks))


class Weights(transformers.TrainerCallback):
    """The weights after every optimizer step, and whatever else looks at them."""

    def __init__(self):
        self.seen, self.before = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.before.append({n: p.detach().clone() for n, p in model.named_parameters()})

    def on_step_end(self, args, state, control, model=None, **_):
        self.seen.append({n: p.detach().clone() for n, p in model.named_parameters()})


def by_our_loop(module, micro_batches=1):
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    method = smat.build(
        ModuleLoss(module, next_token_loss), adamw(LR, weight_decay=0.0), params, where=block_linear(module),
        max_grad_norm=0.5, **STRENGTHS,
    )  # fmt: skip
    state, after, data = method.init(params), [], rows(4 * STEPS)
    for step in range(STEPS):
        own = data[4 * step : 4 * step + 4]
        size = 4 // micro_batches
        batches = [
            {name: torch.stack([row[name] for row in own[i : i + size]]) for name in own[0]} for i in range(0, 4, size)
        ]
        state, _ = method.update(KEY, state, batches if micro_batches > 1 else batches[0])
        after.append(state.params)
    return after


@pytest.mark.parametrize(
    ("batch", "accumulate", "options"),
    [(4, 1, {}), (2, 2, {}), (2, 2, {CHECKPOINTING: True})],
    ids=["whole", "accumulated", "checkpointed"],
)
def test_every_step_is_that_of_the_librarys_own_loop(batch, accumulate, options, tmp_path):
    weights = Weights()
    trainer = trainer_of(tiny_llama(), tmp_path, batch=batch, accumulate=accumulate, callbacks=[weights], **options)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    wanted = by_our_loop(tiny_llama(), accumulate)
    start = {n: p.detach() for n, p in tiny_llama().named_parameters()}
    assert len(weights.seen) == STEPS
    for step, (seen, want) in enumerate(zip(weights.seen, wanted, strict=True)):
        for name, leaf in want.items():
            torch.testing.assert_close(seen[name], leaf, rtol=0, atol=2e-5, msg=f"{name} after step {step}")
    # the optimizer updates theta, not theta~: before step s the weights are those after step s - 1
    for before, after in zip(weights.before, [start, *weights.seen[:-1]], strict=True):
        assert all(torch.equal(before[name], leaf) for name, leaf in after.items())


def test_plain_training_differs_and_detach_gives_it_back(tmp_path):
    plain, detached = trainer_of(tiny_llama(), tmp_path), trainer_of(tiny_llama(), tmp_path)
    attach(detached, key=KEY, **STRENGTHS).detach()
    attached = trainer_of(tiny_llama(), tmp_path)
    attach(attached, key=KEY, **STRENGTHS)
    for trainer in (plain, detached, attached):
        trainer.train()
    same, other = (
        [torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True)]
        for trainer in (detached, attached)
    )
    assert all(same)
    assert not any(other)


def test_an_exception_in_a_simulated_step_leaves_the_weights_of_the_expert(tmp_path):
    module, weights = tiny_llama(), Weights()
    trainer = trainer_of(module, tmp_path, callbacks=[weights])
    attach(trainer, key=KEY, **STRENGTHS)
    seen = []

    def fail(layer, inputs):
        if trainer.state.global_step == 3:
            seen.append(module.model.norm.weight.detach().clone())
            raise RuntimeError("out of memory")

    module.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    after = weights.seen[-1]
    assert not torch.equal(seen[0], after["model.norm.weight"])  # theta~ was in place when it happened
    assert all(torch.equal(p, after[name]) for name, p in module.named_parameters())


def test_bfloat16_autocast_keeps_float32_weights(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path, bf16=True)
    handle = attach(trainer, key=KEY, **STRENGTHS)
    assert trainer.train().training_loss < 4
    assert handle.draw is not None
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_bad_input_is_told_at_once(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match=r"sigma is -1.*; period is 0"):
        attach(trainer, key=KEY, sigma=-1.0, period=0)
    with pytest.raises(ValueError, match="lm_head"):
        attach(trainer, key=KEY, base={"lm_head": torch.zeros(1)})
    sharded = SimpleNamespace(model=tiny_llama(), is_fsdp_enabled=True)
    with pytest.raises(ValueError, match="shards its weights by fsdp"):
        attach(sharded, key=KEY)
