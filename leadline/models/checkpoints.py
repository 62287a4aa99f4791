"""The checkpoints of a training run, read: ``step-000123``, folders of safetensors and JSON.

``manifest.json`` lists every file of a checkpoint with its size and SHA-256; what does not agree with it is damaged and
passed over. ``leadline.training.run_folder.checkpoint`` writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from leadline.errors import LeadlineError

MANIFEST, STATE = "manifest.json", "state.json"
REPLACED = ".replaced-"  # before the name of a checkpoint while another one of its step takes its place
_NAME = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{6,}})")


class UnreadableError(LeadlineError):
    """A checkpoint that this user may not read; it may be whole."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole."""

    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def run(self) -> Path:
        """The folder that it lies in."""
        return self.folder.resolve().parent

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What a safetensors file of it holds; empty where there is none."""
        file = self.folder / f"{name}.safetensors"
        return load_file(file) if file.is_file() else {}


def listed(out: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, oldest first; one that was being replaced counts where the
    new one is not there."""
    if not out.is_dir():
        return []
    paths = sorted(out.iterdir(), key=lambda path: path.name)  # those being replaced before the others
    found = {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}
    return sorted(found.items())


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
            if digest(file) != expected["sha256"]:
                raise LeadlineError(f"{file} is not what was written")
        return Saved(folder, manifest["step"], json.loads((folder / STATE).read_text()))
    except FileNotFoundError as error:
        raise LeadlineError(f"{error.filename} is missing") from error
    except PermissionError as error:
        raise UnreadableError(
            f"{error.filename or folder} cannot be read ({error.strerror}); have its owner permit it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, LeadlineError):
            raise
        raise LeadlineError(f"{folder / MANIFEST} cannot be read") from error


def newest(out: Path) -> Saved | None:
    """The newest checkpoint that is whole. One that may not be read is an error: an older one would be no better."""
    for _, folder in reversed(listed(out)):
        try:
            return check(folder)
        except UnreadableError:
            raise
        except LeadlineError:
            continue
    return None


def find_checkpoint(out: str | os.PathLike[str], which: Literal["best", "last"] = "best") -> Saved | None:
    """The best checkpoint of a run by its evaluation, or the last one; the last where none was evaluated."""
    whole, damaged = [], []
    for _, folder in listed(Path(out)):
        try:
            whole.append(check(folder))
        except UnreadableError:
            raise
        except LeadlineError as error:
            damaged.append(f"{folder.name} is damaged ({error})")
    if not whole:
        return None
    found = (best_of(whole) if which == "best" else None) or whole[-1]
    for line in damaged:
        warnings.warn(f"{line}; {found.folder} is taken", stacklevel=2)
    return found


def best_of(saved: list[Saved]) -> Saved | None:
    """By ``score`` in state.json, where more is better; of equals the earliest."""
    scored = [one for one in saved if one.state.get("score") is not None]
    return max(scored, key=lambda one: (one.state["score"], -one.step), default=None)


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
