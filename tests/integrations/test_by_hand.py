"""`attach` against a loop by hand that copies theta~ into the weights: loss scaling, and dropout of attention."""

import pytest
import torch

from smat_fn import random
from smat_fn.integrations.trainer import attach
from smat_fn.mat import asam
from smat_fn.simulation import draw, reweight, simulate
from smat_fn.where import block_linear

from .test_attach import copies
from .test_trainer import KEY, LR, STEPS, STRENGTHS, Weights, rows, tiny_llama, trainer_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def load(module, weights):
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])


def by_hand(module, optimizer, backward, *, micro_batches=1, unscale=lambda: None, step=None, climb=None):
    """The weights after every step, and the norms of the gradients before they are clipped."""
    base, seen, norms, data, where = copies(module), [], [], rows(4 * STEPS), block_linear(module)
    numbers = {name: STRENGTHS[name] for name in ("alpha_min", "drop_prob", "sigma")}
    for number in range(STEPS):
        theta, drawn = copies(module), None
        if (number + 1) % STRENGTHS["period"] == 0:
            drawn = draw(random.fold_in(KEY, number), **numbers)
        point = theta
        if optimizer.state and (climb == "both" or (climb == "clean" and drawn is None)):
            slopes = {name: optimizer.state[p]["exp_avg"] for name, p in module.named_parameters()}
            point = asam.climb(theta, slopes, rho=0.5)
        load(module, point if drawn is None else simulate(point, base, drawn, where=where))
        torch.manual_seed(number)
        own, size = data[4 * number : 4 * number + 4], 4 // micro_batches
        for at in range(0, 4, size):
            backward({name: torch.stack([row[name] for row in own[at : at + size]]) for name in own[0]})
        load(module, theta)
        unscale()
        if drawn is not None:
            grads = reweight({name: p.grad for name, p in module.named_parameters()}, drawn, where=where)
            for name, p in module.named_parameters():
                p.grad = grads[name]
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5).item())
        (step or optimizer.step)()
        optimizer.zero_grad()
        seen.append(copies(module))
    return seen, norms


def scaled_by_hand(scale):
    """A model in float16 with optimizer and scaler; its backward pass, and the parts of `by_hand` that unscale."""
    module = tiny_llama().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    scaler, tokens = torch.amp.GradScaler("cpu", init_scale=scale), torch.tensor(4 * 7)

    def backward(batch):
        with torch.autocast("cpu", torch.float16):
            loss = module(**batch, num_items_in_batch=tokens).loss
        scaler.scale(loss).backward()

    def step():
        scaler.step(optimizer)
        scaler.update()

    parts = {"unscale": lambda: scaler.unscale_(optimizer), "step": step}
    return module, optimizer, scaler, backward, parts


def assert_bit_identical(found, wanted):
    assert len(found) == len(wanted) == STEPS
    for step, (seen, want) in enumerate(zip(found, wanted, strict=True)):
        assert all(torch.equal(seen[name], leaf) for name, leaf in want.items()), step


class Seeded(transformers.TrainerCallback):
    """The same dropout as by hand."""

    def on_step_begin(self, args, state, control, **_):
        torch.manual_seed(state.global_step)


@pytest.mark.parametrize(
    ("micro_batches", "climb"), [pytest.param(1, None, marks=pytest.mark.slow), (2, None), (2, "clean"), (2, "both")]
)
@pytest.mark.parametrize("scale", [2.0**16, 2.0**20], ids=["no step skipped", "two steps skipped"])
def test_loss_scaling_of_float16_is_that_of_a_loop_by_hand(scale, micro_batches, climb, tmp_path):
    weights = Weights()
    trainer = trainer_of(
        tiny_llama(), tmp_path, batch=4 // micro_batches, accumulate=micro_batches, fp16=True, callbacks=[weights]
    )
    # accelerate makes a scaler only for devices that are not the CPU: what it does there with float16
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
    attach(trainer, key=KEY, climb=climb, **STRENGTHS)
    trainer.train()

    module, optimizer, scaler, backward, parts = scaled_by_hand(scale)
    wanted, norms = by_hand(module, optimizer, backward, micro_batches=micro_batches, climb=climb, **parts)
    assert_bit_identical(weights.seen, wanted)
    found = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert found == pytest.approx(norms, rel=0, nan_ok=True)
    assert trainer.accelerator.scaler.get_scale() == scaler.get_scale()
    assert climb or scaler.get_scale() == min(scale, 2.0**18)
    skipped = [torch.equal(a["model.norm.weight"], torch.ones(16)) for a in wanted]
    assert skipped[:3] == [scale > 2.0**16] * 2 + [False]  # a clean step and a simulated one


def test_an_overflow_in_a_coordinate_that_mask_removes_is_still_found():
    drawn = draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.0)
    assert not reweight({"w": torch.full((8, 8), float("inf"))}, drawn)["w"].isfinite().any()


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_dropout_of_attention_is_that_of_a_loop_by_hand_without_a_cache(attention, tmp_path):
    def model():
        module = tiny_llama()
        for layer in module.model.layers:
            layer.self_attn.attention_dropout = 0.3
        module.set_attn_implementation(attention)
        return module

    weights = Weights()
    trainer = trainer_of(model(), tmp_path, callbacks=[weights, Seeded()], optim="sgd")
    trainer.model_accepts_loss_kwargs = False
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    module = model().train()
    # the Trainer switches the cache off: keys and values that went through one lie otherwise in memory
    wanted, _ = by_hand(
        module, torch.optim.SGD(module.parameters(), lr=LR), lambda b: module(**b, use_cache=False).loss.backward()
    )
    assert_bit_identical(weights.seen, wanted)
    assert not torch.equal(wanted[0]["model.norm.weight"], by_hand_without_dropout()["model.norm.weight"])


def by_hand_without_dropout():
    module = tiny_llama().eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    return by_hand(module, optimizer, lambda b: module(**b, use_cache=False).loss.backward())[0][0]
