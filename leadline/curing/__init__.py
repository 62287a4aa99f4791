"""Putting the cure into models we did not write, and into ours."""

from leadline.curing.folders import cure_folder, is_cured_folder, load_cured
from leadline.curing.operate import cure, uncure
from leadline.curing.ramp import Ramp

__all__ = ["Ramp", "cure", "cure_folder", "is_cured_folder", "load_cured", "uncure"]
