"""``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME`` runs one."""

import importlib
import sys
from inspect import signature

import tyro

BENCHMARKS = {
    "digits": "FT against SMAT on digits over seeds, by docs/protocols/digits.md (about 10 minutes on 2 cores)",
    "digits-methods": "all methods tuned on digits, then ten seeds, by docs/protocols/digits_methods.md (over an hour)",
    "digits-report": "the same with its analyses, and a report of all in docs/results/digits_methods",
    "digits-onepass": "one backward pass a step against two, by docs/protocols/digits_onepass.md (hours on 2 cores)",
    "digits-passes": "the same with one budget of passes, by docs/protocols/digits_passes.md (two hours on 2 cores)",
    "digits-equal-passes": "the same at equal passes, by docs/protocols/digits_equal_passes.md (half an hour)",
    "digits-lora": "adapters by FT, SMAT and ASAM, by docs/protocols/digits_lora.md (two hours on 2 cores)",
    "digits-mergers": "the methods chosen there by every merger without data, a heat map (half an hour)",
    "digits-data-mergers": "the same experts by the mergers that need data, in the same heat map (an hour on one core)",
    "text-data-mergers": "the mergers that need data on experts of the text encoder (three hours on one core)",
    "studies": "one pass against two on pretrained backbones, by pages of docs/protocols (--dry-run: minutes)",
    "screening": "many training methods on digits, a first look by docs/protocols/screening.md (hours on 2 cores)",
    "minilm-methods": "all methods on a pretrained text encoder, by docs/protocols/minilm.md (hours on 2 cores)",
    "cpu": "the operations on one CPU thread, and both gradient engines (about 3 minutes)",
    "vmap": "sweeps over merged models in batches against a loop, on digits (one CPU thread, about a minute)",
    "sass": "every kernel variant compiled for sm_90, no GPU needed (about 2 minutes)",
    "kernels": "the kernels against a copy of the same bytes and two baselines (a CUDA device, about 3 minutes)",
    "steps": "steps of SMAT and FT, true shapes, every offload (a CUDA device, about 5 minutes)",
    "scale": "SMAT and FT on a Llama of 124M parameters on the CPU, in bf16 and float32 (an hour on 2 cores)",
    "compiling": "torch.compile of a step on as many leaves as Llama-1B has: nodes and seconds (about 3 minutes)",
    "train-features": "every way to train beside plain fine-tuning: steps/s and memory (2 cores, about 7 minutes)",
    "lora-memory": "memory of a step of adapters, a layer at a time and all at once (a CPU, about a minute)",
    "merge": "merging folders against mergekit in another Python (--mergekit PYTHON; tens of minutes)",
    "backbones": "pretrained backbones that packages ship, converted and checked (a minute, 300 MB of downloads)",
    "when-it-pays": "the gain over FT against interference, experts and rates, from all stored runs (runs nothing)",
    "transplants": "rows of new tokens by every method of transplant-tokenizer, on SmolLM2 (some minutes on 2 cores)",
    "families": "families of transformers, tiny: trained, merged, published, adapters; docs/families.md (a minute)",
    "fuzz": "malformed folders and flags for merge.py: a line each, never a traceback (300 cases, about a minute)",
    "mutants": "small faults put into the library, each of which a test of its folder must find (an hour on one core)",
    "readme": "tables of the pages from stored results and options (runs nothing)",
    "gpu": "all that needs a CUDA device, a short table last (under 8 minutes; --dry-run needs none)",
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in BENCHMARKS:
        print("\n".join(f"python -m benchmarks {name}: {what}" for name, what in BENCHMARKS.items()))
        sys.exit(bool(arguments))
    name, *words = arguments
    module = importlib.import_module("." + name.replace("-", "_"), __package__)
    if list(signature(module.main).parameters) == ["arguments"]:  # it reads the words itself
        module.main(words)
        return
    config = tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff
    tyro.cli(module.main, args=words, prog=f"python -m benchmarks {name}", description=module.__doc__, config=config)


if __name__ == "__main__":
    main(sys.argv[1:])
