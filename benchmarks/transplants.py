"""Rows of new tokens by every method of `merge.py transplant-tokenizer`: bits per byte of SmolLM2-135M on texts.

SmolLM2 gets the tokenizer of MiniLM, an encoder's, with 13,213 new tokens. And it keeps its own, of which the tokens
from 12,000 on are taken as new: the donor is then SmolLM2 itself, its rows with noise of half their standard deviation.
Rows are made of those new tokens alone that occur in the texts.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from smat_fn.data.rows import TextRows, load_rows
from smat_fn.folders.transplant import Method, Transplant, open_transplant, transplanted

from . import timing

RESULTS = timing.RESULTS / "transplants.json"
LEAF = "model.embed_tokens.weight"  # the only leaf by token: the head is tied
KNOWN = 12_000  # tokens of SmolLM2 that are not new in the second case
TEXTS, CHARACTERS = 8, 1500


def main(*, backbones: Path, data: Path, out: Path = RESULTS) -> None:
    """Measure, print a table, write the results.

    Args:
        backbones: folder that `python -m benchmarks backbones` has filled.
        data: a folder of TRACE's tasks, of which the dev rows of MeetingBank are read.
        out: file of the results.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, donor = backbones / "smollm2-135m", backbones / "minilm"
    theirs, own = (AutoTokenizer.from_pretrained(path) for path in (donor, model))
    found = load_rows(str(data), "MeetingBank", "dev")
    assert isinstance(found, TextRows)
    texts = [prompt.partition("transcripts:\n")[2][:CHARACTERS] for prompt in found.prompts[:TEXTS]]
    lower = [theirs.decode(ids) for ids in theirs(texts, add_special_tokens=False).input_ids]  # as MiniLM writes them
    cases = {"MiniLM": (theirs, lower, theirs.cls_token_id), "its own rows, noise": (own, texts, own.bos_token_id)}
    rows = [{"donor": f"none (texts of {name})", "rows": "its own tokens", "bits per byte": 0.0} for name in cases]
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row, (_, written, _) in zip(rows, cases.values(), strict=True):
        row["bits per byte"] = bits(lm, own, written, own.bos_token_id)
    for name, (tokenizer, written, start) in cases.items():
        seen = {i for text in written for i in tokenizer(text, add_special_tokens=False).input_ids}
        for method, weights, new in embeddings(model, donor if name == "MiniLM" else model, seen):
            lm.get_input_embeddings().weight = lm.lm_head.weight = torch.nn.Parameter(weights)
            value = bits(lm, tokenizer, written, start)
            rows.append({"donor": name, "rows": method, "new": new, "bits per byte": value})
            print(rows[-1], flush=True)
    timing.store(
        out, {**timing.describe("python -m benchmarks transplants --backbones BACKBONES --data DATA"), "rows": rows}
    )
    print(timing.markdown(rows), flush=True)


def embeddings(model: Path, donor: Path, seen: set[int]) -> Iterator[tuple[str, Tensor, int]]:
    """Method, embeddings of the model, and the number of new rows among those of the tokens that are seen."""
    for method in get_args(Method):
        asked = open_transplant(model, donor, method=method)
        if donor == model:
            if method == "subtokens":  # its own tokenizer knows every token
                continue
            asked = _of_itself(asked)
        some = torch.tensor([i for i in asked.lacking.tolist() if i in seen])
        weights = transplanted(asked._replace(lacking=some), torch.device("cpu"))[0].leaf(LEAF).float()
        yield method, weights, len(some)
        if method == "mean":
            known = asked.model.leaf(LEAF).float()[asked.known]
            noise = torch.randn(len(some), weights.shape[1], generator=torch.Generator().manual_seed(0))
            yield (
                "random, with mean and standard deviation of each column",
                weights.index_copy(0, some, known.mean(0) + known.std(0) * noise),
                len(some),
            )


def _of_itself(asked: Transplant) -> Transplant:
    """The model as its own donor, with noise, that lacks its tokens from `KNOWN` on."""
    rows = asked.model.leaf(LEAF)
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    noisy = rows + 0.5 * rows.float().std() * noise
    donor = asked.donor
    if donor.leaves:
        donor = donor.with_leaf(LEAF, noisy.to("meta"), lambda start, stop: noisy.flatten()[start:stop])
    table, every = torch.arange(len(rows)), torch.arange(len(rows))
    table[KNOWN:] = -1
    found = {i: i for i in range(KNOWN)}
    return asked._replace(
        donor=donor, table=table, known=every[:KNOWN], shared=every[:KNOWN], lacking=every[KNOWN:], found=found
    )


def bits(lm: Any, tokenizer: Any, texts: list[str], start: int) -> float:
    """Bits a byte of texts, after a token that begins them."""
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[start, *tokenizer(text, add_special_tokens=False).input_ids]])
        with torch.no_grad():
            nats += float(cross_entropy(lm(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    return round(nats / math.log(2) / sum(len(text.encode()) for text in texts), 3)
