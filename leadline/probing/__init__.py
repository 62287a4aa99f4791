"""Measures the tokens of any model in a forward pass or during training, and reports on its depth."""

from leadline.anatomy.blocks import find_blocks
from leadline.probing.callbacks import lightning_callback, trainer_callback
from leadline.probing.run import probe
from leadline.probing.sources import example_inputs, open_model
from leadline.probing.watch import CollapseError, Watcher, watch
from leadline.report.depth_report import DepthReport, check_target, read_report

__all__ = [
    "CollapseError",
    "DepthReport",
    "Watcher",
    "check_target",
    "example_inputs",
    "find_blocks",
    "lightning_callback",
    "open_model",
    "probe",
    "read_report",
    "trainer_callback",
    "watch",
]
