"""The paper's analyses of experts and merges: pure functions of trees, with the score or the loss as an argument."""

from .curves import Gain, Scored, cyclic_subsets, experts_curve, gains, replacement_curve, replacement_sets
from .diagnose import Group, diagnose, groups, suggested_sigma, unmoved, unmoved_shares
from .disentanglement import disentanglement, predictions
from .interference import Layer, interference
from .landscape import landscape, mean_loss, partner_update, slice_point
from .stacked import Job, evaluate, score_jobs, scores_of, stack

__all__ = [
    "Gain",
    "Group",
    "Job",
    "Layer",
    "Scored",
    "cyclic_subsets",
    "diagnose",
    "disentanglement",
    "evaluate",
    "experts_curve",
    "gains",
    "groups",
    "interference",
    "landscape",
    "mean_loss",
    "partner_update",
    "predictions",
    "replacement_curve",
    "replacement_sets",
    "score_jobs",
    "scores_of",
    "slice_point",
    "stack",
    "suggested_sigma",
    "unmoved",
    "unmoved_shares",
]
