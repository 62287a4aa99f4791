"""Leadline: how deep can a Transformer go before its tokens become alike, and what to do about it.

Nothing heavy is imported here: every name below loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = (
    "anatomy",
    "curing",
    "data",
    "metrics",
    "models",
    "nn",
    "ops",
    "papers",
    "probing",
    "report",
    "theory",
    "training",
)
_FUNCTIONS = {
    "create_model": "leadline.models",
    "list_models": "leadline.models",
    "load": "leadline.loading",
    "convert": "leadline.models",
    "probe": "leadline.probing",
    "cure": "leadline.curing",
    "uncure": "leadline.curing",
    "DepthReport": "leadline.report.depth_report",
    "LeadlineError": "leadline.errors",
}

__all__ = [
    "DepthReport",
    "LeadlineError",
    "__version__",
    "anatomy",
    "convert",
    "create_model",
    "cure",
    "curing",
    "data",
    "list_models",
    "load",
    "metrics",
    "models",
    "nn",
    "ops",
    "papers",
    "probe",
    "probing",
    "report",
    "theory",
    "training",
    "uncure",
]

if TYPE_CHECKING:
    from leadline import anatomy, curing, data, metrics, models, nn, ops, papers, probing, report, theory, training
    from leadline.curing import cure, uncure
    from leadline.errors import LeadlineError
    from leadline.loading import load
    from leadline.models import convert, create_model, list_models
    from leadline.probing import probe
    from leadline.report.depth_report import DepthReport


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"leadline.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'leadline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
