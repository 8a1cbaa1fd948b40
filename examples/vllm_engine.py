"""vLLM as an engine of language tasks (docs/serving.md): each model starts vLLM anew from a folder.

PYTHONPATH=examples python eval.py runs/smat --out runs/scores --suite-options engine vllm_engine:make decode_batch 256
"""

import atexit
from tempfile import TemporaryDirectory

import vllm

from smat_fn.checkpoint import fingerprint
from smat_fn.evaluate.engine import row_seed


class Vllm:
    """An engine. Args: options: arguments of ``vllm.LLM``."""

    def __init__(self, **options):
        self.options = options
        self.llm = self.loaded = self.folder = None

    def __repr__(self):  # the name in the score cache
        return f"vllm {vllm.__version__} {self.options}"

    def __call__(self, model, tokenizer, params, *, batch_size):
        if self.loaded != (found := fingerprint(params)):
            self.load(model.module, tokenizer, params, batch_size)
            self.loaded = found

        def generate(prompts, settings, seed, *, repeat=0, rows=None):
            asked = [
                vllm.SamplingParams(
                    max_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    seed=row_seed(seed, repeat, row),
                )
                for row in (range(len(prompts)) if rows is None else rows)
            ]
            return [found.outputs[0].text.strip() for found in self.llm.generate(list(prompts), asked, use_tqdm=False)]

        return generate

    def load(self, module, tokenizer, params, batch_size):
        if self.folder is None:
            self.folder = TemporaryDirectory()
            atexit.register(self.folder.cleanup)
        place = self.folder.name
        module.save_pretrained(place, state_dict=dict(module.named_parameters()) | dict(params))
        tokenizer.save_pretrained(place)
        if self.llm is not None:  # vLLM's reload_weights is faster, but was wrong on a CPU (docs/serving.md)
            self.llm.llm_engine.engine_core.shutdown()
        dtype = str(next(iter(params.values())).dtype).removeprefix("torch.")
        self.llm = vllm.LLM(place, dtype=dtype, max_num_seqs=batch_size, **self.options)


# the suite's own model stays in the GPU's memory, so vLLM takes only a share
make = Vllm(max_model_len=2048, gpu_memory_utilization=0.6)
eager = Vllm(max_model_len=2048, gpu_memory_utilization=0.6, enforce_eager=True)  # without compilation
