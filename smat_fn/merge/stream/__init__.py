"""Merging of checkpoint folders of any size: read, merged and written piece by piece, equal to the pure mergers."""

from .prepare import OutDtype
from .run import CHUNK, SHARD_SIZE, Plan, Report, merge_folders, plan

__all__ = ["CHUNK", "SHARD_SIZE", "OutDtype", "Plan", "Report", "merge_folders", "plan"]
