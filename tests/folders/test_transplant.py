"""Another model's tokenizer: rows of shared tokens, of new ones in closed form, ids, files, errors."""

import json
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from smat_fn import checkpoint
from smat_fn.folders.inputs.spelling import matches, spelling_of
from smat_fn.folders.inputs.tokens import tokenizer_of
from smat_fn.folders.transplant import open_transplant, transplant_tokenizer
from smat_fn.scripts import entry

TEXT = [
    "the cat sat on the mat and the dog sat on the log",
    "these other cats and dogs are there on the other mats",
    "naïve café: a déjà vu of the thing\nthat the cat sat on",
]
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def byte_level(folder, size, *, eos="<|end|>", text=TEXT, **more):
    """A tokenizer as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[eos], show_progress=False)
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=eos, eos_token=eos, **more).save_pretrained(
        folder
    )


def pieces(folder, size):
    """A tokenizer as Llama's: pieces with U+2581 for a space, and bytes to fall back to."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        TEXT[:2], trainers.BpeTrainer(vocab_size=size, special_tokens=special + bytes_, show_progress=False)
    )
    parts = json.loads(made.to_str())
    parts["added_tokens"] = [own for own in parts["added_tokens"] if own["content"] in special]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def llama(folder, *, seed=0, width=16, padding=0, tied=False, dtype=torch.float32, shards=False, **ids):
    """A small Llama for the tokenizer in a folder; returns its leaves."""
    torch.manual_seed(seed)
    rows = 1 + max(transformers.AutoTokenizer.from_pretrained(folder).get_vocab().values()) + padding
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.5, **ids,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="4kB" if shards else "1GB")
    return leaves(folder)


def leaves(folder):
    return {path: leaf for file in sorted(folder.glob("*.safetensors")) for path, leaf in load_file(file).items()}


def ids_of(folder):
    return transformers.AutoTokenizer.from_pretrained(folder).get_vocab()


def made(model, donor, out, *, method="omp", k=8, **more):
    """Leaves of a transplant."""
    asked = open_transplant(model, donor, method=method, k=k)
    report = transplant_tokenizer(asked, out, **more)
    return leaves(out), asked, report


def words(folder, tokens, **more):
    """A tokenizer of whole words, the ids in this order."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", **more).save_pretrained(folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["omp", "subtokens"])
def test_a_models_own_tokenizer_gives_a_bit_identical_model(method, tied, folders, tmp_path):
    byte_level(tmp_path / "model", 300)
    before = llama(tmp_path / "model", padding=5, tied=tied, dtype=torch.bfloat16, shards=True, eos_token_id=0)
    after, asked, report = made(
        tmp_path / "model", tmp_path / "model", tmp_path / "out", method=method, shard_size=4000
    )
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    folders.assert_same_bits(after, before)
    assert not report.notes
    assert len(asked.lacking) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((tmp_path / "model" / name).read_text())


def test_a_permuted_vocabulary_gives_permuted_rows_logits_and_ids(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(9))]
    order = [5, 0, 7, 2, 3, 11, 1, 4, 6, 10, 9, 8]
    words(tmp_path / "model", tokens, bos_token="<s>", eos_token="</s>")
    words(tmp_path / "donor", [tokens[i] for i in order], bos_token="<s>", eos_token="</s>", chat_template="{{ 'x' }}")
    before = llama(tmp_path / "model", bos_token_id=1, eos_token_id=[2, 4], pad_token_id=0)
    llama(tmp_path / "donor", seed=1)
    after, *_ = made(tmp_path / "model", tmp_path / "donor", tmp_path / "out")
    for path, leaf in before.items():
        assert torch.equal(after[path], leaf[order] if path in (EMBEDDINGS, HEAD) else leaf)
    text = "t3 t1 t4 t1 t5"
    logits = []
    for name in ("model", "out"):
        own = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        with torch.no_grad():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
            logits.append(loaded(own(text, return_tensors="pt").input_ids).logits)
    torch.testing.assert_close(logits[1], logits[0][..., order])
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "out" / name).read_text())
        assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (6, [3, 7], 1)
    assert own.chat_template == "{{ 'x' }}"


@pytest.mark.parametrize("donor_tied", [False, True])
@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_new_token_gets_the_sum_of_the_models_rows_that_its_row_is_of_the_donors(tied, dtype, donor_tied, tmp_path):
    shared = ["<unk>", *(f"t{i}" for i in range(15))]
    words(tmp_path / "model", [*shared, "old"])
    words(tmp_path / "donor", ["new", *shared[::-1]])
    before = llama(tmp_path / "model", width=24, tied=tied, dtype=dtype, padding=3)
    donor = llama(tmp_path / "donor", width=32, tied=donor_tied, padding=1)
    rows = 8 * torch.eye(16, 32) + torch.eye(16, 32).roll(1, 1)
    donor[EMBEDDINGS][1:17], donor[EMBEDDINGS][0] = rows, 3 * rows[4] - rows[9] + 2 * rows[12]
    if not donor_tied:
        donor[HEAD][1:17], donor[HEAD][0] = rows, 2 * rows[1] - 5 * rows[6] + rows[7]
    save_file(donor, tmp_path / "donor/model.safetensors", {"format": "pt"})
    after, _, report = made(tmp_path / "model", tmp_path / "donor", tmp_path / "out", k=3)
    assert report.notes == ("1 tokens of the model are not in the new tokenizer: dropped",)
    sums = {EMBEDDINGS: {4: 3, 9: -1, 12: 2}, HEAD: {1: 2, 6: -5, 7: 1}}
    for path in (EMBEDDINGS, HEAD)[: 2 - tied]:
        own = before[path][:16].flip(0)  # in the donor's order
        wanted = sum(c * own[i].double() for i, c in sums[EMBEDDINGS if donor_tied else path].items())
        assert torch.equal(after[path][1:17], own)
        torch.testing.assert_close(after[path][0], wanted.to(dtype), rtol=0 if tied else 1e-7, atol=0 if tied else 1e-6)
        # the donor has one row behind its tokens: it is the model's first one
        assert torch.equal(after[path][17:], before[path][17:18])
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.vocab_size, config.hidden_size) == (18, 24)


def test_centred_sums_are_of_differences_from_the_mean_of_the_shared_rows(tmp_path):
    shared = ["<unk>", *(f"t{i}" for i in range(15))]
    words(tmp_path / "model", [*shared, "old"])
    words(tmp_path / "donor", [*shared, "new"])
    before, donor = llama(tmp_path / "model", tied=True), llama(tmp_path / "donor", width=32, tied=True)
    rows = 8 * torch.eye(16, 32)
    middle = rows.mean(0)
    donor[EMBEDDINGS] = torch.stack([*rows, middle + 3 * (rows[4] - middle) - (rows[9] - middle)]) + 7
    save_file(donor, tmp_path / "donor/model.safetensors", {"format": "pt"})
    after, *_ = made(tmp_path / "model", tmp_path / "donor", tmp_path / "out", method="omp-centred", k=2)
    own = before[EMBEDDINGS][:16].double()
    wanted = own.mean(0) + 3 * (own[4] - own.mean(0)) - (own[9] - own.mean(0))
    torch.testing.assert_close(after[EMBEDDINGS][16], wanted.float(), rtol=1e-5, atol=1e-5)


def test_rows_of_which_nothing_is_known_are_the_models_mean_row(tmp_path):
    words(tmp_path / "model", ["<unk>", "a", "b"])
    words(tmp_path / "donor", ["<unk>", "a", "b", "zero", "none"])
    before = llama(tmp_path / "model", padding=1)
    donor = llama(tmp_path / "donor", seed=1, padding=2)
    for path in (EMBEDDINGS, HEAD):
        donor[path][3] = 0
        donor[path] = donor[path][:4].clone()
    save_file(donor, tmp_path / "donor/model.safetensors", {"format": "pt"})
    for method in ("omp", "omp-centred", "nearest", "subtokens", "mean"):
        after, _, report = made(tmp_path / "model", tmp_path / "donor", tmp_path / method, method=method, k=2)
        for path in (EMBEDDINGS, HEAD):
            mean = before[path][:3].double().mean(0).float()
            # config.json of the donor has 7 rows: of those of no token the model has one
            assert torch.equal(after[path], torch.stack([*before[path][:3], mean, mean, before[path][3], mean]))
        rowless = [f"1 new tokens have no row in {tmp_path / 'donor'}: they get the mean row"]
        assert [*report.notes] == ([] if method in ("subtokens", "mean") else rowless)


def test_tokens_of_one_text_match_whatever_alphabet_spells_them(tmp_path):
    pieces(tmp_path / "sp", 320)
    byte_level(tmp_path / "bytes", 330)
    words(tmp_path / "x", ["<unk>", "the"])
    sp, own = (spelling_of("x", tokenizer_of(tmp_path / name)) for name in ("sp", "bytes"))
    by_piece, by_byte = ids_of(tmp_path / "sp"), ids_of(tmp_path / "bytes")
    found = matches(sp, own, len(by_piece))
    for theirs, ours in {"Ġthe": "▁the", "Ġ": "▁", "a": "a", "Ċ": "<0x0A>", "Ã": "<0xC3>", "<|end|>": "</s>"}.items():
        assert found[by_byte[theirs]] == by_piece[ours], theirs
    assert by_byte["the"] not in found or found[by_byte["the"]] == by_piece["the"]
    back = matches(own, sp, len(by_byte))
    for ours, theirs in {"▁the": "Ġthe", "<0x0A>": "Ċ", "<0x61>": "a", "<s>": "<|end|>", "</s>": "<|end|>"}.items():
        assert back[by_piece[ours]] == by_byte[theirs], ours
    assert by_piece["<unk>"] not in back
    assert matches(sp, sp, len(by_piece)) == {i: i for i in range(len(by_piece))}  # <0x61> is not a
    assert max(matches(sp, own, 280).values()) < 280  # a token without a row is none


def test_wordpiece_marks_the_inside_of_words(tmp_path):
    own = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##re": 2, "se": 3}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]").save_pretrained(tmp_path / "wp")
    byte_level(tmp_path / "bytes", 300, text=["the there theres see re"] * 9)
    wp, by_byte = spelling_of("x", tokenizer_of(tmp_path / "wp")), ids_of(tmp_path / "bytes")
    found = matches(spelling_of("x", tokenizer_of(tmp_path / "bytes")), wp, 999)
    assert found[1] == by_byte["Ġthe"]
    assert found[2] == by_byte["re"]
    assert [wp.split(b" there"), wp.split(b"re"), wp.split(b" xyz")] == [[1, 2], [2], []]


def test_subtokens_are_those_of_the_models_tokenizer_without_a_space_before_them(tmp_path):
    pieces(tmp_path / "model", 300)
    byte_level(tmp_path / "donor", 330)
    before = llama(tmp_path / "model", dtype=torch.bfloat16)
    after, asked, _ = made(tmp_path / "model", tmp_path / "donor", tmp_path / "out", method="subtokens")
    own, theirs = ids_of(tmp_path / "model"), ids_of(tmp_path / "donor")
    assert asked.donor.leaves == {}  # no weights lie there
    for text, split in {"Ġcats": ["▁cat", "s"], "these": ["the", "se"], "vu": ["<0x76>", "<0x75>"]}.items():
        rows = before[EMBEDDINGS][[own[piece] for piece in split]]
        assert torch.equal(after[EMBEDDINGS][theirs[text]], rows.double().mean(0).bfloat16()), text


def refuse(match, *words, **more):
    with pytest.raises(ValueError, match=match):
        open_transplant(*words, **more)


def test_what_cannot_be_transplanted_is_refused_before_any_work(tmp_path):
    byte_level(tmp_path / "model", 270)
    byte_level(tmp_path / "donor", 300)
    leaves_ = llama(tmp_path / "model")
    llama(tmp_path / "donor", seed=1)
    model, donor = tmp_path / "model", tmp_path / "donor"
    refuse("method 'opm' is unknown, did you mean 'omp'?", model, donor, method="opm")
    refuse("k is 0, must be an integer of at least 1", model, donor, k=0)
    shared = len(ids_of(model).keys() & ids_of(donor))
    refuse(
        f"k is 5000, but the model and {donor} share {shared} tokens: give k {shared}, or method subtokens",
        model, donor, k=5000,
    )  # fmt: skip
    (tmp_path / "bare").mkdir()
    save_file(leaves_, tmp_path / "bare/model.safetensors")
    refuse(f"tokenizer_from: {tmp_path / 'bare'} has no tokenizer", model, tmp_path / "bare")
    refuse(f"model: {tmp_path / 'bare'} has no tokenizer", tmp_path / "bare", donor)
    byte_level(tmp_path / "alone", 300)
    refuse(f"tokenizer_from: {tmp_path / 'alone'} holds neither model.safetensors nor", model, tmp_path / "alone")
    byte_level(tmp_path / "bare", 300)
    save_file({"layer.weight": torch.ones(2, 2)}, tmp_path / "bare/model.safetensors")
    refuse(f"tokenizer_from: {tmp_path / 'bare'} has no embeddings of tokens", model, tmp_path / "bare")
    words(tmp_path / "other", [f"w{i}" for i in range(9)])
    llama(tmp_path / "other")
    refuse("share 0 tokens: give method subtokens", model, tmp_path / "other")
    leaves_[EMBEDDINGS][0] = float("nan")
    save_file(leaves_, tmp_path / "donor/model.safetensors", {"format": "pt"})
    asked = open_transplant(tmp_path / "other", model, method="mean")
    with pytest.raises(ValueError, match="which is, holds or lies in"):
        transplant_tokenizer(asked, model / "inside")


def test_a_donor_whose_rows_are_not_finite_is_named_and_nothing_is_written(tmp_path):
    words(tmp_path / "model", ["<unk>", "a"])
    words(tmp_path / "donor", ["<unk>", "a", "b"])
    llama(tmp_path / "model")
    donor = llama(tmp_path / "donor")
    donor[EMBEDDINGS][2, 0] = float("inf")
    save_file(donor, tmp_path / "donor/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"'{EMBEDDINGS}' of {tmp_path / 'donor'} holds values that are NaN or inf"):
        made(tmp_path / "model", tmp_path / "donor", tmp_path / "out", k=1)
    assert not [*tmp_path.glob("*out*")]


def test_the_command_plans_writes_keeps_and_verifies_the_model(tmp_path, monkeypatch, capsys):
    pieces(tmp_path / "model", 300)
    byte_level(tmp_path / "donor", 330, pad_token="<|pad|>")
    llama(tmp_path / "model", bos_token_id=1, eos_token_id=2, pad_token_id=0)
    llama(tmp_path / "donor", seed=1, width=8)

    monkeypatch.chdir(tmp_path)

    def merge(*words, ends=False):
        """The output of merge.py, or its last line where it fails."""
        monkeypatch.setattr(sys, "argv", ["merge.py", *words])
        if not ends:
            entry.merge("merge.py", ())
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as error:
            entry.merge("merge.py", ())
        return str(error.value)

    def run(*more, **how):
        words = "--model", "model", "--tokenizer-from", "donor", "--out", "out", "--k", "4", *more
        return merge("transplant-tokenizer", *words, **how)

    said = run("--dry-run")
    assert "out: all checks passed" in said
    assert "floating-point operations" in said
    assert not (tmp_path / "out").exists()
    assert "transplanted: out" in run()
    assert "kept: out: already finished" in run()
    assert "out exists and holds something else (its hyperparameters.k is 4" in run("--k", "3", ends=True)
    assert "transplanted: out" in run("--k", "3", "--overwrite")
    assert "--k is 0, must be an integer of at least 1" in run("--k", "0", ends=True)
    manifest = checkpoint.load_manifest(tmp_path / "out")
    assert manifest["kind"] == "transplanted"
    tokens = manifest["tokens"]
    assert tokens["shared"] + tokens["approximated"] == tokens["all"] == len(ids_of(tmp_path / "donor"))
    card = (tmp_path / "out/README.md").read_text()
    assert "# model with the tokenizer of donor" in card
    assert str(tmp_path) not in card
    assert "have the hashes stored in out" in merge("verify", "out")
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert own.get_vocab() == ids_of(tmp_path / "donor")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id) == (own.bos_token_id, own.eos_token_id)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generate(**own("the cat", return_tensors="pt"), max_new_tokens=3).shape[1] > 2
