"""A weight and a density for each expert of a run, and a greedy soup, by their score on dev.

    python train.py ft --steps 100 --out runs/ft
    python examples/search_weights.py runs/ft

`score` is the mean of the run's tasks: return any other number of the merged parameters instead, and let any optimizer
propose the trials. The best of many dev scores is optimistic: compare on test rows. The same by CMA-ES:
`merge.py ties --search --trials 100 --trials-over weights densities`, or in Python `smat_fn.merge.select_numbers`.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from smat_fn.merge import ties, weight_average
from smat_fn.suites import load_suite
from smat_fn.types import Params

Numbers = dict[str, float]  # by expert


def merged(base: Params, experts: dict[str, Params], weights: Numbers, densities: Numbers) -> Params:
    """TIES with a weight and a density for each expert; those not named have weight 1 and density 0.2."""
    return ties(base, experts, coef=0.5, keep=0.2, weights=weights, densities=densities)


def search(
    base: Params, experts: dict[str, Params], score: Callable[[Params], float], trials: int
) -> tuple[float, Numbers, Numbers]:
    """The best dev score of random weights and densities, and these."""
    draw, best = random.Random(0), (float("-inf"), Numbers(), Numbers())
    for _ in range(trials):
        weights = {name: draw.uniform(0.2, 1.5) for name in experts}
        densities = {name: draw.uniform(0.1, 0.9) for name in experts}
        found = score(merged(base, experts, weights, densities))
        best = max(best, (found, weights, densities), key=lambda trial: trial[0])
    return best


def greedy_soup(experts: dict[str, Params], score: Callable[[Params], float]) -> tuple[float, list[str]]:
    """Experts from the best one on, each added to the average if the score does not fall (Wortsman et al., 2022)."""
    scores = {name: score(params) for name, params in experts.items()}
    first, *rest = sorted(scores, key=lambda name: -scores[name])
    chosen, best = [first], scores[first]
    for name in rest:
        found = score(weight_average({own: experts[own] for own in (*chosen, name)}))
        if found >= best:
            chosen, best = [*chosen, name], found
    return best, chosen


def main(run: Path, trials: int = 20) -> None:
    """Print what was found, and write the parameters merged with it."""
    base = load_file(run / "base" / "model.safetensors")
    suite = load_suite(**json.loads((run / "base" / "manifest.json").read_text(encoding="utf-8"))["suite"])
    experts = {task: load_file(run / task / "model.safetensors") for task in suite.tasks if (run / task).is_dir()}

    def score(params: Params) -> float:
        return sum(suite.score(params, task, "dev") for task in experts) / len(experts)

    print(f"TIES, equal weights: {score(merged(base, experts, {}, {})):.2f}")
    best, weights, densities = search(base, experts, score, trials)
    print(f"TIES, best of {trials}: {best:.2f}")
    for name in experts:
        print(f"  {name}: weight {weights[name]:.2f}, density {densities[name]:.2f}")
    best, chosen = greedy_soup(experts, score)
    print(f"greedy soup: {best:.2f} of {', '.join(chosen)}")
    save_file(merged(base, experts, weights, densities), run / "searched.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
