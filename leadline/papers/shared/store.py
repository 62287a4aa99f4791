"""The folder of an entry: writing its files, and recognising a finished one."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from leadline.errors import LeadlineError
from leadline.files import csv_row, read_json, whole
from leadline.machine import processor, versions
from leadline.papers.shared.entry import Entry, Result, claims_as_dicts
from leadline.papers.shared.plots import save

SUMMARY = "summary.json"
_KEYS = {"id", "title", "setting", "seconds", "claims", "notes", "files", "environment"}


def store(entry: Entry, result: Result, setting: Mapping[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """Write CSV tables, figure.png, figure.svg and, last, summary.json; return the summary."""
    tables = {name: rows for name, rows in result.tables.items() if rows}
    for name, rows in tables.items():
        with whole(folder / f"{name}.csv") as new, new.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(csv_row(rows[0])))
            writer.writeheader()
            writer.writerows(map(csv_row, rows))
    save(result.plot(), folder)
    summary = {
        "id": entry.id,
        "title": entry.title,
        "setting": dict(setting),
        "seconds": round(seconds, 2),
        "claims": claims_as_dicts(result.claims),
        "notes": result.notes,
        "shown": result.shown,
        "files": [*(f"{name}.csv" for name in tables), "figure.png", "figure.svg"],
        "environment": environment(),
    }
    with whole(folder / SUMMARY) as new:
        new.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def finished(entry: Entry, setting: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the summary if all files are there and the setting is the same, else None."""
    summary = read(folder)
    if summary is None or summary["id"] != entry.id or summary["setting"] != setting:
        return None
    return summary if all((folder / file).is_file() for file in summary["files"]) else None


def read(folder: Path) -> dict[str, Any] | None:
    """Return the summary in ``folder``, or None if it is missing or incomplete."""
    try:
        summary = read_json(folder / SUMMARY)
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.keys() >= _KEYS else None


def fresh(folder: Path) -> None:
    """Make the folder and delete its summary, which no longer holds once a run begins.

    Raises:
        LeadlineError: If files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).unlink(missing_ok=True)
        with whole(folder / SUMMARY):  # better to fail here than after the run
            pass
        (folder / SUMMARY).unlink()
    except OSError as error:
        raise LeadlineError(f"--out {folder} cannot be made ({error.strerror}); give a folder to write to") from error


def environment() -> dict[str, str]:
    """Return the hardware, and the versions of the libraries."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {**versions("transformers", "matplotlib"), "hardware": f"{processor()}{gpu}"}
