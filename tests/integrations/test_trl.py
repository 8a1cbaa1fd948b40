"""TRL's trainers with `attach` against the same trainers with theta~ copied into the weights around training_step."""

import pytest
import torch

from smat_fn import random
from smat_fn.integrations.trainer import attach
from smat_fn.mat import asam
from smat_fn.simulation import draw, reweight, simulate
from smat_fn.where import block_linear

from .test_trainer import KEY, LR, Weights

WHY = "TRL is not installed: pip install trl peft"
trl = pytest.importorskip("trl", reason=WHY)
peft = pytest.importorskip("peft", reason=WHY)
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of TRL about its own defaults
OFF, RHO = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}, 0.3
DRAW = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.02}
WORDS = [
    "what",
    "is",
    "the",
    "colour",
    "of",
    "grass",
    "sky",
    "snow",
    "blood",
    "green",
    "blue",
    "white",
    "red",
    "?",
    ".",
]
COLOURS = {"grass": "green", "sky": "blue", "snow": "white", "blood": "red"}
ASKED = [(f"what is the colour of {thing} ?", f"{colour} .") for thing, colour in COLOURS.items()] * 8
ROWS = {
    "SFT": [{"text": f"{q} {a}" if i % 2 else f"the {a}"} for i, (q, a) in enumerate(ASKED)],
    "DPO": [{"prompt": q, "chosen": a, "rejected": "the red white ."} for q, a in ASKED],
    "KTO": [
        {"prompt": q, "completion": a if i % 2 else "the snow", "label": i % 2 == 1} for i, (q, a) in enumerate(ASKED)
    ],
    "GRPO": [{"prompt": q} for q, _ in ASKED],
}
ROWS |= {"Reward": ROWS["DPO"], "RLOO": ROWS["GRPO"]}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    raw = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def model(folder, kind):
    """Saved and loaded, since DPO loads its reference model from the folder."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=18, pad_token_id=0, eos_token_id=2, bos_token_id=2, **shape)
    torch.manual_seed(0)
    if kind == "Reward":
        config.num_labels = 1
        return transformers.LlamaForSequenceClassification(config)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def by_hand(kind):
    """The trainer, without `attach`. Completions are generated and scored at theta."""

    class ByHand(kind):
        origin = None

        def training_step(self, *args, **options):
            own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            theta = {name: p.detach().clone() for name, p in own.items()}
            self.origin, step, where = self.origin or theta, self.state.global_step, block_linear(self.model)
            if step % 2 == 0:
                return super().training_step(*args, **options)
            drawn = draw(random.fold_in(KEY, step), **DRAW)
            state = simulate(theta, self.origin, drawn, where=where)

            def put(weights):
                with torch.no_grad():
                    for name, p in own.items():
                        p.copy_(weights[name])

            inner = getattr(self, "_generate_and_score_completions", None)

            def generate(*args):
                put(theta)
                found = inner(*args)
                put(state)
                return found

            self._generate_and_score_completions = generate
            put(state)
            result = super().training_step(*args, **options)
            put(theta)
            self._generate_and_score_completions = inner
            if self.accelerator.sync_gradients:
                found = reweight({n: p.grad for n, p in own.items() if p.grad is not None}, drawn, where=where)
                for name, grad in found.items():
                    own[name].grad = grad
            return result

    ByHand.__name__ = kind.__name__
    return ByHand


def in_two_passes(kind):
    """The trainer, without `attach`, by ASAM. A batch is prepared, and generated, once."""

    class InTwoPasses(kind):
        calls, again = (), None

        def _prepare_inputs(self, batch):
            if self.again is not None:
                return self.again
            made = super()._prepare_inputs(batch)
            self.made = dict(made)
            return made

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.calls = [*self.calls, (inputs, self.made)]
            if self.accelerator.sync_gradients:
                own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
                theta = {name: p.detach().clone() for name, p in own.items()}
                climbed = asam.climb(theta, {name: p.grad for name, p in own.items()}, rho=RHO)
                self.model.zero_grad()
                with torch.no_grad():
                    for name, p in own.items():
                        p.copy_(climbed[name])
                counted = vars(self).get("_step")  # by which it generates
                for given, made in self.calls:
                    self.again = made
                    super().training_step(model, given, num_items_in_batch)
                self.calls, self.again, self._step = (), None, counted
                with torch.no_grad():
                    for name, p in own.items():
                        p.copy_(theta[name])
            return loss

    InTwoPasses.__name__ = kind.__name__
    return InTwoPasses


def lengths(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


GENERATED = {"num_generations": 2, "max_completion_length": 6}
LORA = {"peft_config": {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", {}),
        ("SFT", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
        ("SFT", {"gradient_checkpointing": False, "max_grad_norm": 0.1}),
        ("SFT", {"packing": True, "max_length": 16}),
        ("SFT", {"bf16": True}),
        ("SFT", {"eval_strategy": "steps", "eval_steps": 2}),
        ("SFT", LORA),
        ("SFT", {"bf16": True, **LORA}),
        ("DPO", {}),
        ("DPO", {"precompute_ref_log_probs": True}),
        ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
        ("DPO", LORA),
        ("KTO", {}),
        ("KTO", LORA),
        ("Reward", {}),
        ("GRPO", GENERATED),
        ("GRPO", {"num_iterations": 2, "beta": 0.1, **GENERATED}),
        ("RLOO", GENERATED),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_every_step_of_trls_trainers_is_that_by_hand(kind, options, tmp_path):
    _, attached = trained(kind, options, tmp_path, period=2, **DRAW)
    _, hand = trained(kind, options, tmp_path, make=by_hand)
    assert_steps(attached, hand)


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
ONLINE = {"num_iterations": 2, "beta": 0.1, **ACCUMULATED, **GENERATED}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", ACCUMULATED),
        ("SFT", {"bf16": True, **ACCUMULATED, **LORA}),
        ("DPO", ACCUMULATED),
        ("KTO", {}),
        ("Reward", {}),
        ("GRPO", ONLINE),
        ("RLOO", GENERATED),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_step_of_two_passes_is_that_by_hand(kind, options, tmp_path):
    _, attached = trained(kind, options, tmp_path, climb="asam", rho=RHO, **OFF)
    _, hand = trained(kind, options, tmp_path, make=in_two_passes)
    assert_steps(attached, hand)


@pytest.mark.parametrize(("kind", "options"), [("SFT", ACCUMULATED), ("DPO", ACCUMULATED), ("GRPO", ONLINE)])
def test_metrics_and_counts_are_those_of_the_first_pass(kind, options, tmp_path):
    """With a climb of length 0 all logs are those of plain training."""
    twice, attached = trained(kind, options, tmp_path, climb="asam", rho=0.0, **OFF)
    once, plain = trained(kind, options, tmp_path)
    assert_steps(attached, plain)
    for found, wanted in zip(twice.state.log_history, once.state.log_history, strict=True):
        timed = {name for name in found if name.endswith(("time", "per_second")) or name.startswith("smat/")}
        assert len(found) > len(timed) + 2
        assert {**found, **dict.fromkeys(timed)} == {**wanted, **dict.fromkeys(timed)}


def trained(kind, options, tmp_path, *, make=lambda kind: kind, **hyper):
    """(trainer, weights after every step) of TRL's trainer; with arguments of `attach`, attached."""
    given = {
        "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": LR,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no",
        "disable_tqdm": True, **options,
    }  # fmt: skip
    adapters, weights, data = given.pop("peft_config", None), Weights(), datasets.Dataset.from_list(ROWS[kind])
    more = {"reward_funcs": lengths} if kind in ("GRPO", "RLOO") else {}
    more |= {"peft_config": peft.LoraConfig(**adapters)} if adapters else {}
    more |= {"eval_dataset": data} if "eval_steps" in given else {}
    trainer = make(getattr(trl, f"{kind}Trainer"))(
        model(tmp_path / "model", kind), args=getattr(trl, f"{kind}Config")(**given), train_dataset=data,
        processing_class=tokenizer(), callbacks=[weights], **more,
    )  # fmt: skip
    if hyper:
        attach(trainer, key=KEY, **hyper)
    trainer.train()
    return trainer, weights.seen


def assert_steps(found, wanted):
    assert len(found) == len(wanted) == 4
    for step, (seen, want) in enumerate(zip(found, wanted, strict=True)):
        assert seen.keys() == want.keys()
        assert all(torch.equal(seen[name], leaf) for name, leaf in want.items()), step
    assert not all(torch.equal(leaf, found[1][name]) for name, leaf in found[2].items())
