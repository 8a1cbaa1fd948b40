import pytest

from smat_fn.suites import load_suite

FEW = {"pretrain_steps": 2, "pretrain_batch": 32, "pretrain_warmup": 1, "images_per_task": 120}


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """``few(seed)``: the digits suite after a few pretraining steps, through a cache of this run."""

    def load(seed=0, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SMAT_FN_CACHE", str(folder))
            return load_suite("digits", seed=seed, **FEW | options)

    folder = tmp_path_factory.mktemp("cache")
    return load


@pytest.fixture(scope="session")
def suite(few):
    return few()
