"""The model card's metadata are what the hub's own client takes."""

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id

from smat_fn.scripts.merge.card import adapter_card, card, model_ids

NAMES = (
    "gpt2", "owner/name", "a-b_c.d", "my base", "two/slashes/here", "-start", "end-", "a--b", "a..b", "repo.git",
    "owner/x.git",     "ü",
    "x" * 96, "x" * 97, "./folder", "owner/", ".hidden", "owner/-x", "name@revision", "1", "a/b.", "_a_",
)  # fmt: skip
MANIFEST = {
    "merger": "ta", "hyperparameters": {"coef": 1.0}, "label": "A+B", "experts": {"A": None, "B": None}, "dev": {},
    "dev_curve": [], "base_fingerprint": "0", "fingerprint": "1", "versions": {"smat_fn": "0"},
    "files": {"config.json": "2"},     "inputs": {}, "merge_seed": 0,
}  # fmt: skip


def takes(name):
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def test_names_are_those_that_the_hubs_client_takes():
    assert {name: model_ids([name]) == [name] for name in NAMES} == {name: takes(name) for name in NAMES}
    assert any(map(takes, NAMES))
    assert not all(map(takes, NAMES))


@pytest.mark.parametrize("name", ["owner/base", "my base (v2)", None])
def test_metadata_of_an_adapter_name_its_base_if_the_hub_can_have_it(name):
    adapter = {"method": "svd", "ranks": [2, 2], "adapters": ["A"], "weights": {}, "versions": {}, "base_model": name}
    found = ModelCard(adapter_card(adapter), ignore_metadata_errors=False).data.to_dict()
    known = name if name == "owner/base" else None
    assert (found.get("base_model"), found.get("base_model_relation")) == (known, known and "adapter")
    assert name is None or f"Base: `{name}`" in adapter_card(adapter)


def test_bars_in_names_stay_in_their_cells():
    experts = {"experts": {"A|1": None}, "base_model": [], "files": {"x|y": "2"}, "inputs": {"expert 'A|1'": {}}}
    adapter = {"method": "svd", "ranks": [2, 2], "adapters": ["A|1"], "weights": {}, "versions": {}, "base_model": None}
    texts = card(MANIFEST | experts), adapter_card(adapter)
    for line in ("| A\\|1 | |  |", "| x\\|y | `2` |", "| read of expert 'A\\|1' | SHA-256 |"):
        assert f"\n{line}\n" in texts[0]
    assert "\n| A\\|1 | 1 |\n" in texts[1]


@pytest.mark.parametrize("names", [["owner/base", "my base", "owner/expert"], ["my base"]])
def test_metadata_are_read_by_the_hubs_client_and_name_models_alone(names):
    found = ModelCard(card(MANIFEST | {"base_model": names}), ignore_metadata_errors=False)
    kept = [name for name in names if "/" in name]
    assert (found.data.base_model or []) == kept
    assert found.data.tags == ["merge", "smat_fn", "ta"]
    assert found.data.library_name == "transformers"
    assert ModelCard(str(found)).data.to_dict() == found.data.to_dict()
    assert all(map(takes, kept))
