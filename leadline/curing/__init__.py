"""Cures for models: ours and those of other libraries, in memory and on disk."""

from leadline.curing.entry import cure, uncure
from leadline.curing.folders import cure_folder
from leadline.curing.makes.huggingface.folders import is_cured_folder, load_cured
from leadline.curing.ramp import Ramp
from leadline.curing.strengths import Strengths

__all__ = ["Ramp", "Strengths", "cure", "cure_folder", "is_cured_folder", "load_cured", "uncure"]
