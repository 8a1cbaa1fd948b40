import pytest

from smat_fn.evaluate import Result


@pytest.fixture
def rows():
    """Two methods, two tasks, two seeds, by formula: task scores 10 and 20 higher than multiples of the column."""
    out = []
    for bonus, method in ((0.0, "FT"), (4.0, "SMAT")):
        for seed in (0, 1):
            for place, model in enumerate(("expert", "wa", "ta", "ties", "dare", "della")):
                for more, task in ((10.0, "a"), (20.0, "b")):
                    name = f"expert:{task}" if model == "expert" else model
                    out.append(Result(method, name, task, "test", 10.0 * place + more + bonus + 2 * seed, seed))
    return out
