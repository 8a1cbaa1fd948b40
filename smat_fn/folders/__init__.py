"""Merging of checkpoint folders of any size: read, merged and written chunk by chunk, equal to the pure mergers.

``inputs`` reads, ``streaming`` merges leaves, `writing` writes; the other modules are whole jobs: a merge, in one
process (`run`) or several (`parts`), the choice of its coefficient (`searching`), a merge of several tasks
(`multi_task`), `mixtures`, merged adapters (`combining`), an extracted one.
"""

from .combining import Combined, merge_adapters
from .extraction import Extracted, extract_lora
from .inputs.hub import local_folder
from .inputs.opening import place_of, read_inputs
from .inputs.reading import open_folder
from .parts import Part, Waiting, merge_part, part_of
from .prepare import SHARD_SIZE, Options, prepare
from .run import Plan, Report, merge_folders, plan
from .searching import Candidate, Searched, search_folders
from .streaming.estimate import chunk_of

__all__ = [
    "SHARD_SIZE", "Candidate", "Combined", "Extracted", "Options", "Part", "Plan", "Report", "Searched", "Waiting",
    "chunk_of", "extract_lora", "local_folder", "merge_adapters", "merge_folders", "merge_part", "open_folder",
    "part_of", "place_of", "plan", "prepare", "read_inputs", "search_folders",
]  # fmt: skip
