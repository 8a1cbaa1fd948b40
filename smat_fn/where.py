"""Predicates on leaves, ``where(path, tensor) -> bool``, made from a module's types and structure."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

from torch import Tensor, nn

from .errors import and_more, raise_problems, shortened
from .tree import predicate, unwrapped
from .types import Predicate, Where

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
_CONVOLVES = re.compile(r"conv(?!1D$)", re.IGNORECASE)  # transformers' Conv1D is a linear layer
_NOT_LINEAR = re.compile(r"Router|PatchMerging|PatchEmbed")
_HEADS, _HEAD = re.compile(r"(^|_)(heads?|classifiers?|predictors?)$"), re.compile(r"(Head|Classifier|Predictor)$")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_NOT_A_MATRIX = re.compile(r"emb|pos_|position|bias|token")  # 3-D parameters: XLNet's and Funnel's seg_embed
_STACK = re.compile(
    r"(layers?|blocks?|stages?|levels?|groups?|encoders|features|^h|^down|^up)\d*$"
)  # names of lists of blocks
_PARALLEL = re.compile(rf"expert|{_HEADS.pattern}")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_HALVES = ("input_blocks", "output_blocks"), ("down_blocks", "up_blocks")  # of a UNet


def trainable(module: nn.Module) -> Predicate:
    """Leaves that are parameters with ``requires_grad``, under their ``named_parameters`` names (tied weights once)."""
    names = frozenset(unwrapped(name) for name, p in module.named_parameters() if p.requires_grad)
    return lambda path, leaf: unwrapped(path) in names


@dataclass(frozen=True)
class Picked:
    """A predicate that picks leaves by name, with or without the parts of wrappers, and how they were found."""

    names: frozenset[str]
    how: str

    def __call__(self, path: str, leaf: Tensor) -> bool:
        return unwrapped(path) in self.names


def block_linear(module: nn.Module) -> Picked:
    """The set S of Eq. smat-mask: the weight matrices of linear layers inside transformer blocks.

    A block is a member with children of an outermost ``nn.ModuleList``, or of an ``nn.Sequential`` of members of one
    type. Linear layers are ``nn.Linear``, other types named ``Linear`` (torch_geometric's), transformers' ``Conv1D``,
    ``nn.MultiheadAttention``, and stacked weights of experts or of attention (3-D, no side of length 1, not named as
    an embedding).

    Not in the set: output heads, weights tied to an embedding, convolutions, patch merging, and the gates of mixtures.
    A list is one of output heads if its name or the types of its members say so, or if no other linear layer takes the
    width that they give, they have no attention and not all of them convolve (by a layer or a type's name). A layer is
    a gate if its type is named a router, or if, beside E experts, it gives E numbers, or one (``shared_expert_gate`` of
    Qwen2-MoE).

    Source: paper section 4.1, Mask.
    """
    left_out = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    picked: set[int] = set()
    lists = list(_lists(module, ""))
    for _, container in lists:
        for block in _blocks(container):
            for layer in block.modules():
                picked.update(id(p) for p in _linear_weights(layer))
                for other in _not_linear(layer):
                    left_out.update(id(p) for p in other.parameters())
    names = frozenset(unwrapped(name) for name, p in module.named_parameters() if id(p) in picked - left_out)
    return Picked(names, _looked_at(module, [path for path, _ in lists]))


def attention(module: nn.Module) -> Picked:
    """The projections of attention: weights and biases of the linear layers of `block_linear` inside attention modules.

    An attention module is one below a block whose type's or own name says so (``self_attn``, ``BertAttention``); norms
    inside it are left out. Picks nothing of a model without attention (Mamba, a CNN).

    Source: fine-tuning attention alone before merging, He et al., "Fine-tuning attention modules only", 2024.
    """
    linear, inside = block_linear(module), set[int]()
    for _, container in _lists(module, ""):
        for block in _blocks(container):
            for name, part in block.named_modules():
                if name and _ATTENTION.search(f"{name.rpartition('.')[2]} {type(part).__name__}"):
                    for layer in part.modules():
                        if any(True for _ in _linear_weights(layer)):
                            inside.update(id(p) for p in layer.parameters(recurse=False))
    every = [unwrapped(name) for name, p in module.named_parameters() if id(p) in inside]
    names = frozenset(name for name in every if name in linear.names or name.endswith("bias"))
    return Picked(names if names & linear.names else frozenset(), f"attention in blocks of {type(module).__name__}")


def mask_problems(where: Where | None, leaves: Mapping[str, Tensor], drop_prob: float | Tensor) -> list[str]:
    """The error for ``drop_prob > 0`` with nothing to mask; `never` is how to switch Mask off on purpose."""
    off, picks = not isinstance(drop_prob, Tensor) and not drop_prob, predicate(where)
    if off or picks is None or picks is never or any(picks(path, leaf) for path, leaf in leaves.items()):
        return []
    problem = f"drop_prob is {drop_prob}, but Mask has nothing to act on: where picks none of {len(leaves)} parameters"
    if isinstance(where, Picked) and (pair := _prefixed(where.names, leaves)) is not None:
        return [
            f"{problem}. Names differ: it picks {pair[0]!r}, the parameters have {pair[1]!r}. Make where from the "
            "module whose named_parameters() these are, or pass `drop_prob=0` to switch Mask off"
        ]
    how = where.how if isinstance(where, Picked) else f"It was asked for {and_more(leaves, 3)}"
    own = "or in Python where, a function (name, parameter) -> bool"
    return [f"{problem}. {how}. Pass `drop_prob=0` to switch Mask off, {own}"]


def masked_text(where: Predicate | None, leaves: Mapping[str, Tensor]) -> str:
    """The parameters that Mask acts on, as text: their number, values and names without indices; of None all."""
    masked = {path: p for path, p in leaves.items() if where is None or where(path, p)}
    kinds = Counter(_NUMBER.sub("*", path) for path in masked)
    names = [f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items()]
    values, every = (sum(p.numel() for p in part.values()) for part in (masked, leaves))
    number = f"{len(masked)} of {len(leaves)} trained parameters ({values:,} of {every:,} values)"
    return f"{number}: {', '.join(shortened(names, '{} more kinds'))}" if names else number


def _prefixed(names: Iterable[str], paths: Iterable[str]) -> tuple[str, str] | None:
    """A name and a path of which one is the other behind a prefix, as "module." of wrappers; None without such."""
    ends = {path[at:]: path for path in paths for at in _after_dots(path)}
    known = set(paths)
    for name in sorted(names):
        if name in ends:
            return name, ends[name]
        if shorter := next((name[at:] for at in _after_dots(name) if name[at:] in known), None):
            return name, shorter
    return None


def _after_dots(path: str) -> list[int]:
    return [at + 1 for at, character in enumerate(path) if character == "."]


def muon_matrices(module: nn.Module) -> Predicate:
    """The 2-D leaves of `block_linear`: the matrices that `smat_fn.optim.muon` takes (paper section 5.3)."""
    inside = block_linear(module)
    return lambda path, leaf: leaf.ndim == 2 and inside(path, leaf)


def matrices(path: str, leaf: Tensor) -> bool:
    """Leaves of two dimensions or more, the usual choice for weight decay; biases and gains of norms have one."""
    return leaf.ndim > 1


def block_prefix(path: str) -> str:
    """A leaf's name up to its first number, "layers.3" of "layers.3.mlp.weight"; "" without one between two dots.

    Of one name alone, so any numbered module counts; whether it is a block takes all names: `blocks_of`.
    """
    parts = path.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if i and part.isdecimal()), "")


def block_of(path: str) -> int | None:
    """The first number between two dots, 3 of "layers.3.mlp.weight": a block's if the list is one (`blocks_of`)."""
    return next((int(part) for part in path.split(".")[1:-1] if part.isdecimal()), None)


def blocks_of(paths: Iterable[str]) -> dict[str, str]:
    """The block that every leaf is in, up to its number, "layers.3" of "layers.3.mlp.weight"; "" outside of blocks.

    A numbered list is a stack of blocks if it is called so, ``layers``, ``blocks``, ``stages``, ``h`` and the like, and
    has modules inside its members. In a model without such a list, one of any other name is a stack (but of heads or
    experts), if its members are numbered 0 ... n - 1, n >= 2, have parameters in two modules or more, and have at least
    half of their names in common; in a model without either, a list of single layers (``layers.0.weight``) that is
    called so. The layers of a projector, ``mlp.0`` and ``mlp.2``, or of a classifier are not blocks. With a stack count
    the lists beside it of the same numbers (SegFormer's ``patch_embeddings`` beside ``block``), but not heads or
    experts.

    Of stacks inside stacks the outermost counts: the stage of Swin's ``layers.0.blocks.1`` and of ConvNeXt's
    ``stages.0.layers.1``, but the block within its stage of torchvision's ResNets, ``layer1.0``. A list of experts
    inside a block is a part of it.

    Args:
        paths: of all leaves.

    Returns:
        A name by path, in the order of ``paths``; the number is after its last dot.
    """
    places = {path: list(_numbered(path)) for path in paths}
    lists: dict[str, dict[str, set[str]]] = {}  # by name and number, the names of leaves below
    for found in places.values():
        for name, number, below in found:
            lists.setdefault(name, {}).setdefault(number, set()).add(below)
    called = {name for name in lists if _STACK.search(name.rpartition(".")[2])}
    stacks = {name for name in called if any("." in unwrapped(below) for own in lists[name].values() for below in own)}
    stacks = stacks or {name for name, members in lists.items() if _alike(name, members)} or called
    beside = {(name.rpartition(".")[0], frozenset(lists[name])) for name in stacks}
    stacks |= {
        name
        for name, members in lists.items()
        if (name.rpartition(".")[0], frozenset(members)) in beside and not _PARALLEL.search(name.rpartition(".")[2])
    }
    return {
        path: next((f"{name}.{number}" for name, number, _ in found if name in stacks), "")
        for path, found in places.items()
    }


def unet_problems(blocks: Iterable[str], rest: str) -> list[str]:
    """The error for a UNet, whose blocks down and up are two stacks, of which the second one follows the first.

    Args:
        blocks: of all leaves, `blocks_of`.
        rest: the way out, with "{}" for the name of a block.
    """
    first: dict[str, str] = {}
    for block in filter(None, blocks):
        first.setdefault(block.rpartition(".")[0], block)
    return [
        f"{down} and {up} are the two halves of a UNet, whose blocks have no depth: {rest.replace('{}', block)}"
        for down, block in first.items()
        for ends in _HALVES
        if down.endswith(ends[0]) and (up := down.removesuffix(ends[0]) + ends[1]) in first
    ]


def by_depth(
    paths: Iterable[str], low: float, high: float, *, layer_of: Callable[[str], int | None] | None = None
) -> dict[str, float]:
    """``low + (high - low) l / (L - 1)`` of the leaves of block l = 0 ... L - 1, and low of leaves in no block.

    Blocks of stages, ``layer1.0`` to ``layer4.2`` of a ResNet, are counted through all stages. Of several other stacks,
    as an encoder and a decoder or two towers, L is that of the longest.

    Args:
        paths: of leaves; of all leaves, unless ``layer_of`` is given.
        low, high: finite; of the first and of the last block.
        layer_of: the block of a leaf, None outside of blocks; default: by `blocks_of`.

    Returns:
        A number by path, in the order of ``paths``.

    Raises:
        ValueError: lists numbers that are not finite; or there are fewer than two blocks, or those of a UNet.
    """
    blocks = blocks_of(paths) if layer_of is None else {}
    layers = _numbers(blocks) if layer_of is None else {path: layer_of(path) for path in paths}
    last = max((layer for layer in layers.values() if layer is not None), default=0)
    problems = [f"{name} is {n}, must be finite" for name, n in {"low": low, "high": high}.items() if not isfinite(n)]
    if layers and last < 1:
        problems.append(
            "no two blocks by layer_of, so no depth: pass the block of every leaf, as 3 of layers.3.weight"
            if layer_of is not None
            else "no two blocks by the names of parameters (layers.3.weight has one), so no depth: give a number for "
            "the parameters of each block"
        )
    problems += unet_problems(blocks.values(), "give a number for each parameter")
    raise_problems(problems)
    return {path: low + (high - low) * (layer or 0) / max(last, 1) for path, layer in layers.items()}


def never(path: str, leaf: Tensor) -> bool:
    """Picks no leaf: switches Mask off."""
    return False


def _numbered(path: str) -> Iterator[tuple[str, str, str]]:
    """Name before, number and name after it of every number between two dots, from outside to inside."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if i and part.isdecimal():
            yield ".".join(parts[:i]), part, ".".join(parts[i + 1 :])


def _alike(name: str, members: Mapping[str, set[str]]) -> bool:
    """Whether a list that is not called a stack looks like one: see `blocks_of`."""
    if _PARALLEL.search(name.rpartition(".")[2]) or len(members) < 2 or {*map(int, members)} != {*range(len(members))}:
        return False
    below = [{unwrapped(leaf) for leaf in leaves} for leaves in members.values()]
    if any(len({leaf.rpartition(".")[0] for leaf in own}) < 2 for own in below):
        return False
    names = [{_NUMBER.sub("#", leaf) for leaf in own} for own in below]
    return all(2 * len(set.intersection(*names)) >= len(own) for own in names)


def _numbers(blocks: Mapping[str, str]) -> dict[str, int | None]:
    """The depth of every leaf's block: its number, after the blocks of the stages before its own."""
    sizes: dict[str, dict[int, int]] = {}  # of stages, by name and number
    for block in filter(None, blocks.values()):
        stack, _, number = block.rpartition(".")
        name, stage = _stage(stack)
        own = sizes.setdefault(name, {})
        own[stage] = max(own.get(stage, 0), int(number) + 1)

    def depth(block: str) -> int:
        stack, _, number = block.rpartition(".")
        name, stage = _stage(stack)
        return int(number) + sum(size for other, size in sizes[name].items() if other < stage)

    return {path: depth(block) if block else None for path, block in blocks.items()}


def _stage(stack: str) -> tuple[str, int]:
    """The name of a stack of blocks without the number at its end, and that number: ("layer", 2) of ``layer2``."""
    if not _STACK.search(stack.rpartition(".")[2]):  # parallel lists, as XLM's layer_norm1 and layer_norm2
        return stack, 0
    name = stack.rstrip("0123456789")
    return name, int(stack[len(name) :] or 0)


def _lists(module: nn.Module, path: str, whole: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of blocks, by name; ``whole`` is the model that ``module`` is a part of."""
    whole = module if whole is None else whole
    children = list(module.children())
    alike = len(children) > 1 and len({type(child) for child in children}) == 1
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and alike):
        blocks = _blocks(module)
        # an nn.Sequential runs its modules one after the other: they are not heads
        if blocks and not (isinstance(module, nn.ModuleList) and _are_heads(path, blocks, whole)):
            yield path, module
    else:
        for name, child in module.named_children():
            yield from _lists(child, f"{path}.{name}" if path else name, whole)


def _blocks(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if any(True for _ in child.children())]


def _are_heads(path: str, modules: list[nn.Module], whole: nn.Module) -> bool:
    """Whether modules of a model are heads: by name or type, or since no linear layer takes their output width.

    Modules with attention are not, nor those that all convolve: what they give is not their last linear layer's.
    """
    if _HEADS.search(path.rpartition(".")[2]) or all(_HEAD.search(type(module).__name__) for module in modules):
        return True
    if all(_convolves(module) for module in modules):
        return False
    inside = {id(m) for module in modules for m in module.modules()}
    taken = {m.in_features for m in whole.modules() if isinstance(m, nn.Linear) and id(m) not in inside}
    ends = list[int]()
    for module in modules:
        if any(_ATTENTION.search(f"{name} {type(m).__name__}") for name, m in module.named_modules()):
            return False
        gates = {id(m) for layer in module.modules() for gate in _not_linear(layer) for m in gate.modules()}
        shapes = [shape for m in module.modules() if id(m) not in gates for shape in _widths(m)]
        taken.update(into for into, _ in shapes)
        # several times the width that comes in is a modulation, as of diffusion's blocks
        ends += [out for out in [shapes[-1][1]] if out % max(shapes[0][0], 1)] if shapes else []
    return len(ends) == len(modules) and not taken.intersection(ends)


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(m, _CONVOLUTIONS) or _CONVOLVES.search(type(m).__name__) for m in module.modules())


def _widths(layer: nn.Module) -> list[tuple[int, int]]:
    """(in, out) of a linear layer; both ways round of stacked weights."""
    weights = list(_linear_weights(layer))
    if type(layer).__name__ == "Conv1D":
        return [(p.shape[0], p.shape[1]) for p in weights]
    both = [(p.shape[i], p.shape[j]) for p in weights if p.ndim == 3 for i, j in ((1, 2), (2, 1), (0, 2), (0, 1))]
    return both or [(p.shape[1], p.shape[0]) for p in weights]


def _looked_at(module: nn.Module, found: list[str]) -> str:
    linear = [name for name, child in module.named_modules() for _ in _linear_weights(child)]
    lists = f"blocks in {', '.join(found)}" if found else "none"
    return (
        "block_linear looked for linear layers inside blocks, which are modules with children in an nn.ModuleList (not "
        f"of heads) or in an nn.Sequential of one type; it found {lists} in {type(module).__name__}, whose linear "
        f"layers are {and_more(linear, 6) or 'none'}"
    )


def _linear_weights(layer: nn.Module) -> Iterator[nn.Parameter]:
    own = dict(layer.named_parameters(recurse=False))
    if (isinstance(layer, nn.Linear) or type(layer).__name__ in ("Conv1D", "Linear")) and "weight" in own:
        yield own["weight"]
    elif isinstance(layer, nn.Linear):  # pruned, or a weight or spectral norm: the matrix has another name
        shape = layer.out_features, layer.in_features
        yield from (p for p in layer.parameters() if tuple(p.shape) == shape)
    elif isinstance(layer, nn.MultiheadAttention):
        yield from (p for name, p in own.items() if name.endswith("proj_weight"))
    elif not isinstance(layer, _CONVOLUTIONS):
        stacked = {name: p for name, p in own.items() if p.ndim == 3 and min(p.shape) > 1}
        yield from (p for name, p in stacked.items() if not _NOT_A_MATRIX.search(name))


def _not_linear(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer itself if its type says so, and the gates among its children if it is a mixture."""
    if _NOT_LINEAR.search(type(layer).__name__):
        yield layer
    children = list(layer.children())
    experts = {child: count for child in children if (count := _expert_count(child)) > 1}
    for child in children:
        rows = {m.out_features for m in child.modules() if isinstance(m, nn.Linear)}
        if experts and child not in experts and rows and rows <= {1, *experts.values()}:
            yield child


def _expert_count(child: nn.Module) -> int:
    if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
        return len(child)
    stacked = [] if isinstance(child, nn.Linear) else [p for p in _linear_weights(child) if p.ndim == 3]
    return len(stacked[0]) if stacked else 0
