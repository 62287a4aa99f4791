"""The report of a probe: plain data, verdict, page and figures; loads without torch."""

from leadline.report.depth_report import DepthReport, check_target, read_report
from leadline.report.layers import Distribution, Heatmap, LayerData, ReportData, Trial, Verdict
from leadline.report.paper import save_demo_figure

__all__ = [
    "DepthReport",
    "Distribution",
    "Heatmap",
    "LayerData",
    "ReportData",
    "Trial",
    "Verdict",
    "check_target",
    "read_report",
    "save_demo_figure",
]
