"""Two experts of a Hugging Face model, trained by fine-tuning and by SMAT, merged and scored: one file, a plain loop.

    python examples/smat_minimal.py
    python examples/smat_minimal.py --model MODEL --steps 100 --lr 1e-5

Without --model the base is a tiny Llama with random weights that is first trained on a third task, in a minute on
one core. With --model the base is any causal language model of transformers, a folder or a hub name.

The tasks are synthetic: a row is a token for the task and five symbols, and the answer is the first, the last, or the
middle symbol. Scores are percentages of right answers on rows that were not trained on. At this size they show that
the loop works, not which method is better.
"""

import argparse

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from smat_fn import draw, reweight, simulate
from smat_fn.merge import select_coef, task_arithmetic, task_arithmetic_vector
from smat_fn.random import fold_in, key
from smat_fn.where import block_linear

PLACES = {"first": 0, "last": -1, "middle": 2}  # task -> place of the answer among the symbols
TASKS = ["first", "last"]  # of the experts; a tiny base has seen the third one
SYMBOLS, LENGTH, BATCH = 8, 5, 32


def tiny_model():
    """A Llama of 50,000 random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(task, seed):
    """A batch of prompts (BATCH, 1 + LENGTH + 1) and answers (BATCH,): mark, symbols, and a sign that asks."""
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(SYMBOLS, (BATCH, LENGTH), generator=generator)
    mark = torch.full((BATCH, 1), SYMBOLS + list(PLACES).index(task))
    asks = torch.full((BATCH, 1), SYMBOLS + len(PLACES))
    return torch.cat([mark, symbols, asks], 1), symbols[:, PLACES[task]]


def train(model, base, tasks, *, steps, lr, period=0, seed=0):
    """The parameters after ``steps`` of Adam on ``tasks`` in turn; with a period, SMAT's step at every period-th."""
    params = {name: p.clone().requires_grad_() for name, p in base.items()}
    optimizer = torch.optim.Adam(params.values(), lr=lr)
    masked = block_linear(model)  # the weights that Mask may remove: linear layers of blocks
    own = fold_in(key(seed), tasks[0])  # each expert has draws of its own
    for step in range(steps):
        prompts, answers = rows(tasks[step % len(tasks)], seed=1 + step)
        simulated = period and (step + 1) % period == 0
        at = params
        if simulated:  # loss and gradient at theta~ = theta_0 + alpha m (theta - theta_0) + epsilon
            drawn = draw(fold_in(own, step), alpha_min=0.2, drop_prob=0.5, sigma=1e-3)
            with torch.no_grad():
                merged = simulate(params, base, drawn, where=masked)
            at = {name: p.requires_grad_() for name, p in merged.items()}
        logits = functional_call(model, at, (prompts,)).logits[:, -1]
        grads = torch.autograd.grad(cross_entropy(logits.float(), answers), list(at.values()))
        grads = dict(zip(at, grads, strict=True))
        if simulated:
            grads = reweight(grads, drawn, where=masked)  # alpha m (.) gradient
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@torch.no_grad()
def score(model, params, task, seeds):
    """Percentage of right answers."""
    right = [
        functional_call(model, params, (x,)).logits[:, -1].argmax(-1) == y for x, y in (rows(task, s) for s in seeds)
    ]
    return 100 * torch.cat(right).double().mean().item()


def main(model_name=None, steps=150, warm_up=150, lr=1e-3, seed=0):
    """Train, merge, score; returns {method: {model: mean score over tasks}}."""
    torch.manual_seed(seed)
    if model_name:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_name, trust_remote_code=False, dtype=torch.float32)
    else:
        model = tiny_model()
    model.eval()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not model_name:
        base = train(model, base, ["middle"], steps=warm_up, lr=1e-3)

    def mean(params, seeds, own=TASKS):
        return sum(score(model, params, task, seeds) for task in own) / len(own)

    dev, test = range(100_000, 100_004), range(200_000, 200_008)
    table = {}
    for method, period in {"FT": 0, "SMAT": 4}.items():
        experts = {task: train(model, base, [task], steps=steps, lr=lr, period=period, seed=seed) for task in TASKS}
        found = select_coef(base, task_arithmetic_vector(base, experts), score=lambda params: mean(params, dev))
        merged = task_arithmetic(base, experts, coef=found.best)
        own = sum(mean(experts[task], test, [task]) for task in TASKS) / len(TASKS)
        table[method] = {"base": mean(base, test), "experts": own, "merged": mean(merged, test), "coef": found.best}
    print("method " + "".join(f"{name:>9}" for name in table["FT"]))
    for method, values in table.items():
        print(f"{method:<7}" + "".join(f"{value:>9.1f}" for value in values.values()))
    return table


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", help="folder or hub name of a causal language model (default: a tiny random one)")
    options.add_argument("--steps", type=int, default=150, help="steps of an expert")
    options.add_argument("--lr", type=float, default=1e-3, help="learning rate of experts")
    options.add_argument("--seed", type=int, default=0, help="seed of weights and draws")
    given = options.parse_args()
    main(given.model, steps=given.steps, lr=given.lr, seed=given.seed)
