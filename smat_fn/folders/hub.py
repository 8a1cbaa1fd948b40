"""Inputs by name: a folder on disk, or a repository of the Hugging Face hub."""

import re
from pathlib import Path

_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.tiktoken", "*.spm", "*.jinja", "*.py"]


def local_folder(label: str, path: Path) -> Path:
    """The folder itself, or that of a hub repository ``owner/name`` or ``owner/name@revision`` in the hub's cache.

    Only safetensors, configuration and tokenizer files are fetched; HF_HUB_OFFLINE takes them from the cache alone.

    Raises: ValueError if there is neither a folder nor a repository of this name, or the hub cannot be reached.
    """
    if (repository := repository_of(path)) is None:
        return path
    from huggingface_hub import snapshot_download

    revision = str(path).partition("@")[2]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_FILES))
    except Exception as error:  # of many libraries: the network's, the hub's, the file system's
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{label}: there is no folder {path}, and the hub did not give a repository of this name ({reason}): "
            "give a folder, or fetch it first with huggingface-cli download"
        ) from error


def repository_of(path: Path) -> str | None:
    """``owner/name`` of a hub name, without its revision; None for anything on disk or of another form."""
    name = str(path)
    return None if path.exists() or not _NAME.fullmatch(name) or name.startswith(".") else name.partition("@")[0]
