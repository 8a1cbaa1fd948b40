"""Transport: the change that training made to an old base, moved to a new one. Pure functions, one file each.

With ``merge.ta(old, {"new": new, "expert": expert}, coef=1.0)`` the change is added as it is, which helps where the new
base was trained from the old one. `gradfix` keeps those coordinates of the change that lower the task's loss at the new
base; `theseus` rotates the change into the coordinates of the new base's layers, which may have other widths.
"""

from .gradfix import descent_signs, gradfix, gradfix_vector
from .theseus import Alignment, alignments, theseus, theseus_vector

__all__ = ["Alignment", "alignments", "descent_signs", "gradfix", "gradfix_vector", "theseus", "theseus_vector"]
