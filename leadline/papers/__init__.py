"""A file per figure or table of the papers: setting, run, claims, plot. ``leadline reproduce`` runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadline.papers.hop import ablation as hop_ablation
from leadline.papers.hop import bounds as hop_bounds
from leadline.papers.hop import fig4 as trained_language_violins
from leadline.papers.hop import schemes as hop_schemes
from leadline.papers.hop import skipless as trained_skipless
from leadline.papers.hop import table1 as hop_table1
from leadline.papers.hop import table2 as trained_language_gpt2
from leadline.papers.hop import vit as trained_vits
from leadline.papers.ours import depth_map
from leadline.papers.ours import text_depth as trained_language_depth
from leadline.papers.shared import runner, store
from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.page import write_page
from leadline.papers.tse import fig1 as tse_fig1
from leadline.papers.tse import fig2 as tse_fig2
from leadline.papers.tse import fig3 as tse_fig3
from leadline.papers.tse import fig4 as tse_fig4
from leadline.papers.tse import fig5 as tse_fig5
from leadline.papers.tse import fig6 as trained_depth80
from leadline.papers.tse import fig7 as trained_language_xl
from leadline.papers.tse import fig8 as tse_fig8
from leadline.papers.tse import formulas as tse_formulas
from leadline.papers.tse import spectral_gap as tse_spectral_gap

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
