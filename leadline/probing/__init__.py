"""Measures the tokens of any model in a forward pass or during training, and reports on its depth."""

from leadline.probing.callbacks import lightning_callback, trainer_callback
from leadline.probing.run import probe
from leadline.probing.sources import example_inputs, open_model
from leadline.probing.watch import CollapseError, Watcher, watch
from leadline.report.depth_report import DepthReport

__all__ = [
    "CollapseError",
    "DepthReport",
    "Watcher",
    "example_inputs",
    "lightning_callback",
    "open_model",
    "probe",
    "trainer_callback",
    "watch",
]
