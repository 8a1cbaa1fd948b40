"""Malformed folders, recipes and flags for merge.py: every call ends with one line, without traceback or changed file.

Each case takes a small valid call, damages files or options at random by its seed, and calls the script's own main.
A case is a failure if anything but ValueError, OSError or the command line's exit comes out, if a file changes that
the command does not own, or if a failed one leaves hidden files behind. Prints the failures and how the cases ended.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import runpy
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

COMMAND = "python -m benchmarks fuzz"
JSON = ("[]", '"x"', "3", "{", "", "{}", '{"files": 3}', '{"weight_map": []}', '{"weight_map": {}}', "\0\1")
NUMBERS = ("0", "-1", "nan", "inf", "1e400", "x", "", "3", "0.5")
FLAGS = (
    "--threads", "--memory-mib", "--shard-size", "--out-dtype", "--seed", "--coef", "--coefs", "--grid", "--keep",
    "--drop-prob", "--vocabulary", "--semantics", "--device", "--preset", "--suite-options", "--experts", "--run",
    "--config-from", "--tokenizer-from", "--chat-template", "--heads", "--base", "--part", "--lines", "--dry-run",
    "--weights", "--densities", "--density", "--method", "--rank", "--task", "--overwrite", "--json", "--plot",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, 3, -1, 0.5, float("nan"), "x", "0", "1e1", "", [], [1], [[1]], [None], {}, {"x": 1}, True,
)  # fmt: skip
MERGERS = ("wa", "ta", "ties", "dare", "della", "all", "tsv_merge", "slerp", "weighted_average", "model_stock")
RECIPES = (
    """
    merge_method: ties
    base_model: PLACE/base
    models:
      - {model: PLACE/a, parameters: {weight: [0.2, 0.5], density: [{filter: norm, value: 0.5}, {value: 1.0}]}}
      - {model: PLACE/base+PLACE/adapter, parameters: {weight: 0.5}}
    parameters: {normalize: true, int8_mask: true, lambda: 0.5}
    dtype: float32
    """,
    """
    merge_method: slerp
    base_model: PLACE/a
    slices: [{sources: [{model: PLACE/a, layer_range: [0, 1]}, {model: PLACE/b, layer_range: [0, 1]}]}]
    parameters: {t: [{filter: q, value: [0, 1]}, {value: 0.5}]}
    out_dtype: float16
    """,
    """
    merge_method: karcher
    models: [{model: PLACE/a}, {model: PLACE/b}]
    parameters: {max_iter: 4, tol: 1.0e-6}
    """,
    """
    merger: ties
    options: {coef: 0.3, keep: 0.5, aggregate: mean, scope: tensor, weights: {a: 0.5}, densities: {}, rescale: false}
    base: PLACE/base
    experts: {a: PLACE/a, b: PLACE/b}
    coef: {"*.q.*": 0.5, "*": 1.0}
    seed: 0
    semantics: paper
    out_dtype: same
    shard_size: 5000000
    vocabulary: error
    device: cpu
    """,
    """
    merger: weighted_average
    options: {weights: [0.3, 0.7], normalize: true}
    base: PLACE/a
    experts: {a: PLACE/a, b: "PLACE/a[0:1]"}
    chat_template: auto
    """,
)
MIXTURE = """
    base_model: PLACE/base
    gate_mode: random
    dtype: float32
    experts_per_token: 1
    experts:
      - {source_model: PLACE/a, positive_prompts: [x], residual_scale: 0.5}
      - {source_model: PLACE/b, positive_prompts: [y], noise_scale: 0.1}
    shared_experts:
      - {source_model: PLACE/a, positive_prompts: [z]}
    """


def main(arguments: list[str]) -> None:
    """Run the cases of a seed; exit 1 if one fails."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ends: Counter[str] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        for case in range(asked.cases):
            end, text = run_case(Path(place), random.Random(f"{asked.seed} {case}"))
            ends[end] += 1
            if end in ("traceback", "changed"):
                failed += 1
                print(f"case {case} of seed {asked.seed}: {end}\n{text}")
    print(f"{asked.cases} cases of seed {asked.seed}: " + ", ".join(f"{n} {end}" for end, n in sorted(ends.items())))
    sys.exit(failed > 0)


def run_case(place: Path, draw: random.Random) -> tuple[str, str]:
    """How a damaged call ended: "done", `told` (a clear error), "usage"; failures: "traceback", "changed"."""
    folder = place / "case"
    shutil.rmtree(folder, ignore_errors=True)
    words = _call(folder, draw)
    for _ in range(draw.choice((0, 1, 1, 2))):
        # what an earlier damage has left cannot always be damaged again
        with contextlib.suppress(OSError, TypeError, ValueError, SafetensorError):
            draw.choice(DAMAGES)(folder, draw)
    if draw.random() < 0.25:
        words += [
            draw.choice(FLAGS),
            *(draw.choice((*NUMBERS, "float16", "1KB", str(folder))) for _ in range(draw.choice((0, 1, 1, 2)))),
        ]
    before = _content(folder)
    out, err = io.StringIO(), io.StringIO()
    script = Path(__file__).parent.parent / "merge.py"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _words(["merge.py", *words]):
            runpy.run_path(str(script), run_name="__main__")
        end, text = "done", ""
    except SystemExit as error:
        told = isinstance(error.code, str)
        end, text = ("told" if told else "done" if not error.code else "usage"), str(error.code)
    except BaseException:
        end, text = "traceback", f"merge.py {' '.join(words)}\n{traceback.format_exc()}"
    after = _content(folder)
    if changed := sorted(name for name in before if after.get(name) != before[name]):
        end, text = "changed", f"merge.py {' '.join(words)}\n{changed}"
    if left := [name for name in after.keys() - before.keys() if end != "done" and "/." in f"/{name}"]:
        end, text = "changed", f"merge.py {' '.join(words)}\n{text}\nleft behind: {sorted(left)}"
    return end, text


def _call(folder: Path, draw: random.Random) -> list[str]:
    """A base, two experts and an adapter on disk, and a valid command line over them."""
    shapes = {"model.embed_tokens.weight": (6, 4), "model.layers.0.q.weight": (4, 4), "model.norm.weight": (4,)}
    for i, name in enumerate(("base", "a", "b")):
        (folder / name).mkdir(parents=True)
        generator = torch.Generator().manual_seed(i)
        leaves = {path: torch.randn(shape, generator=generator).bfloat16() for path, shape in shapes.items()}
        leaves["steps"] = torch.tensor([3, i])
        save_file(leaves, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    (folder / "adapter").mkdir()
    factors = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(4, 2)}
    stored = {f"base_model.model.model.layers.0.q.{name}": leaf for name, leaf in factors.items()}
    save_file(stored, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    merger = draw.choice(MERGERS)
    option = "--t" if merger == "slerp" else "--coef"
    coef = [] if merger in ("wa", "weighted_average", "model_stock") else [option, "0.4"]
    experts = [str(folder / name) for name in draw.choice((("a", "b"), ("a", "adapter"), ("a", "b", "adapter")))]
    kinds: list[Callable[[], list[str]]] = [
        lambda: [merger, "--base", str(folder / "base"), "--experts", *experts, *coef, "--out", str(folder / "out")],
        lambda: ["verify", str(folder / draw.choice(("base", "a", "out", "nowhere")))],
        lambda: ["export", experts[-1], "--base", str(folder / "base"), "--out", str(folder / "whole")],
        lambda: ["extract-lora", "--base", str(folder / "base"), "--expert", experts[0], "--rank",
                 draw.choice(NUMBERS), *draw.choice(([], ["--energy", "0.5"], ["--skip", "*"], ["--linear-only"])),
                 "--out", str(folder / "made")],
        lambda: ["adapters", "--experts", experts[-1], f"other={folder / 'adapter'}", "--method",
                 draw.choice(("cat", "svd", "linear", "knots")), "--out", str(folder / "made")],
        lambda: [*draw.choice((["recipe"], [])), str(_recipe(folder, draw)), "--out", str(folder / "out")],
        lambda: ["moe", str(_recipe(folder, draw, MIXTURE)), "--out", str(folder / "out")],
    ]  # fmt: skip
    return draw.choices(kinds, (6, 1, 1, 1, 1, 4, 1))[0]()


def _recipe(folder: Path, draw: random.Random, text: str | None = None) -> Path:
    """A recipe over the models of `_call`, some of its values replaced, left out or nested at random."""
    tree = {"": yaml.safe_load((text or draw.choice(RECIPES)).replace("PLACE", str(folder)))}
    for _ in range(draw.choice((0, 1, 1, 2))):
        places: list[tuple[Any, Any]] = []
        rest: list[Any] = [tree]
        while rest:
            node = rest.pop()
            inner = list(node.items() if isinstance(node, dict) else enumerate(node))
            places += [(node, key) for key, _ in inner]
            rest += [value for _, value in inner if isinstance(value, (dict, list))]
        node, key = draw.choice(places)
        if draw.random() < 0.2:
            del node[key]
        else:
            node[key] = draw.choice((draw.choice(VALUES), [node[key]], {"value": node[key]}))
        if not tree:
            break
    file = folder / "recipe.yml"
    file.write_text(yaml.safe_dump(tree.get("")))
    return file


def _file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))


def _cut(folder: Path, draw: random.Random) -> None:
    file = _file(folder, draw)
    os.truncate(file, draw.randrange(file.stat().st_size + 1))


def _flip(folder: Path, draw: random.Random) -> None:
    file = _file(folder, draw)
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 3, 20)) if content else 0):
        content[draw.randrange(min(len(content), 400))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def _texts(folder: Path, draw: random.Random) -> None:
    name = draw.choice(("config.json", "manifest.json", "model.safetensors.index.json", "adapter_config.json",
                        "tokenizer.json", "sources.json"))  # fmt: skip
    (folder / draw.choice(("base", "a", "b", "adapter")) / name).write_text(draw.choice(JSON))


def _setting(folder: Path, draw: random.Random) -> None:
    file = folder / "adapter" / "adapter_config.json"
    values: tuple[Any, ...] = (None, 3, -1, "x", [], [1], {"(": 1}, {"q": "x"}, True)
    name = draw.choice(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "bias", "use_dora"))
    file.write_text(json.dumps({**json.loads(file.read_text()), name: draw.choice(values)}))


def _links(folder: Path, draw: random.Random) -> None:
    place = folder / draw.choice(("a", "b", "out", "base", "whole"))
    shutil.rmtree(place, ignore_errors=True)
    place.symlink_to(draw.choice((place, folder / "nowhere", folder / "base")))


def _gone(folder: Path, draw: random.Random) -> None:
    file = _file(folder, draw)
    file.unlink()
    if draw.random() < 0.25:
        file.mkdir()


def _leaf(folder: Path, draw: random.Random) -> None:
    leaf = draw.choice(
        (torch.zeros(()), torch.zeros(0, 3), torch.full((4,), float("nan")), torch.ones(4, 4).to(torch.int8))
    )
    names = ("model.norm.weight", "model.layers.0.q.weight", "lm_head.weight", "module.x", "")
    save_file({draw.choice(names): leaf}, folder / draw.choice(("base", "a", "b")) / "model.safetensors")


def _there(folder: Path, draw: random.Random) -> None:
    out = folder / draw.choice(("out", "out/ta", "out/wa", "whole", "made"))
    out.mkdir(parents=True, exist_ok=True)
    (out / draw.choice(("mine.txt", "manifest.json", "model.safetensors"))).write_text(draw.choice(JSON))


DAMAGES = (_cut, _flip, _texts, _setting, _links, _gone, _leaf, _there)


@contextlib.contextmanager
def _words(words: list[str]) -> Any:
    kept, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = kept


def _content(folder: Path) -> dict[str, str]:
    """Every file by its hash, links by where they point."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
