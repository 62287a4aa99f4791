"""Writing, pruning and renaming checkpoints; ``leadline.models.checkpoints`` reads them.

A checkpoint is complete or absent. It is written under another name, flushed to the disk and renamed. So a kill at any
instant leaves the earlier checkpoints, and nothing that looks like a later one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from leadline.errors import LeadlineError, Stopped
from leadline.files import save_tensors, whole
from leadline.models.checkpoints import (
    MANIFEST,
    REPLACED,
    Saved,
    UnreadableError,
    best_of,
    check,
    digest,
    find_checkpoint,
    listed,
    read_state,
)

NEW, OLD, DAMAGED = ".new-", ".old-", "damaged-"  # before a checkpoint's name: being written, being deleted, unreadable


def folder_of(out: Path, step: int) -> Path:
    """Return the folder of a checkpoint in the run's folder ``out``."""
    return out / f"step-{step:06d}"


def save(out: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write the checkpoint of a step.

    Args:
        out: The folder of the run.
        step: How many steps are done.
        write: Writes the files of the checkpoint into the folder that it is given.

    Returns:
        The folder of the checkpoint.

    Raises:
        Stopped: It cannot be written; earlier checkpoints are intact.
    """
    final = folder_of(out, step)
    new, replaced = out / f"{NEW}{final.name}", out / f"{REPLACED}{final.name}"
    try:
        _remove(new)
        new.mkdir(parents=True)
        write(new)
        files = {}
        for file in sorted(path for path in new.rglob("*") if path.is_file()):
            files[file.relative_to(new).as_posix()] = {"size": file.stat().st_size, "sha256": digest(file)}
            flush(file)
        write_json(new / MANIFEST, {"step": step, "files": files})
        flush(new / MANIFEST)
        for folder in [new, *(path for path in new.rglob("*") if path.is_dir())]:
            flush(folder)
        if final.exists():  # an earlier checkpoint of the same step
            _remove(replaced)
            final.rename(replaced)
        new.rename(final)
        _remove(replaced)
        flush(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        earlier = find_checkpoint(out, "last")
        rest = f"{earlier.folder} is intact" if earlier else "there is no earlier one"
        raise Stopped(
            f"the checkpoint of step {step} could not be written to {out} ({reason}); {rest}: make room and run the "
            "same command again"
        ) from error
    return final


def prune(out: Path, keep: int) -> None:
    """Delete all checkpoints but the newest ``keep`` and the best, and what a kill left incomplete."""
    for path in out.iterdir():
        superseded = path.name.startswith(REPLACED) and (out / path.name.removeprefix(REPLACED)).exists()
        if superseded or path.name.startswith((NEW, OLD)):
            _remove(path)
    older = listed(out)[:-keep]
    if not older:
        return
    readable = []
    for step, folder in listed(out):
        try:
            readable.append(Saved(folder, step, read_state(folder)))
        except (OSError, ValueError):
            continue
    best = best_of(readable)
    for _, folder in older:
        if best is None or folder != best.folder:
            aside = out / f"{OLD}{folder.name}"  # a kill while it is deleted leaves no part of a checkpoint
            _remove(aside)
            folder.rename(aside)
            _remove(aside)


def set_aside(out: Path, say: Callable[[str], None]) -> None:
    """Rename damaged checkpoints, so that ``prune`` counts them neither among the newest nor as the best.

    Args:
        out: The folder of the run.
        say: Prints a line for each.

    Raises:
        UnreadableError: A checkpoint may not be read, so it is not known whether it is damaged.
    """
    for _, folder in listed(out):
        try:
            check(folder)
        except UnreadableError:
            raise
        except LeadlineError as error:
            aside = out / f"{DAMAGED}{folder.name}"
            _remove(aside)
            folder.rename(aside)
            say(f"{folder.name} is damaged ({error}) and now called {aside.name}")


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    save_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, file)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file, complete and flushed to the disk, or not at all."""
    with whole(file) as new:
        new.write_text(json.dumps(content, indent=2) + "\n")
        flush(new)


def flush(path: Path) -> None:
    """Flush a file to the disk (fsync) or, where the system can, a folder."""
    try:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes writable files only
    except PermissionError:  # folders on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # it is not ours; what it points to stays
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
