"""Scores of models in memory."""

import pytest
import torch

from smat_fn.data import Suite
from smat_fn.evaluate import Result, score_models


@pytest.fixture
def suite():
    def score(params, task, split):
        return float(params["x"]) + {"a": 1, "b": 2}[task] + {"dev": 0, "test": 10}[split]

    return Suite("toy", ("a", "b"), {}, lambda p, t: True, lambda t: None, lambda t, k, s: None, score, {}, 0)


def test_experts_are_scored_on_their_task_and_merged_models_on_all(suite):
    models = {"expert:b": {"x": torch.tensor(20.0)}, "ta": {"x": torch.tensor(50.0)}}
    assert score_models(suite, models, "test", method="SMAT", seed=5, coefs={"ta": 0.3}) == [
        Result("SMAT", "expert:b", "b", "test", 32.0, 5),
        Result("SMAT", "ta", "a", "test", 61.0, 5, 0.3),
        Result("SMAT", "ta", "b", "test", 62.0, 5, 0.3),
    ]


def test_experts_of_no_task_are_refused(suite):
    with pytest.raises(ValueError, match=r"\['expert:c'\] are experts of no task of suite 'toy'"):
        score_models(suite, {"expert:c": {}}, "dev", method="FT", seed=0)
