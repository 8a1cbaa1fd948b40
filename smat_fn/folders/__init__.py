"""Merging of checkpoint folders of any size: read, merged and written piece by piece, equal to the pure mergers."""

from .estimate import chunk_of
from .extraction import Extracted, extract_lora
from .inputs import read_inputs
from .parts import prefix_of
from .prepare import CHUNK, SHARD_SIZE, Options, OutDtype, prepare
from .reading import open_folder
from .run import Plan, Report, merge_folders, plan
from .vocabulary import VOCABULARIES, Vocabulary

__all__ = [
    "CHUNK",
    "SHARD_SIZE",
    "VOCABULARIES",
    "Extracted",
    "Options",
    "OutDtype",
    "Plan",
    "Report",
    "Vocabulary",
    "chunk_of",
    "extract_lora",
    "merge_folders",
    "open_folder",
    "plan",
    "prefix_of",
    "prepare",
    "read_inputs",
]
