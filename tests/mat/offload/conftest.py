"""Tiny models of four families, the training loop written out, and a side stream that counts and delays."""

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss, random, simulate, tree, where
from smat_fn.mat import simulated as _simulated
from smat_fn.mat.offload import storage
from smat_fn.simulation import draw, naive

KEY = random.key(2**40 + 11)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.02}
LR = 3e-3
TOKENS = {"vocab_size": 64}


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**TOKENS, **sizes, num_hidden_layers=2, use_cache=False, **options)
    return LlamaForCausalLM(config)


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    # with dropout: offload modes must leave torch's generator alone
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 16}
    config = GPT2Config(**TOKENS, **sizes, use_cache=False, bos_token_id=0, eos_token_id=0, **options)
    return GPT2LMHeadModel(config)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
}


def vit():
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**VISION), add_pooling_layer=False)


def clip():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**VISION))


def tokens_loss(module, batch):
    torch.manual_seed(5)
    out = module(input_ids=batch, labels=batch)
    return out.loss, {"logits": out.logits.detach()}


def pixels_loss(module, batch):
    # the dtype and device of a parameter are asked for outside its module
    hidden = module(pixel_values=batch.to(next(module.parameters()))).last_hidden_state
    weights = torch.linspace(-1, 1, 16, dtype=hidden.dtype, device=hidden.device)
    return (hidden[:, 0] * weights).float().sum(-1).sigmoid().mean(), {}


FAMILIES = {
    "llama": (lambda: llama(tie_word_embeddings=False), tokens_loss),
    "llama tied": (lambda: llama(tie_word_embeddings=True), tokens_loss),
    "gpt2": (lambda: gpt2(tie_word_embeddings=False), tokens_loss),
    "gpt2 tied": (gpt2, tokens_loss),
    "vit": (vit, pixels_loss),
    "clip": (clip, pixels_loss),
}


class Case(NamedTuple):
    """A model and what it is trained on."""

    module: nn.Module
    loss: Any
    params: dict
    base: dict
    where: Any

    def batches(self, count):
        generator = torch.Generator().manual_seed(7)
        if self.loss is tokens_loss:
            return list(torch.randint(64, (count, 2, 9), generator=generator))
        return list(torch.randn(count, 3, 1, 8, 8, generator=generator))

    def module_loss(self):
        return ModuleLoss(self.module, self.loss)


def make_case(family, dtype=torch.float32):
    build, loss = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = build().to(dtype).train()
        # neither params nor base are the module's own weights: reading those is an error that must show
        base = {name: p.detach() + 0.05 * torch.randn_like(p) for name, p in module.named_parameters()}
        params = {name: leaf + 0.05 * torch.randn_like(leaf) for name, leaf in base.items()}
    return Case(module, loss, params, base, where.block_linear(module))


@pytest.fixture
def case():
    return make_case


def checkpointed(module):
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@pytest.fixture
def checkpoint():
    return checkpointed


def naive_training(case, steps, period, key=KEY):
    """Section 4 on the module itself: weights put in place, ``backward()``, Python's own Philox, torch.optim."""
    theta = {name: nn.Parameter(leaf.clone()) for name, leaf in case.params.items()}
    optimizer, losses, norms = torch.optim.Adam(theta.values(), lr=LR), [], []
    for step, batch in enumerate(case.batches(steps)):
        now = {name: p.detach() for name, p in theta.items()}
        drawn = draw(random.fold_in(key, step), **STRENGTHS)
        simulated = (step + 1) % period == 0
        loss, grads = backward(
            case, naive.simulate(now, case.base, drawn, where=case.where) if simulated else now, batch
        )
        if simulated:
            grads = naive.reweight(grads, drawn, where=case.where)
        for name, p in theta.items():
            p.grad = grads[name]
        optimizer.step()
        losses.append(loss)
        norms.append(tree.global_norm(grads).float())
    return {name: p.detach() for name, p in theta.items()}, losses, norms


def backward(case, weights, batch):
    own = {name: p.detach().clone() for name, p in case.module.named_parameters()}
    try:
        with torch.no_grad():
            for name, p in case.module.named_parameters():
                p.copy_(weights[name])
        case.module.zero_grad()
        loss, _ = case.loss(case.module, batch)
        loss.backward()
        grads = {name: p.grad for name, p in case.module.named_parameters()}
        # CLIP's last norm has no part in the loss
        return loss.detach(), {name: torch.zeros_like(weights[name]) if g is None else g for name, g in grads.items()}
    finally:
        with torch.no_grad():
            for name, p in case.module.named_parameters():
                p.copy_(own[name])
        case.module.zero_grad()


@pytest.fixture(scope="session")
def literal():
    return naive_training


class Pinned(torch.Tensor):
    """Memory that nothing but a copy of the runtime may read."""

    @staticmethod
    def __new__(cls, inner):
        shape = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        shape.inner = inner
        return shape

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        assert func in (aten.view.default, aten.view.dtype, aten.slice.Tensor, aten.detach.default), (
            f"{func} reads the pinned base"
        )
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


class FakeRuntime:
    """Copies run when they are waited for (late), or at once (early): a wait forgotten, or a copy too soon, shows."""

    def __init__(self, late):
        self.late, self.pinned, self.copies, self.joins, self.ahead = late, 0, [], [], []
        self.queue, self.lent, self.peak = [], weakref.WeakSet(), 0

    def pin(self, leaves):
        self.pinned += sum(leaf.nbytes for leaf in leaves.values())
        arena = storage.Arena(leaves, lambda size: torch.empty(size, dtype=torch.uint8), least=storage.ALIGN)
        arena._blocks = [Pinned(block) for block in arena._blocks]
        return arena

    def empty(self, like):
        fresh = [torch.full(leaf.shape, float("nan"), dtype=leaf.dtype) for leaf in like]
        self.lent.update(fresh)
        self.peak = max(self.peak, self.alive)
        return fresh

    @property
    def alive(self):
        return sum(leaf.nbytes for leaf in self.lent)

    def copy(self, targets, sources):
        assert all(isinstance(source, Pinned) for source in sources)
        self.copies.append(sum(source.inner.nbytes for source in sources))
        self.queue.append([(target, source.inner) for target, source in zip(targets, sources, strict=True)])
        if not self.late:
            self._run(len(self.copies))
        return len(self.copies)

    def join(self, ticket):
        self.joins.append(ticket)
        self.ahead.append(len(self.copies) - ticket)
        self._run(ticket)

    def release(self, leaves):
        pass

    finish = release

    def _run(self, ticket):
        while len(self.copies) - len(self.queue) < ticket:
            for target, source in self.queue.pop(0):
                target.copy_(source)


@pytest.fixture(params=["late", "early"])
def runtime(request, monkeypatch):
    """What stands in for CUDA's memory and streams, everywhere."""
    fake = FakeRuntime(late=request.param == "late")
    monkeypatch.setattr(storage, "runtime_for", lambda device: fake)
    return fake


class Ledger:
    """Bytes of simulated weights that are alive, and how often leaves were made."""

    def __init__(self):
        self.alive, self.peak, self.made = 0, 0, []

    def keep(self, path, state):
        import numpy as np

        memory = np.empty(state.numel() * state.element_size(), dtype=np.uint8)
        kept = torch.from_numpy(memory).view(state.dtype).view(state.shape)
        kept.copy_(state)
        # the array lives as long as the storage, whatever views of it there are
        weakref.finalize(memory, self._freed, state.nbytes)
        self.made.append(path)
        self.alive += state.nbytes
        self.peak = max(self.peak, self.alive)
        return kept

    def _freed(self, size):
        self.alive -= size


@pytest.fixture
def ledger(monkeypatch):
    """Every simulated weight that a rebuilding method makes is on it."""
    book, simulator = Ledger(), _simulated._simulator

    def kept(*args):
        make = simulator(*args)
        return lambda paths, base: [book.keep(*entry) for entry in zip(paths, make(paths, base), strict=True)]

    monkeypatch.setattr(_simulated, "_simulator", kept)
    leaf = {"w": torch.zeros(3)}
    simulate(leaf, leaf, draw(KEY, **STRENGTHS), out=leaf)  # the first call of an operation leaves a cycle behind
    gc.collect()
    gc.disable()  # what only the collector would free counts as alive
    yield book
    gc.enable()
