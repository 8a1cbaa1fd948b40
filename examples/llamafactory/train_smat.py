"""LLaMA-Factory's supervised fine-tuning with SMAT attached to its trainer.

    python examples/llamafactory/train_smat.py config.yaml       # instead of: llamafactory-cli train config.yaml

Install `smat_fn` with `--no-deps`, and numba, beside LLaMA-Factory: it requires older versions of other packages.

LLaMA-Factory has no plugins, so its trainer class is replaced by one that attaches SMAT when it is made.
"""

from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

from smat_fn.integrations.trainer import attach
from smat_fn.random import key


class Trainer(workflow.CustomSeq2SeqTrainer):
    """Attaches SMAT; the settings are the paper's for language models."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        attach(self, key=key(self.args.seed), alpha_min=0.2, drop_prob=0.5, sigma=2e-3, period=4)


if __name__ == "__main__":
    workflow.CustomSeq2SeqTrainer = Trainer
    run_exp()
