"""The vision experiment in minutes on a CPU: a tiny CLIP with random weights, few images, every stage.

    python examples/clip_tiny.py --data FOLDER

Builds a CLIP and a tokenizer from the class names of FOLDER (<task>/{train,dev,test}.npz, or folders of images per
class), pretrains it briefly on all tasks together so that its zero-shot heads mean something, trains FT and SMAT
experts of every task, merges them by all five mergers with a search on dev, evaluates, and prints losses and the table.
Scores say little at this size: the point is that every stage runs.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
import tyro

from smat_fn import optim, random
from smat_fn.config import preset_of
from smat_fn.data import batch_indices, pixels
from smat_fn.data.rows import load_rows, take
from smat_fn.mat import finetune
from smat_fn.models import FullLoss, parameters
from smat_fn.report.tables import main_table, markdown
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.evaluate.models import find_checkpoints
from smat_fn.scripts.evaluate.outputs import verdict, write_report
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import Suite, load_suite, task_names
from smat_fn.suites.templates import DEFAULT, TEMPLATES, prompts

CPU = {"device": "cpu"}


@dataclass(frozen=True)
class Tiny:
    """The vision experiment on a tiny model."""

    data: Path
    """Folder of tasks."""
    out: Path = Path("runs/clip-tiny")
    """Folder for the model, experts, merged models and the report."""
    model: Path | None = None
    """Folder of a CLIP model to use instead of a new tiny one."""
    tasks: tuple[str, ...] = ()
    """Tasks, all of the folder where none is named."""
    methods: tuple[str, ...] = ("ft", "smat")
    """Training methods."""
    pretrain_steps: int = 400
    """Steps of pretraining, all tasks in turn."""
    steps: int = 48
    """Steps of an expert; up to four times as many where one is not better than the base on its rows."""
    rows: int = 160
    """Images of a task and split, at most."""
    lr: float = 2e-3
    """Learning rate: a tiny model from scratch takes more than the paper's."""
    seed: int = 0
    """Seed of the model, of batches and draws."""


def write_model(
    folder: Path,
    texts: Sequence[str],
    *,
    width: int = 64,
    layers: int = 2,
    image: int = 32,
    patch: int = 8,
    seed: int = 0,
) -> None:
    """A CLIP with random weights, a tokenizer trained on the texts, and an image processor, by ``save_pretrained``.

    Args: width: of both towers, a multiple of 16; image, patch: sides in pixels.
    """
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    tokenizer = CLIPTokenizer().train_new_from_iterator(texts, vocab_size=1000, show_progress=False)
    tokenizer.save_pretrained(folder)
    sides = {"size": {"shortest_edge": image}, "crop_size": {"height": image, "width": image}}
    CLIPImageProcessorPil(**sides).save_pretrained(folder)
    tower = {
        **{"hidden_size": width, "intermediate_size": 2 * width, "projection_dim": width},
        **{"num_hidden_layers": layers, "num_attention_heads": width // 16},
    }
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(seed)
    config = CLIPConfig(
        text_config={**tower, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 77},
        vision_config={**tower, "image_size": image, "patch_size": patch},
        projection_dim=width,
    )
    CLIPModel(config).save_pretrained(folder)


def task_prompts(data: Path, task: str) -> list[list[str]]:
    """Prompts of every class of a task, by template."""
    names = load_rows(data, task, "train").class_names
    return [prompts([template], names) for template in TEMPLATES.get(task, DEFAULT)]


def pretrain(
    folder: Path,
    data: Path,
    tasks: Sequence[str],
    *,
    steps: int,
    rows: int,
    seed: int,
    batch: int = 64,
    lr: float = 2e-3,
) -> None:
    """Trains the whole CLIP of a folder, in place, to tell the classes of one task after another by their prompts.

    Args: rows: the first training images of each task.
    """
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    module, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    table = pixels.value_table(processor)
    images, labels, texts = {}, {}, {}
    for task in tasks:
        train = load_rows(data, task, "train")
        few = take(train, range(min(rows, len(train.labels))))
        images[task], labels[task] = pixels.prepare(few.images, processor), torch.from_numpy(few.labels)
        texts[task] = [dict(tokenizer(own, padding=True, return_tensors="pt")) for own in task_prompts(data, task)]

    def loss(module: torch.nn.Module, batch: tuple) -> tuple[torch.Tensor, None]:
        values, labels, ids = batch
        image = F.normalize(module.get_image_features(values).pooler_output, dim=-1)
        text = F.normalize(module.get_text_features(**ids).pooler_output, dim=-1)
        return F.cross_entropy(module.logit_scale.exp() * image @ text.T, labels), None

    key, theta = random.key(seed), parameters(module)
    schedule = optim.cosine(lr, steps, warmup=min(20, steps))
    method = finetune.build(FullLoss(module, loss), optim.adamw(schedule, weight_decay=0.1), theta, donate=True)
    state = method.init(theta)
    for step in range(steps):
        turn, task = step // len(tasks), tasks[step % len(tasks)]
        chosen = batch_indices(random.fold_in(key, task), len(labels[task]), 64, turn)
        ids = texts[task][turn % len(texts[task])]
        state, _ = method.update(key, state, (pixels.look_up(table, images[task][chosen]), labels[task][chosen], ids))
    module.load_state_dict(state.params, strict=False)
    module.save_pretrained(folder)


def own_loss(suite: Suite, params: dict[str, torch.Tensor], task: str) -> float:
    """Mean loss over the batches of one epoch of the task's rows."""
    assert suite.epoch_steps is not None
    with torch.no_grad():
        batches = (suite.batch(task, random.key(0), step) for step in range(suite.epoch_steps(task)))
        return fmean([float(suite.loss_fn(task)(params, batch)[0]) for batch in batches])


def main(args: Tiny) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    started = time.perf_counter()
    preset = preset_of("clip-vit-b32")
    tasks = args.tasks or task_names("clip8", data=args.data)
    model = args.model or args.out / "model"
    if args.model is None:
        texts = [text for task in tasks for own in task_prompts(args.data, task) for text in own]
        write_model(model, texts, seed=args.seed)
        pretrain(model, args.data, tasks, steps=args.pretrain_steps, rows=args.rows, seed=args.seed)
    suite = load_suite(
        "clip8",
        seed=args.seed,
        model=str(model),
        data=str(args.data),
        tasks=tasks,
        rows=args.rows,
        batch_size=32,
        **CPU,
    )
    before = {task: own_loss(suite, suite.base, task) for task in tasks}
    zero_shot = fmean([suite.score(suite.base, task, "test") for task in tasks])
    size = sum(p.numel() for p in suite.base.values())
    print(f"model: vision tower of {size:,} parameters, zero-shot accuracy {zero_shot:.1f}, {_since(started)}")
    better = True
    for name in args.methods:
        folder = args.out / name
        for task in tasks:
            for steps in (args.steps, 2 * args.steps, 4 * args.steps):
                training = replace(preset.training, steps=steps, lr=args.lr)
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
                options=CPU,
            )
        )
        print(f"{name} merged: {_since(started)}")
    folders = find_checkpoints([args.out / name / part for name in args.methods for part in (*tasks, "merged")])
    rows = evaluate(folders, options=CPU)
    table = main_table(rows)
    write_report(args.out, rows, table, checkpoints=folders)
    print(markdown(table))
    print(verdict(table))
    print(f"report: {args.out}, {_since(started)}")
    if not better:
        sys.exit("clip_tiny.py: an expert is no better than the base on its own rows: raise --steps or lower --lr")


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.0f} s"


if __name__ == "__main__":
    try:
        main(tyro.cli(Tiny, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"clip_tiny.py: {error}")
