"""What people look at: tables and figures."""

from leadline.report.demo_figure import save_demo_figure

__all__ = ["save_demo_figure"]
