"""The paper's analyses of experts and merges: pure functions of trees, with the score or the loss as an argument."""

from .diagnose import Group, diagnose, groups, suggested_sigma, unmoved, unmoved_shares
from .experts_curve import Scored, by_count, cyclic_subsets, experts_curve
from .gains import Gain, gains
from .landscape import landscape, mean_loss, partner_update, slice_point
from .replacement import replacement_curve, replacement_sets
from .stacked import Job, evaluate, score_jobs, stack

__all__ = [
    "Gain",
    "Group",
    "Job",
    "Scored",
    "by_count",
    "cyclic_subsets",
    "diagnose",
    "evaluate",
    "experts_curve",
    "gains",
    "groups",
    "landscape",
    "mean_loss",
    "partner_update",
    "replacement_curve",
    "replacement_sets",
    "score_jobs",
    "slice_point",
    "stack",
    "suggested_sigma",
    "unmoved",
    "unmoved_shares",
]
