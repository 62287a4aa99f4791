"""Checkpoints as folders, ``step-000123``, of safetensors and JSON: whole or not there at all.

A checkpoint is written beside its final name, flushed to the disk and renamed, so a kill at any instant leaves the
earlier ones and nothing that looks like a later one. ``manifest.json`` lists every file with its size and SHA-256;
what does not agree with it is damaged and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.training.stop import Stopped

MANIFEST, STATE = "manifest.json", "state.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole."""

    folder: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What a safetensors file of it holds; empty where there is none."""
        file = self.folder / f"{name}.safetensors"
        return load_file(file) if file.is_file() else {}


def folder_of(out: Path, step: int) -> Path:
    return out / f"step-{step:06d}"


def save(out: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Make the checkpoint of ``step``; ``write`` puts its files into the folder it is given."""
    final, new = folder_of(out, step), out / f".new-step-{step:06d}"
    try:
        _remove(new)
        new.mkdir(parents=True)
        write(new)
        files = {}
        for file in sorted(path for path in new.rglob("*") if path.is_file()):
            files[file.relative_to(new).as_posix()] = {"size": file.stat().st_size, "sha256": _digest(file)}
            _flush(file)
        write_json(new / MANIFEST, {"step": step, "files": files})
        _flush(new / MANIFEST)
        for folder in [new, *(path for path in new.rglob("*") if path.is_dir())]:
            _flush(folder)
        if final.exists():  # a damaged one, or the same step again
            old = out / f".old-step-{step:06d}"
            _remove(old)
            final.rename(old)
            new.rename(final)
            _remove(old)
        else:
            new.rename(final)
        _flush(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        earlier = find_checkpoint(out, "last")
        kept = f"{earlier.folder} is intact" if earlier else "there is no earlier one"
        raise Stopped(
            f"the checkpoint of step {step} could not be written to {out} ({reason}); {kept}: make room and run the "
            "same command again"
        ) from error
    return final


def listed(out: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, oldest first."""
    if not out.is_dir():
        return []
    found = [(int(match[1]), path) for path in out.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def check(folder: Path) -> Saved:
    """The checkpoint in ``folder``, if every file is there, complete and unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                raise LeadlineError(f"{file} is missing")
            size = file.stat().st_size
            if size != expected["size"]:
                raise LeadlineError(f"{file} has {size} bytes instead of {expected['size']}")
            if _digest(file) != expected["sha256"]:
                raise LeadlineError(f"{file} is not what was written")
        return Saved(folder, manifest["step"], json.loads((folder / STATE).read_text()))
    except FileNotFoundError as error:
        raise LeadlineError(f"{error.filename} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, LeadlineError):
            raise
        raise LeadlineError(f"{folder / MANIFEST} cannot be read") from error


def newest(out: Path, warn: Callable[[str], None] = lambda line: None) -> Saved | None:
    """The newest checkpoint that is whole; says which ones it passed over."""
    for _, folder in reversed(listed(out)):
        try:
            return check(folder)
        except LeadlineError as error:
            warn(f"{folder.name} is damaged ({error}); looking for an earlier checkpoint")
    return None


def find_checkpoint(out: str | os.PathLike[str], which: Literal["best", "last"] = "best") -> Saved | None:
    """The best checkpoint of a run by its evaluation, or the last one; the last where none was evaluated."""
    whole = []
    for _, folder in listed(Path(out)):
        try:
            whole.append(check(folder))
        except LeadlineError:
            continue
    if not whole:
        return None
    return (_best(whole) if which == "best" else None) or whole[-1]


def prune(out: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` and the best one, and what an earlier kill left half done."""
    for path in out.iterdir():
        if path.name.startswith((".new-step-", ".old-step-")):
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
    best = _best(known)
    for _, folder in older:
        if best is None or folder != best.folder:
            aside = out / f".old-{folder.name}"  # a kill in between leaves no half of a checkpoint
            _remove(aside)
            folder.rename(aside)
            _remove(aside)


def _best(saved: list[Saved]) -> Saved | None:
    """By ``score`` in state.json, where more is better; of equals the earliest."""
    scored = [one for one in saved if one.state.get("score") is not None]
    return max(scored, key=lambda one: (one.state["score"], -one.step), default=None)


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def write_json(file: Path, content: Any) -> None:
    """Beside its final name, then moved there whole."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    _flush(new)
    os.replace(new, file)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync of a file or, where the system can, of a folder."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # folders on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
