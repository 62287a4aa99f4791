"""Writing checkpoints, which ``leadline.models.checkpoints`` reads: whole or not there at all.

A checkpoint is written beside its final name, flushed to the disk and renamed, so a kill at any instant leaves the
earlier ones and nothing that looks like a later one.
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
    STATE,
    Saved,
    UnreadableError,
    best_of,
    check,
    digest,
    find_checkpoint,
    listed,
)


def folder_of(out: Path, step: int) -> Path:
    return out / f"step-{step:06d}"


def save(out: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Make the checkpoint of ``step``; ``write`` puts its files into the folder it is given."""
    final, new = folder_of(out, step), out / f".new-step-{step:06d}"
    replaced = out / f"{REPLACED}{final.name}"
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
        if final.exists():  # the same step again
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
        kept = f"{earlier.folder} is intact" if earlier else "there is no earlier one"
        raise Stopped(
            f"the checkpoint of step {step} could not be written to {out} ({reason}); {kept}: make room and run the "
            "same command again"
        ) from error
    return final


def prune(out: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` and the best one, and what an earlier kill left half done."""
    for path in out.iterdir():
        taken = path.name.startswith(REPLACED) and (out / path.name.removeprefix(REPLACED)).exists()
        if taken or path.name.startswith((".new-", ".old-")):
            _remove(path)
    older = listed(out)[:-keep]
    if not older:
        return
    known = []
    for step, folder in listed(out):
        try:
            known.append(Saved(folder, step, json.loads((folder / STATE).read_text())))
        except (OSError, ValueError):
            continue
    best = best_of(known)
    for _, folder in older:
        if best is None or folder != best.folder:
            aside = out / f".old-{folder.name}"  # a kill in between leaves no half of a checkpoint
            _remove(aside)
            folder.rename(aside)
            _remove(aside)


def set_aside(out: Path, say: Callable[[str], None]) -> None:
    """Damaged checkpoints get another name: they must not count among those to keep, nor as the best."""
    for _, folder in listed(out):
        try:
            check(folder)
        except UnreadableError:
            raise
        except LeadlineError as error:
            aside = out / f"damaged-{folder.name}"
            _remove(aside)
            folder.rename(aside)
            say(f"{folder.name} is damaged ({error}) and now called {aside.name}")


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    save_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, file)


def write_json(file: Path, content: Any) -> None:
    with whole(file) as new:
        new.write_text(json.dumps(content, indent=2) + "\n")
        flush(new)


def flush(path: Path) -> None:
    """fsync of a file or, where the system can, of a folder."""
    try:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes what may be written alone
    except PermissionError:  # folders on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
