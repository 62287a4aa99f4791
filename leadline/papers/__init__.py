"""The papers' figures and tables, a file for each: its setting, its run, its claims, its plot.

The path of a file is the id of its entry: ``hop/fig4.py`` is ``hop-fig4``. To add one, write the file and add its name
to ``MODULES``. ``leadline reproduce`` runs them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from leadline.papers.shared import runner, store
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.page import write_page
from leadline.papers.shared.runner import Options

__all__ = [
    "ENTRIES",
    "Claim",
    "Context",
    "Entry",
    "Options",
    "Result",
    "list_entries",
    "run_entries",
    "summaries",
    "write_page",
]

# in the order of `leadline reproduce list`
MODULES = (
    "hop.table1",
    "hop.ablation",
    "hop.bounds",
    "hop.schemes",
    "tse.fig1",
    "tse.fig2",
    "tse.fig3",
    "tse.fig4",
    "tse.fig5",
    "tse.fig8",
    "tse.formulas",
    "tse.spectral_gap",
    "ours.depth_map",
    "tse.fig6",
    "hop.skipless",
    "hop.vit",
    "hop.fig5",
    "hop.fig6",
    "hop.fig7",
    "hop.fig8",
    "hop.fig9",
    "hop.fig10",
    "hop.fig11",
    "hop.fig12",
    "hop.fig13",
    "hop.fig14",
    "hop.fig15",
    "hop.fig16",
    "hop.fig17",
    "hop.fig18",
    "hop.fig19",
    "hop.fig20",
    "ours.text_depth",
    "hop.table2",
    "hop.fig4",
    "tse.fig7",
)
ENTRIES: tuple[Entry, ...] = tuple(import_module(f"{__name__}.{module}").ENTRY for module in MODULES)


def list_entries() -> list[tuple[str, str]]:
    """Return (id, title) of every entry."""
    return [(entry.id, entry.title) for entry in ENTRIES]


def run_entries(ids: str | Sequence[str], out: str | os.PathLike[str] = "results", **options: Any) -> bool:
    """Run entries, each into its own folder under ``out``; finished ones are not run again.

    Args:
        ids: Ids or groups ("init", "trained", "language") of entries, or "all".
        out: Folder of the folders of entries, and of training runs.
        options: The fields of ``Options``, such as ``device`` or ``budget``.

    Returns:
        Whether every shape claim holds.

    Raises:
        LeadlineError: If an id or an option is wrong, or images or text are missing.
    """
    return runner.run_entries(ids, out, ENTRIES, Options(**options))


def summaries(ids: str | Sequence[str], out: str | os.PathLike[str] = "results") -> list[dict[str, Any]]:
    """Return the summaries of the finished entries under ``out``, as their summary.json holds them."""
    stored = [store.read(Path(out) / entry.id) for entry in runner.choose(ids, ENTRIES)]
    return [summary for summary in stored if summary is not None]
