"""The folder of a run: whose it is, its data, and its summary."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from leadline.errors import LeadlineError, Stopped
from leadline.files import whole
from leadline.machine import lock
from leadline.models.checkpoints import listed, newest
from leadline.training.recipe import Recipe, differences, of_earlier, parse_recipe
from leadline.training.run_folder.checkpoint import flush, write_json

RECIPE, SUMMARY = "recipe.yaml", "summary.json"
DATA = {"text": "text.json", "images": "images.json"}

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what one may have of it

# What may change when a run goes on: how it is computed and watched, how long it is, where its data lie.
FREE = (
    "length", "checkpoint", "watch", "log", "evaluate", "device", "threads", "compile", "graph", "distributed",
    "checkpointing", "norm_limit", "out", "data.path", "data.workers", "data.cache",
)  # fmt: skip


def owner(out: Path, recipe: Recipe) -> Recipe | None:
    """The recipe that the folder has, which must be this one but for what may change; None: it has none."""
    file = out / RECIPE
    try:
        before = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise LeadlineError(f"{file} cannot be read ({why}); give another out=") from error
    if not isinstance(before, dict):
        saved = newest(out)
        if saved is None:
            return None
        before = saved.state["recipe"]  # the file was lost
    try:
        found = parse_recipe(of_earlier(before))  # a version that had fewer keys did what their defaults say
    except LeadlineError as error:
        raise LeadlineError(f"{file} is no recipe ({error}); give another out=") from error
    _compare(found, recipe, out)
    return found


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder: two processes that train in one take each other's files away."""
    if os.name == "nt":  # no folder can be opened there
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise _unusable(out, error) from error
    _held.add(held)
    try:
        if not lock(held, wait=False):
            raise LeadlineError(f"another process is training in {out}; wait for it, or give another out=")
        yield
    finally:
        _held.discard(held)
        os.close(held)


def _let_go() -> None:
    """In a child, such as a data worker, which may outlive the process that trains by seconds."""
    for folder in _held:
        os.close(folder)
    _held.clear()


_held: set[int] = set()  # folders, as open files
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def claim(out: Path, recipe: Recipe) -> None:
    """Make the folder this recipe's."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with whole(out / RECIPE) as new:
            new.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
            flush(new)
    except OSError as error:
        raise _unusable(out, error) from error


def claim_data(out: Path, kind: str, found: dict[str, Any], origin: str) -> None:
    """Write down the data that a run begins with; a run that goes on must have the same, wherever they lie.

    kind    "text" or "images".
    found   a fingerprint of each split, and what else must stay.
    origin  what the error calls the data at hand.
    """
    file, before = out / DATA[kind], read_data(out, kind) if listed(out) else {}
    if changed := [split for split, own in found.items() if before.get(split, own) != own]:
        raise LeadlineError(
            f"{out} holds a run that began with other {kind}: {', '.join(changed)} of {origin} differ; give the {kind} "
            "it began with, or another out="
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, found)
    except OSError as error:
        raise _unusable(out, error) from error


def check_data(run: Path, kind: str, split: str, found: str, origin: str) -> None:
    """Where a run is evaluated and no data were asked for, they must be its own: a path may mean others elsewhere."""
    if read_data(run, kind).get(split, found) != found:
        raise LeadlineError(
            f"{origin} holds other {split} {kind} than {run} began with; give its own, or others on purpose, by --data"
        )


def _unusable(out: Path, error: OSError) -> LeadlineError:
    advice = "make room there and run the same command again" if error.errno in FULL else "give another folder"
    return LeadlineError(f"out={out} cannot be used ({error.strerror or error}); {advice}")


def read_data(out: Path, kind: str) -> dict[str, Any]:
    """What ``claim_data`` wrote down; empty for a run from before it did."""
    try:
        found = json.loads((out / DATA[kind]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _compare(before: Recipe, now: Recipe, out: Path) -> None:
    changed = [f"{key} ({old} there, {new} now)" for key, old, new in differences(before, now, FREE)]
    if changed:
        raise LeadlineError(
            f"{out} holds a run of another recipe: {', '.join(changed)}; give another out= or the recipe of that run"
        )


def read_summary(out: Path) -> dict[str, Any] | None:
    """None where there is none, or it is damaged."""
    try:
        found = json.loads((out / SUMMARY).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"steps", "recipe"} <= found.keys() else None


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    try:
        write_json(out / SUMMARY, summary)
    except OSError as error:
        raise Stopped(
            f"{out / SUMMARY} could not be written ({error.strerror}); the run itself is complete and saved, make room "
            "and run the same command again"
        ) from error
