"""Putting the cure into models we did not write, and into ours."""

from leadline.surgery.folders import cure_folder, is_cured_folder, load_cured
from leadline.surgery.operate import cure, uncure
from leadline.surgery.ramp import Ramp

__all__ = ["Ramp", "cure", "cure_folder", "is_cured_folder", "load_cured", "uncure"]
