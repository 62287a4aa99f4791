"""What people look at: tables and figures."""

from leadline.report.figures import save_demo_figure

__all__ = ["save_demo_figure"]
