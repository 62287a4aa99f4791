"""A file per figure or table of the papers: setting, run, claims, plot. ``leadline reproduce`` runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadline.reproduce import (
    depth_map,
    hop_ablation,
    hop_bounds,
    hop_schemes,
    hop_table1,
    runner,
    store,
    trained_depth80,
    trained_language_depth,
    trained_language_gpt2,
    trained_language_violins,
    trained_language_xl,
    trained_skipless,
    trained_vits,
    tse_fig1,
    tse_fig2,
    tse_fig3,
    tse_fig4,
    tse_fig5,
    tse_fig8,
    tse_formulas,
    tse_spectral_gap,
)
from leadline.reproduce.base import Claim, Context, Entry, Result
from leadline.reproduce.page import write_page

__all__ = ["ENTRIES", "Claim", "Context", "Entry", "Result", "list_entries", "run_entries", "summaries", "write_page"]

ENTRIES: tuple[Entry, ...] = (
    hop_table1.ENTRY,
    hop_ablation.ENTRY,
    hop_bounds.ENTRY,
    hop_schemes.ENTRY,
    tse_fig1.ENTRY,
    tse_fig2.ENTRY,
    tse_fig3.ENTRY,
    tse_fig4.ENTRY,
    tse_fig5.ENTRY,
    tse_fig8.ENTRY,
    tse_formulas.ENTRY,
    tse_spectral_gap.ENTRY,
    depth_map.ENTRY,
    trained_depth80.ENTRY,
    trained_skipless.ENTRY,
    *trained_vits.ENTRIES,
    trained_language_depth.ENTRY,
    trained_language_gpt2.ENTRY,
    trained_language_violins.ENTRY,
    trained_language_xl.ENTRY,
)


def list_entries() -> list[tuple[str, str]]:
    """(id, title) of every entry."""
    return [(entry.id, entry.title) for entry in ENTRIES]


def run_entries(ids: str | Sequence[str], out: str | os.PathLike[str] = "results", **options: Any) -> bool:
    """Run entries by id, "init", "trained" or "all"; whether every shape claim holds; see ``runner``."""
    return runner.run_entries(ids, out, entries=ENTRIES, **options)


def summaries(ids: str | Sequence[str], out: str | os.PathLike[str] = "results") -> list[dict[str, Any]]:
    """The summaries of finished entries under ``out``, for machines."""
    found = [store.read(Path(out) / entry.id) for entry in runner.choose(ids, ENTRIES)]
    return [summary for summary in found if summary is not None]
