"""Text models and the language model inside a vision-language model: leaves under the names of the whole model."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from ... import errors
from ...errors import and_more
from .differing import differences
from .optional_leaves import computed, predicts_ahead
from .reading import Folder, config_of
from .towers import compared
from .vocabulary import HEAD, differs_in_rows, equal_leaves, fit_rows, tied_to, tokenizer_notes

MODEL = "model."  # before the names of a text model, not before those of every language model inside another


def inside(into: str, inputs: Mapping[str, Folder], vocabulary: str) -> tuple[dict[str, Folder], list[str]]:
    """Inputs with the leaves of the language model of one of them alone, under its names, and errors.

    ``base`` gets the whole of that model as `Folder.within`, and its configuration.

    Args:
        into: the name of the whole model among the inputs.
        inputs: base and experts by name.
        vocabulary: as of `fit_rows`, with the whole model as base.
    """
    if into not in inputs:
        return dict(inputs), [
            f"`into={into!r}` is none of the models that are merged ({', '.join(inputs)}): name the one whose language "
            "model is merged, which must be among them, since what it learned would be lost otherwise"
        ]
    host, placed, problems = inputs[into], dict[str, Folder](), list[str]()
    texts = {name: folder for name, folder in inputs.items() if folder.leaves.keys() != host.leaves.keys()}
    if not texts:
        return dict(inputs), [f"`into={into!r}` is given, but all models have the same parameters: leave it out"]
    names: dict[str, dict[str, str]] = {}
    for name, folder in texts.items():
        with errors.collected(problems):
            names[name] = _places(host, folder)
    if problems:
        return dict(inputs), problems
    paths = [path for path in host.leaves if any(path in own for own in names.values())]
    origin = inputs["base"]
    for name, folder in inputs.items():
        alike = {folder.label: folder.root} if name != "base" and _of_one_kind(origin, folder) else {}
        wrong, notes = differences(origin.root, alike, chosen=False, template=True, options=False)
        problems += wrong
        notes += tokenizer_notes(host.root, {folder.label: folder.root}, of=into)
        own = names.get(name, {path: path for path in paths})
        placed[name] = folder._replace(
            leaves={path: folder.leaves[own[path]] for path in paths if path in own},
            reads={path: folder.reads[own[path]] for path in paths if path in own},
            absent=frozenset(path for path in own if own[path] in folder.absent),
        ).noted(*notes)
    fitted, rows = fit_rows(host, {name: placed[name] for name in texts}, vocabulary, of=into)
    rest = [path for path in host.leaves if path not in paths]
    note = f"{len(paths)} parameters of the language model of {into} are merged"
    note += f", its others ({and_more(map(repr, rest))}) copied" if rest else ""
    others = [folder for name, folder in inputs.items() if name not in (*names, into, "base")]
    lost = [text for folder in others for text in _left_out(host, folder, rest, into)]
    base = (placed | fitted)["base"]
    base = base._replace(root=host.root, config=host.config, outputs=host.outputs, within=host)
    return placed | fitted | {"base": base.noted(note, *lost)}, problems + rows


def _of_one_kind(base: Folder, folder: Folder) -> bool:
    """Whether the configurations of two models, or of the parts that they share, can be compared."""
    own, other = compared(config_of(base.root), config_of(folder.root))
    return own.get("model_type") == other.get("model_type")


def _places(host: Folder, part: Folder) -> dict[str, str]:
    """Leaf of the host -> leaf of a text model, for the whole of the host's language model.

    Raises: ValueError unless exactly one prefix maps every leaf, and nothing of the language model is left over.
    """
    own = {name: leaf for name, leaf in part.leaves.items() if leaf.is_floating_point() and not computed(name, leaf)}
    stems = {name.removeprefix(MODEL): name for name in own if name != HEAD}
    first = next(iter(stems), "")
    ends = [path for path in host.leaves if path == first or path.endswith(f".{first}")]
    unfit = {
        prefix: [name for stem, name in stems.items() if not _fits(host, f"{prefix}{stem}", own[name])]
        for prefix in (path.removesuffix(first) for path in ends)
    }
    found = [prefix for prefix, wrong in unfit.items() if not wrong]
    what = f"{part.label} is not the language model of {host.label}"
    if len(found) != 1:
        wrong = min(unfit.values(), key=len, default=[first])
        first = and_more(map(repr, wrong))
        why = f"it fits in {len(found)} places ({', '.join(found)})" if found else f"nothing there fits {first}"
        raise ValueError(f"{what} by names and shapes, {why}: give a text model of the same kind and size")
    (prefix,) = found
    known = {f"{prefix}{stem}": name for stem, name in stems.items()}
    heads = [path for path in host.leaves if path == HEAD or path.endswith(f".{HEAD}")]
    if len(heads) == 1 and HEAD in own and _fits(host, heads[0], own[HEAD]):
        known[heads[0]] = HEAD
    elif heads or (HEAD in own and tied_to(part) is None):
        kinds = [f"{'a' if has else 'no'} head ({HEAD}) of its own" for has in (HEAD in own, bool(heads))]
        raise ValueError(
            f"{part.label} has {kinds[0]}, {host.label} has {kinds[1]}: give models that both tie their heads to their "
            "embeddings, or both have one of one shape (tie_word_embeddings false, saved again)"
        )
    config = config_of(host.root)
    text = config.get("text_config")
    if heads and {**(text if isinstance(text, dict) else {}), **config}.get("tie_word_embeddings") is True:
        raise ValueError(
            f"{host.label} stores {heads[0]!r}, but its config.json ties the head to the embeddings, so that a merged "
            "head would not be loaded: save it again by one version of transformers"
        )
    modules = tuple({f"{prefix}{stem.partition('.')[0]}." for stem in stems})
    lacking = [
        path
        for path, leaf in host.leaves.items()
        if path.startswith(modules) and path not in known and leaf.is_floating_point()
        if not computed(path, leaf) and not predicts_ahead(path, config)
    ]
    if lacking:
        raise ValueError(
            f"{what}: it lacks {and_more(map(repr, lacking))}, download or save it again, or give one of the same kind"
        )
    return known


def _left_out(host: Folder, other: Folder, rest: list[str], into: str) -> Iterator[str]:
    """A note on another whole model whose values beside the language model are not the host's: they are not merged."""
    for path in rest:
        kinds = {(leaf.shape, leaf.dtype) for leaf in (host.leaves[path], other.leaves[path])}
        if len(kinds) > 1 or not equal_leaves(host, path, path, other=other):
            yield f"{other.label} differs from {into} in {path!r} too, which is not merged but copied from {into}"
            return


def _fits(host: Folder, path: str, leaf: Tensor) -> bool:
    """Whether the host has a leaf of this name and shape; numbers of tokens may differ, of which `fit_rows` decides."""
    own = host.leaves.get(path)
    return own is not None and (own.shape == leaf.shape or differs_in_rows(path, own, leaf))
