"""The language experiment in minutes on a CPU: a tiny Llama with random weights, few rows, every stage.

    python examples/trace_tiny.py --data FOLDER

Builds a model and a tokenizer from the rows of FOLDER (<task>/{train,dev,eval}.json), trains FT and SMAT experts of
every task on its shortest rows, merges them by all five mergers with a search on dev, evaluates, and prints losses and
the table. At this size scores mean nothing: the example shows that every stage runs.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import tyro

from smat_fn import random
from smat_fn.config import preset_of
from smat_fn.report.tables import main_table, markdown
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.evaluate.models import find_checkpoints
from smat_fn.scripts.evaluate.outputs import verdict, write_report
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import Suite, load_suite, task_names


@dataclass(frozen=True)
class Tiny:
    """The language experiment on a tiny model."""

    data: Path
    """Folder of tasks."""
    out: Path = Path("runs/trace-tiny")
    """Folder for the model, experts, merged models and the report."""
    model: Path | None = None
    """Folder of a model to use instead of a new tiny one."""
    tasks: tuple[str, ...] = ()
    """Tasks, all of the folder where none is named."""
    methods: tuple[str, ...] = ("ft", "smat")
    """Training methods."""
    steps: int = 40
    """Steps of an expert; up to four times as many where one is not better than the base on its rows."""
    rows: int = 32
    """Training rows of a task; an eighth of that for dev, a quarter for eval."""
    new_tokens: int = 16
    """Longest answer, in tokens."""
    lr: float = 3e-3
    """Learning rate: a tiny model from scratch takes more than the paper's."""
    seed: int = 0
    """Seed of batches and draws."""


def write_model(
    folder: Path, texts: Iterable[str], *, vocabulary: int = 2000, width: int = 64, layers: int = 2, seed: int = 0
) -> None:
    """A Llama with random weights and a byte-level BPE tokenizer trained on the texts, as ``save_pretrained`` does.

    Args: vocabulary: size that the tokenizer has at most, at least 260; width: a multiple of 16.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(special.values())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=names, initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        **{name.replace("token", "token_id"): bpe.token_to_id(token) for name, token in special.items()},
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_rows(data: Path, out: Path, tasks: Iterable[str], sizes: dict[str, int]) -> None:
    """The rows with the shortest prompts, ``sizes[split]`` of each task, in the layout of ``data``."""
    for task in tasks:
        (out / task).mkdir(parents=True, exist_ok=True)
        for split, size in sizes.items():
            rows = json.loads((data / task / f"{split}.json").read_text(encoding="utf-8"))
            rows = sorted(rows, key=lambda row: len(row["prompt"]))[:size]
            (out / task / f"{split}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def row_texts(data: Path, tasks: Iterable[str]) -> Iterable[str]:
    """Prompts and answers of the training rows."""
    for task in tasks:
        for row in json.loads((data / task / "train.json").read_text(encoding="utf-8")):
            yield f"{row['prompt']}\n{row['answer']}"


def own_loss(suite: Suite, params: dict[str, torch.Tensor], task: str) -> float:
    """Mean loss over the batches of one epoch of the task's rows."""
    assert suite.epoch_steps is not None
    with torch.no_grad():
        batches = (suite.batch(task, random.key(0), step) for step in range(suite.epoch_steps(task)))
        return fmean([float(suite.loss_fn(task)(params, batch)[0]) for batch in batches])


def main(args: Tiny) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    preset = preset_of("llama-3.2-1b")
    tasks = args.tasks or task_names("trace", data=args.data)
    model = args.model or args.out / "model"
    if args.model is None:
        write_model(model, row_texts(args.data, tasks))
    sizes = {"train": args.rows, "dev": max(1, args.rows // 8), "eval": max(1, args.rows // 4)}
    write_rows(args.data, args.out / "rows", tasks, sizes)
    suite = load_suite(
        "trace",
        seed=args.seed,
        model=str(model),
        data=str(args.out / "rows"),
        tasks=tasks,
        max_new_tokens=args.new_tokens,
        device="cpu",
    )
    print(f"model and rows: {sum(p.numel() for p in suite.base.values()):,} parameters, {_since(started)}")
    before = {task: own_loss(suite, suite.base, task) for task in tasks}
    better = True
    for name in args.methods:
        folder = args.out / name
        for task in tasks:
            for steps in (args.steps, 2 * args.steps, 4 * args.steps):
                training = replace(preset.training, steps=steps, epochs={}, lr=args.lr)
                train_run(suite, preset.methods[name], training, RunOptions(folder, [task], args.seed, overwrite=True))
                params = load_inputs(folder / "base", [folder / task]).experts[task]
                after = own_loss(suite, params, task)
                if after < before[task]:
                    break
            better &= after < before[task]
            print(f"{name} {task}: loss on its rows {before[task]:.3f} -> {after:.3f} in {steps} steps")
        print(f"{name} experts: {_since(started)}")
        merge_run(
            Request(
                list(preset.mergers.values()),
                folder / "base",
                [folder / task for task in tasks],
                out=folder / "merged",
                search=True,
                seed=args.seed,
                overwrite=True,
                options={"device": "cpu"},
            )
        )
        print(f"{name} merged: {_since(started)}")
    folders = find_checkpoints([args.out / name / part for name in args.methods for part in (*tasks, "merged")])
    rows = evaluate(folders, options={"device": "cpu"})
    table = main_table(rows)
    write_report(args.out, rows, table, checkpoints=folders)
    print(markdown(table))
    print(verdict(table))
    print(f"report: {args.out}, {_since(started)}")
    if not better:
        sys.exit("trace_tiny.py: an expert is no better than the base on its own rows: raise --steps or lower --lr")


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.0f} s"


if __name__ == "__main__":
    try:
        main(tyro.cli(Tiny, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"trace_tiny.py: {error}")
