"""Watches a forward pass or a training run of any model, in constant memory, and says what follows."""

from leadline.anatomy.blocks import find_blocks
from leadline.probing.callbacks import lightning_callback, trainer_callback
from leadline.probing.run import probe
from leadline.probing.sources import example_inputs, open_model
from leadline.probing.watch import CollapseError, Watcher, watch
from leadline.report.depth_report import DepthReport, check_target, read_report
from leadline.report.layers import Distribution, Figures, Heatmap, LayerFigures, Trial, Verdict

__all__ = [
    "CollapseError",
    "DepthReport",
    "Distribution",
    "Figures",
    "Heatmap",
    "LayerFigures",
    "Trial",
    "Verdict",
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
