"""Every family, tiny: trained, merged, published, loaded again, extracted as an adapter, loaded by peft."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import families
from smat_fn.folders import extract_lora

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
# one of each way to load, name and store leaves; the others are slow tests
FAST = (
    *("llama", "gpt2", "mixtral", "t5"),
    *("bert (a masked language model, the top layer)", "clip"),
)


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in families.FAMILIES]
)
def test_what_is_trained_can_be_published(name, tmp_path):
    pytest.importorskip("peft")
    found = families.check(name, tmp_path)
    assert found.low_rank > 0
    # the page is of this outcome
    assert families.row(name, found) in DOCUMENT.read_text(encoding="utf-8").splitlines()


def test_the_page_lists_all_families():
    assert set(FAST) <= families.FAMILIES.keys()
    lines = re.findall(r"^\| (?!family|---)", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == len(families.FAMILIES)


def test_a_check_that_fails_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "export", lambda model, base, out: shutil.copytree(base, out))
    with pytest.raises(AssertionError, match=r"\.weight is another one when it is loaded again"):
        families.check("llama", tmp_path)


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
@pytest.mark.parametrize("name", ["opt", "phi"])
def test_a_norm_of_which_one_leaf_changed_is_stored_with_all(name, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    families.write_base(name, tmp_path / "base")
    expert = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    changed = [path for path, _ in expert.named_parameters() if path.endswith(("norm.bias", "q_proj.weight"))]
    for path in changed:
        expert.get_parameter(path).data += 0.1
    expert.save_pretrained(tmp_path / "expert")
    made = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "adapter", rank=4)
    assert sorted(made.errors) == sorted(changed)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    for path, leaf in expert.state_dict().items():
        torch.testing.assert_close(found[path], leaf, rtol=0, atol=1e-6, msg=path)
