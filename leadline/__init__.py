"""Leadline: how deep can a Transformer go before its tokens become alike, and what to do about it.

Nothing heavy is imported here: every name below loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = ("data", "metrics", "models", "nn", "ops", "probing", "report", "reproduce", "surgery", "theory", "training")
_FUNCTIONS = {
    "create_model": "leadline.models",
    "list_models": "leadline.models",
    "load": "leadline.models",
    "convert": "leadline.models",
    "probe": "leadline.probing",
    "cure": "leadline.surgery",
    "uncure": "leadline.surgery",
    "DepthReport": "leadline.probing",
    "LeadlineError": "leadline.errors",
}

__all__ = [
    "DepthReport",
    "LeadlineError",
    "__version__",
    "convert",
    "create_model",
    "cure",
    "data",
    "list_models",
    "load",
    "metrics",
    "models",
    "nn",
    "ops",
    "probe",
    "probing",
    "report",
    "reproduce",
    "surgery",
    "theory",
    "training",
    "uncure",
]

if TYPE_CHECKING:
    from leadline import data, metrics, models, nn, ops, probing, report, reproduce, surgery, theory, training
    from leadline.errors import LeadlineError
    from leadline.models import convert, create_model, list_models, load
    from leadline.probing import DepthReport, probe
    from leadline.surgery import cure, uncure


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"leadline.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'leadline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
