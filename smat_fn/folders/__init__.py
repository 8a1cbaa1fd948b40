"""Merging of checkpoint folders of any size: read, merged and written chunk by chunk, equal to the pure mergers.

``inputs`` reads, ``streaming`` merges leaves, `writing` writes; the other modules are whole tasks: a merge, in one
process (`run`) or several (`parts`), of several tasks (`several`), mixtures, adapters into one, an extracted adapter.
"""

from .combining import Combined, merge_adapters
from .extraction import Extracted, extract_lora
from .inputs.opening import local_folder, place_of, prefix_of, read_inputs
from .inputs.reading import open_folder
from .inputs.vocabulary import VOCABULARIES, Vocabulary
from .parts import Part, Waiting, merge_part, part_of
from .prepare import CHUNK, SHARD_SIZE, Options, OutDtype, prepare
from .run import Plan, Report, merge_folders, plan
from .streaming.estimate import chunk_of

__all__ = [
    "CHUNK", "SHARD_SIZE", "VOCABULARIES", "Combined", "Extracted", "Options", "OutDtype", "Part", "Plan", "Report",
    "Vocabulary", "Waiting", "chunk_of", "extract_lora", "local_folder", "merge_adapters", "merge_folders",
    "merge_part", "open_folder", "part_of", "place_of", "plan", "prefix_of", "prepare", "read_inputs",
]  # fmt: skip
