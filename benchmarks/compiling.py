"""How long torch.compile takes for SMAT on as many leaves as Llama-1B has: nodes of the graph, and CPU seconds.

Every layer has the nine leaves of Llama's, all of few coordinates: the graph does not grow with the size of a leaf.
Seconds count child processes, such as the C++ compiler. Caches on disk are off.
"""

import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from smat_fn import draw, optim, random, reweight, simulate, value_and_grad
from smat_fn.mat import smat
from smat_fn.mat.step import as_tensors

from . import timing

RESULTS = timing.RESULTS / "compiling.json"
HIDDEN, INNER, VOCABULARY = 64, 128, 256
LAYERS = 1, 16


def main(*, layers: tuple[int, ...] = LAYERS, out: Path = RESULTS, dry_run: bool = False) -> None:
    """Measure, print a table, write the results.

    Args:
        layers: of the trees that are compared.
        out: file of the results.
        dry_run: trace without generating code, no result file.
    """
    options = {"force_disable_caches": True, "compile_threads": 1}  # in this process
    with warnings.catch_warnings(), torch._inductor.config.patch(options):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        rows = measured(layers, dry_run)
    if not dry_run:
        timing.store(out, {**timing.describe("python -m benchmarks compiling"), "rows": rows})
    print(timing.markdown(rows), flush=True)


def measured(layers: tuple[int, ...], dry_run: bool) -> list[dict[str, Any]]:
    """Rows of the table."""
    rows = []
    for name, make in CASES.items():
        for count in layers:
            function, arguments = make(leaves(count))
            backends = ("eager",) if dry_run else ("eager", "inductor")
            spent = {f"{backend}, CPU s": round(seconds(function, arguments, backend), 1) for backend in backends}
            rows.append({"what": name, "layers": count, "leaves": len(leaves(count)),
                         "nodes": nodes(function, arguments), **spent})  # fmt: skip
    return rows


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def simulation(params: dict[str, Tensor]) -> Case:
    """Drawing, simulating and reweighting."""

    def both(key: Tensor, params: dict[str, Tensor], base: dict[str, Tensor]) -> Any:
        drawn = draw(key, alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
        states = simulate(params, base, drawn, where=lambda path, leaf: "proj" in path)
        return states, reweight(states, drawn)

    return both, (random.key(0), params, {path: leaf + 1 for path, leaf in params.items()})


def step(params: dict[str, Tensor]) -> Case:
    """A whole step."""
    method = smat.build(loss, optim.adamw(1e-3, weight_decay=0.1), params, max_grad_norm=1.0, engine="func")
    return method.update, (random.key(0), as_tensors(method.init(params)), torch.ones(()))


def loss(params: Any, batch: Tensor) -> tuple[Tensor, None]:
    """A sum."""
    return torch.stack([leaf.float().sum() for leaf in params.values()]).sum() * batch, None


def gradient(params: dict[str, Tensor]) -> Case:
    """The part of a step that is the user's."""
    return value_and_grad(loss, engine="func"), (params, torch.ones(()))


CASES = {"simulate and reweight": simulation, "the loss and its gradient": gradient, "a step of SMAT with AdamW": step}


def leaves(layers: int) -> dict[str, Tensor]:
    """Small bfloat16 leaves with the names of Llama's."""
    square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    block: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": square for name in "qkvo"}
    block |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
    block |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    return {f"model.{name}.weight": torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def nodes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Calls in the one graph of a function."""
    graphs = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=keep)(*arguments)
    (graph,) = graphs
    return sum(node.op.startswith("call") for node in graph.nodes)


def seconds(function: Callable[..., Any], arguments: tuple[Any, ...], backend: str) -> float:
    """CPU seconds of the first call, those of the second one taken off."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    first, second = (_spent(compiled, arguments) for _ in range(2))
    return first - second


def _spent(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = _cpu()
    function(*arguments)
    return _cpu() - start


def _cpu() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(own.ru_utime + own.ru_stime for own in times)
