"""The Hugging Face hub: repositories as folders, the headers of their weights before the weights, and merges pushed."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import first_line, some_of
from ...merge.parts.inputs import Leaves, fit_problems
from ...progress import downloading
from ...tree import unwrapped
from .adapters.config import CONFIG as ADAPTER
from .adapters.peft import BESIDE, is_adapter
from .optional_leaves import as_base_spells, may_be_spare, recast
from .quantised import quantised_by, refused_by_config
from .reading import PICKLED, PICKLES, SUFFIXES, config_of, open_folder
from .side_files import COPIED
from .stacks import folders_of
from .stored import DTYPES
from .towers import part_config
from .vocabulary import HEAD, by_token

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<file>.+))?")
_OF_FOLDERS = re.compile(r"(model|diffusion_pytorch_model|adapter_model)(-\d+-of-\d+)?\.safetensors")
_FILES = [
    *("*.safetensors", "*.json", "*.model", "*.txt", "*.tiktoken", "*.spm", "*.jinja", "*.py", "*.codes"),
    *("*.tokenizer", "README.md", *(own for own in COPIED if own.endswith(".pt"))),
    *BESIDE,  # not read: with them an adapter is refused
]
_PICKLES = PICKLED, "pytorch_model-*.bin", "adapter_model.bin", *(own for own in COPIED if own.endswith(".bin"))


class Remote(NamedTuple):
    """A repository of the hub, or one file of it, as a hub name says it."""

    repository: str  # owner/name
    revision: str | None
    file: str | None  # of safetensors, by its path in the repository


def remote_of(path: Path) -> Remote | None:
    """The hub name ``owner/name``, ``owner/name@revision`` or one with ``/FILE``; None for others and paths on disk."""
    found = _NAME.fullmatch(str(path))
    if found is None or path.exists() or path.is_symlink() or str(path).startswith("."):
        return None
    remote = Remote(**found.groupdict())
    named = path.suffix in SUFFIXES if remote.file is not None else path.suffix not in SUFFIXES + PICKLES
    return remote if named else None


def repository_of(path: Path) -> str | None:
    """``owner/name`` of a hub name; None for anything on disk or of another form."""
    remote = remote_of(path)
    return None if remote is None else remote.repository


def local_folder(label: str, path: Path, *, fetch: bool = True) -> Path:
    """The path itself, or the folder of a hub repository in the hub's cache, or one file of it (`remote_of`).

    Weights (pickled ones where there are no safetensors), configuration, tokenizer, code, which is never run, and
    README.md are fetched; a broken connection is resumed. HF_HUB_OFFLINE, and ``fetch`` off, take them from the cache
    alone. Private repositories need the token of the hub's own client.

    Raises: ValueError if there is neither a folder nor a repository of this name, the hub cannot be reached, or one
        file of a model's folder is named.
    """
    if (remote := remote_of(path)) is None:
        return path
    if remote.file is not None and _OF_FOLDERS.fullmatch(Path(remote.file).name):
        inside = Path(remote.file).parent
        way = f"the repository, {remote.repository}"
        if str(inside) != ".":
            way = f"the folder, after hf download {remote.repository} --include '{inside}/*'"
        raise ValueError(f"{label}: {path} is a file of a folder: give {way}")
    from huggingface_hub import hf_hub_download, snapshot_download

    local: dict[str, Any] = {} if fetch else {"local_files_only": True}
    try:
        asked = {"repo_id": remote.repository, "revision": remote.revision, **local}
        with downloading(remote.repository):
            if remote.file is not None:
                return Path(hf_hub_download(**asked, filename=remote.file))
            folder = Path(snapshot_download(**asked, allow_patterns=_FILES))
            if not list(folder.glob("*.safetensors")):
                folder = Path(snapshot_download(**asked, allow_patterns=[*_FILES, *_PICKLES]))
        return folder
    except Exception as error:  # of many libraries: the network's, the hub's, the file system's
        raise ValueError(_not_given(label, path, error)) from error


def missing(inputs: Mapping[str, Path]) -> list[str]:
    """Errors for models that are neither on this machine nor hub names, each path once.

    Args: inputs: by label, stacks among them.
    """
    places = {path: label for label, given in inputs.items() for path in folders_of(given)}
    lost = {path: label for path, label in places.items() if repository_of(path) is None and not path.exists()}
    return [
        f"{label}: {path} is a link to {os.readlink(path)}, which leads nowhere: set it again, or give the folder"
        if path.is_symlink()
        else f"{label}: {path} is not a folder: give the folder of a checkpoint, or a hub name owner/name"
        for path, label in lost.items()
    ]


def unavailable(inputs: Mapping[str, Path]) -> list[str]:
    """Errors for missing folders and for repositories that the hub refuses, before another one is downloaded.

    Nothing is asked where all inputs are on this machine. Args: inputs: by label, stacks among them.
    """
    places = [(label, path) for label, given in inputs.items() for path in folders_of(given)]
    hub = [(label, path, found) for label, path in places if (found := remote_of(path)) and not _cached(label, path)]
    if not hub:
        return []
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return []
    problems = missing(inputs)
    for label, path, (repository, revision, file) in hub:
        try:
            info = HfApi().model_info(repository, revision=revision)
            if info.gated:
                HfApi().auth_check(repository)  # everyone may read what it is, and not its files
            names = [own.rfilename for own in info.siblings or () if own.rfilename.endswith(SUFFIXES)]
            if file is not None and file not in names:
                held = f"its weights are {some_of(names)}" if names else "it holds no safetensors"
                problems.append(f"{label}: the hub's repository {repository} has no file {file}: {held}")
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            problems.append(_not_given(label, path, error))
        except Exception:  # no answer: the download says why
            continue
    return problems


def _cached(label: str, path: Path) -> bool:
    try:
        folder = local_folder(label, path, fetch=False)
    except ValueError:
        return False
    kinds = "*.safetensors", "*.bin"  # not its configuration alone
    return folder.is_file() or any(next(folder.glob(kind), None) for kind in kinds)


def _not_given(label: str, path: Path, error: BaseException) -> str:
    from huggingface_hub.errors import GatedRepoError

    if isinstance(error, GatedRepoError):
        return (
            f"{label}: the hub's repository {path} is gated, and it did not give its files ({first_line(error)}): ask "
            "for access on its page, and set HF_TOKEN or call hf auth login; or give a folder"
        )
    if (remote := remote_of(path)) and remote.file:
        return (
            f"{label}: there is no file {path}, and the hub did not give {remote.file} of a repository "
            f"{remote.repository} ({first_line(error)}): {_way_out(error)}give a file, or fetch it first with hf "
            "download"
        )
    return (
        f"{label}: there is no folder {path}, and the hub did not give a repository of this name "
        f"({first_line(error)}): {_way_out(error)}give a folder, or fetch it first with hf download"
    )


def header_problems(inputs: Mapping[str, Path], *, rows: bool, shapes: bool = True) -> list[str]:
    """Errors that merging hub repositories would give, from the headers of their files: no weights are downloaded.

    Repositories in the cache, adapters, and what the hub does not give are left to the checks after the download.

    Args:
        inputs: base first, by label.
        rows: embeddings and heads of other numbers of rows than base's are refused.
        shapes: names and shapes are compared; else quantised models alone are refused.
    """
    asked = {label: path for label, path in inputs.items() if repository_of(path) is not None}
    new = {label: path for label, path in asked.items() if _local(label, path) is None}
    problems = [
        text
        for label, path in new.items()
        for text in refused_by_config(label, path, _config(path))
        if _fetched(path, ADAPTER) is None  # else that config.json is of the model which the adapter was trained on
    ]
    if problems:
        return [f"{problem} (nothing is downloaded)" for problem in problems]
    compared = new if shapes else {}
    remote = {label: leaves for label, path in compared.items() if (leaves := _headers(path)) is not None}
    if not remote:
        return []
    (first, origin), *others = inputs.items()
    start = remote.get(first) or _local(first, origin)
    if start is None:
        return []
    whole, checked = _config(origin), dict[str, Leaves]()
    for label, path in others:
        leaves, config = remote.get(label) or _local(label, path), _config(path)
        is_tower = part_config(whole, config) is not None or part_config(config, whole) is not None
        if leaves is not None and not is_tower:
            checked[label] = _comparable(start, leaves, whole, rows=rows)
    own = {path: leaf for path, leaf in start.items() if path != HEAD}
    return [f"{problem} (from its header, nothing is downloaded)" for problem in fit_problems(own, first, checked)]


def _comparable(start: Leaves, leaves: Leaves, config: Mapping[str, Any], *, rows: bool) -> Leaves:
    """Without heads, which may be tied, and with base's rows where others may be cut or merged by token.

    What one of two models may lack (`may_be_spare`) is compared only where both have it.
    """
    spelled = as_base_spells(start, leaves)
    leaves = {spelled[path]: leaf for path, leaf in leaves.items()}
    kept = {path: leaf for path, leaf in leaves.items() if path in start or not may_be_spare(path, leaf, config)}
    kept |= {path: leaf for path, leaf in start.items() if path not in leaves and may_be_spare(path, leaf, config)}
    kept |= {path: leaf for path, leaf in start.items() if path in leaves and recast(path, leaves[path], leaf)}
    kept.pop(HEAD, None)
    if not rows:
        for path, leaf in kept.items():
            like = start.get(path)
            if like is not None and by_token(path) and leaf.shape[1:] == like.shape[1:]:
                kept[path] = torch.empty(like.shape, dtype=leaf.dtype, device="meta")
    return kept


def _headers(path: Path) -> Leaves | None:
    """The leaves of a repository that is not in the cache yet.

    None for a single file, which may be an adapter's, and for quantised weights, which are read under other names.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or _of_file(path) or quantised_by(_config(path)):
        return None
    try:
        found = HfApi().get_safetensors_metadata(str(repository_of(path)), revision=_revision(path))
    except Exception:  # an adapter, or no answer: the download says why
        return None
    tensors = {name: tensor for file in found.files_metadata.values() for name, tensor in file.tensors.items()}
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        return None
    return {
        unwrapped(name): torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
    }


def _config(path: Path) -> dict[str, Any]:
    """The config.json of a folder or a repository, {} where there is none."""
    if _of_file(path):
        return {}
    folder = path if repository_of(path) is None else _fetched(path, "config.json")
    return {} if folder is None else config_of(folder)


def _fetched(path: Path, name: str) -> Path | None:
    """The folder of the cache that holds one file of a repository; None where it has none, or the hub gives none."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(repository_of(path)), name, revision=_revision(path))).parent
    except Exception:  # the download of the rest says why
        return None


def _local(label: str, path: Path) -> Leaves | None:
    """The leaves of each input on this machine; None for inputs that cannot be opened, and for adapters.

    Those of modules of sentence-transformers are left out, since `_headers` has none.
    """
    try:
        folder = local_folder(label, path, fetch=False)
        leaves = None if is_adapter(folder) else open_folder(label, folder).leaves
    except ValueError:
        return None
    return leaves and ({path: leaf for path, leaf in leaves.items() if "/" not in path} or leaves)


def push_problems(repository: str) -> list[str]:
    """Errors for a repository that cannot be pushed to; checked before the merge."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        return [f"cannot push to {repository!r}: {first_line(error)}"]
    if constants.HF_HUB_OFFLINE:
        return [f"cannot push to {repository}: HF_HUB_OFFLINE is set"]
    if get_token() is None:
        return [f"cannot push to {repository}: there is no token, set HF_TOKEN or call hf auth login"]
    try:
        HfApi().whoami()
    except Exception as error:
        return [f"cannot push to {repository}: the hub does not take the token ({first_line(error)})"]
    return []


def push(folder: Path, repository: str, *, private: bool, without: Sequence[str]) -> str:
    """Upload a finished folder to a repository, which is made where there is none.

    Args: private: of a new repository; without: files that stay here.
    Returns: the address of the commit.
    Raises: ValueError where the hub refuses; the folder stays.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=list(without),
            commit_message="Merged model (see the model card)",
        )
    except Exception as error:  # of the network, or of the hub
        raise ValueError(
            f"{folder} is merged, but could not be pushed to {repository} ({first_line(error)}): "
            f"rerun the command, or hf upload {repository} {folder}"
        ) from error
    return str(made.commit_url)


def _of_file(path: Path) -> bool:
    remote = remote_of(path)
    return remote is not None and remote.file is not None


def _revision(path: Path) -> str | None:
    remote = remote_of(path)
    return None if remote is None else remote.revision


def _way_out(error: BaseException) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return "a private or gated one needs HF_TOKEN, or hf auth login; " if status in (401, 403) else ""
