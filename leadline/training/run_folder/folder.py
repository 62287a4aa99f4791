"""The folder of a run: names of its files, one run at a time, its recipe, its data, its summary."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from leadline.errors import LeadlineError, Stopped
from leadline.files import read_json, read_text, whole
from leadline.machine import lock
from leadline.models.checkpoints import Saved, listed, newest
from leadline.training.recipe import Recipe, differences, of_earlier, parse_recipe
from leadline.training.recipe.plain_yaml import read_yaml
from leadline.training.run_folder.checkpoint import flush, set_aside, write_json

RECIPE, SUMMARY = "recipe.yaml", "summary.json"
DATA = {"text": "text.json", "images": "images.json"}
TRAINING, EVALUATION, PROBE = "log.csv", "evaluation.csv", "probe.csv"
TENSORBOARD = "tensorboard"
DIVERGENCE = "divergence.csv"

FULL = (errno.ENOSPC, errno.EDQUOT)  # no space on the disk, or in the user's quota

# Keys that may change when a run continues: how it is computed and watched, how long it is, where its data are.
FREE = (
    "length", "checkpoint", "watch", "log", "evaluate", "device", "threads", "compile", "graph", "distributed",
    "checkpointing", "norm_limit", "out", "data.path", "data.workers", "data.cache",
)  # fmt: skip


class Previous(NamedTuple):
    """The part of a run that a folder holds already: its recipe and its newest checkpoint, where there are any."""

    recipe: Recipe | None
    saved: Saved | None


@contextmanager
def hold(out: Path) -> Iterator[None]:
    """Lock the folder for this process: two runs in one folder would delete each other's files.

    Raises:
        LeadlineError: Another process trains in the folder, or it cannot be made.
    """
    if os.name == "nt":  # Windows cannot open folders
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise _unusable(out, error) from error
    _locked.add(handle)
    try:
        if not lock(handle, wait=False):
            raise LeadlineError(f"another process is training in {out}; wait for it, or give another out=")
        yield
    finally:
        _locked.discard(handle)
        os.close(handle)


def _release() -> None:
    """Release the locks in a forked child, such as a data worker, which may outlive the training process."""
    for handle in _locked:
        os.close(handle)
    _locked.clear()


_locked: set[int] = set()  # file descriptors of folders
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release)


def take(out: Path, recipe: Recipe, total: int, settle: Callable[[Path], None], say: Callable[[str], None]) -> Previous:
    """Make the folder this run's, or continue the run in it.

    Args:
        out: The folder, held by this process.
        recipe: The recipe of the run.
        total: Its length in steps.
        settle: Writes what the data are into the folder; refuses other data than the run began with.
        say: Prints a line.

    Returns:
        What the folder held before.

    Raises:
        LeadlineError: The folder belongs to another run, or none of its checkpoints can be continued.
    """
    before = _recipe_before(out, recipe)
    saved = newest(out)
    if saved is None and (damaged := listed(out)):
        raise LeadlineError(
            f"no checkpoint in {out} is whole ({', '.join(folder.name for _, folder in damaged)}); to begin anew give "
            "another out= or remove them"
        )
    if saved is not None and saved.step > total:
        raise LeadlineError(
            f"length is {total} steps and {out} holds a checkpoint of step {saved.step}; make length longer or give "
            "another out="
        )
    settle(out)
    _write_recipe(out, recipe)
    set_aside(out, say)
    return Previous(before, saved)


def _recipe_before(out: Path, recipe: Recipe) -> Recipe | None:
    """Return the recipe that the folder holds, if any; raise if it differs in more than the ``FREE`` keys."""
    file = out / RECIPE
    try:
        tree = read_yaml(read_text(file), str(file)) if file.is_file() else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise LeadlineError(f"{file} cannot be read ({reason}); give another out=") from error
    if not isinstance(tree, dict):
        saved = newest(out)
        if saved is None:
            return None
        tree = saved.state["recipe"]  # the file was lost
    try:
        before = parse_recipe(of_earlier(tree))  # keys that an earlier version did not have take their defaults
    except LeadlineError as error:
        raise LeadlineError(f"{file} is no recipe ({error}); give another out=") from error
    changed = [f"{key} ({old} there, {new} now)" for key, old, new in differences(before, recipe, FREE)]
    if changed:
        raise LeadlineError(
            f"{out} holds a run of another recipe: {', '.join(changed)}; give another out= or the recipe of that run"
        )
    return before


def _write_recipe(out: Path, recipe: Recipe) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with whole(out / RECIPE) as new:
            new.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
            flush(new)
    except OSError as error:
        raise _unusable(out, error) from error


def claim_data(out: Path, kind: str, fingerprints: dict[str, Any], origin: str) -> None:
    """Write down the data that a run begins with, or check that a run that continues has the same.

    Args:
        out: The folder of the run.
        kind: "text" or "images".
        fingerprints: A fingerprint of each split, and other facts of the data that must not change.
        origin: How the error calls the given data.

    Raises:
        LeadlineError: The run in the folder began with other data, or the folder cannot be written.
    """
    before = read_data(out, kind) if listed(out) else {}
    if changed := [name for name, value in fingerprints.items() if before.get(name, value) != value]:
        raise LeadlineError(
            f"{out} holds a run that began with other {kind}: {', '.join(changed)} of {origin} differ; give the {kind} "
            "it began with, or another out="
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / DATA[kind], fingerprints)
    except OSError as error:
        raise _unusable(out, error) from error


def read_data(out: Path, kind: str) -> dict[str, Any]:
    """Read what ``claim_data`` wrote; empty if there is nothing, as in runs of early versions."""
    return _read_object(out / DATA[kind])


def check_data(run: Path, kind: str, split: str, fingerprint: str, origin: str) -> None:
    """Check that data at the recipe's path are those of the run: the same path may hold others elsewhere.

    Args:
        run: The folder of the run.
        kind: "text" or "images".
        split: The split that is evaluated.
        fingerprint: Its fingerprint here.
        origin: How the error calls the data.

    Raises:
        LeadlineError: The run began with other data.
    """
    if read_data(run, kind).get(split, fingerprint) != fingerprint:
        raise LeadlineError(
            f"{origin} holds other {split} {kind} than {run} began with; give its own, or others on purpose, by --data"
        )


def read_summary(out: Path) -> dict[str, Any] | None:
    """Read the summary of a finished run; None if there is none, or it is damaged."""
    summary = _read_object(out / SUMMARY)
    return summary if {"steps", "recipe"} <= summary.keys() else None


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write the summary of a finished run.

    Raises:
        Stopped: It cannot be written.
    """
    try:
        write_json(out / SUMMARY, summary)
    except OSError as error:
        raise Stopped(
            f"{out / SUMMARY} could not be written ({error.strerror}); the run itself is complete and saved, make room "
            "and run the same command again"
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing, damaged or holds something else."""
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _unusable(out: Path, error: OSError) -> LeadlineError:
    advice = "make room there and run the same command again" if error.errno in FULL else "give another folder"
    return LeadlineError(f"out={out} cannot be used ({error.strerror or error}); {advice}")
