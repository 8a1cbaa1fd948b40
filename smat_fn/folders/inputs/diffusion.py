"""Single files of diffusion models: metadata in the header, and leaves that only mark the kind of a model."""

import re
from pathlib import Path

from ...errors import some_of
from .reading import Folder
from .stacks import stack_parts

# hashes and thumbnails, dtypes, training by kohya's scripts, merges by the web UI
_OF_WEIGHTS = re.compile(r"^(ss|sshs|sd_merge|_quantization)_|hash|(\.thumbnail|dtype)$")
# what a model predicts and its noise schedule, as loaders tell them
_MARKS = {"v_pred", "ztsnr", "edm_vpred.sigma_max", "edm_vpred.sigma_min", "edm_mean", "edm_std"}
_HASH = re.compile(r"(0x)?[0-9a-f]{32,}", re.IGNORECASE)


def copied_metadata(base: Path, whole: Folder, notes: list[str]) -> dict[str, str]:
    """The metadata of base's file that holds for a model merged with it, in order of the names; none of a folder.

    A stack has none either, since it has other layers than its first model. Appends to ``notes`` what is copied and
    what is left out.

    Args: base: as it was given; whole: the model that is written.
    """
    if not whole.root.is_file() or stack_parts(Path(base)):
        return {}
    found = dict(sorted(whole.stores[whole.root].metadata.items()))
    found.pop("format", None)  # the output has its own
    lost = [name for name, value in found.items() if _OF_WEIGHTS.search(name) or _HASH.fullmatch(value)]
    kept = {name: value for name, value in found.items() if name not in lost}
    notes += [f"the output has the metadata of base's file ({some_of(kept)})"] if kept else []
    notes += [f"metadata on the weights or training of base's file is left out ({some_of(lost)})"] if lost else []
    return kept


def other_kind(base: Folder, expert: Folder, *, partial: bool) -> list[str]:
    """An error where one model predicts noise and the other one velocity, or with another noise schedule.

    Args: partial: the expert may be a part of a model, which need not have its marks.
    """
    own, theirs = (sorted(_MARKS & folder.leaves.keys()) for folder in (base, expert))
    if own == theirs or (partial and not theirs):
        return []
    has = [", ".join(marks) or "none" for marks in (theirs, own)]
    return [
        f"{expert.label} is another kind of diffusion model than base: of the parameters that say what a model "
        f"predicts (noise or velocity) and its noise schedule it has {has[0]}, base {has[1]}: merge models of one kind"
    ]
