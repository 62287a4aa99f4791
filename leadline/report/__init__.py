"""The report of a probe: plain data, verdict, page and figures; loads without torch."""

from leadline.report.depth_report import DepthReport, check_target, read_report
from leadline.report.layers import (
    DepthUse,
    Distribution,
    Heatmap,
    LayerData,
    Massive,
    Removal,
    ReportData,
    Trial,
    Verdict,
)
from leadline.report.paper import save_demo_figure

__all__ = [
    "DepthReport",
    "DepthUse",
    "Distribution",
    "Heatmap",
    "LayerData",
    "Massive",
    "Removal",
    "ReportData",
    "Trial",
    "Verdict",
    "check_target",
    "read_report",
    "save_demo_figure",
]
