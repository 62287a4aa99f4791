"""Reading the checkpoints of a training run: folders ``step-000123`` of safetensors and JSON files.

``manifest.json`` lists every file of a checkpoint with its size and SHA-256. A checkpoint that does not agree with it
is damaged and is skipped. ``leadline.training.run_folder.checkpoint`` writes checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leadline.errors import LeadlineError, excerpt
from leadline.files import read_json

MANIFEST, STATE = "manifest.json", "state.json"
REPLACED = ".replaced-"  # prefix of a checkpoint while another one of the same step takes its place
_NAME = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{6,}})")


class UnreadableError(LeadlineError):
    """A checkpoint that this user has no permission to read. It need not be damaged."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files are complete and unchanged.

    Attributes:
        folder: Its folder.
        step: The number of training steps before it.
        state: The content of its state.json.
    """

    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def run(self) -> Path:
        """The folder of the training run."""
        return self.folder.resolve().parent

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load the tensors in its file ``name``.safetensors; an empty dictionary if there is no such file."""
        file = self.folder / f"{name}.safetensors"
        try:
            return load_file(file) if file.is_file() else {}
        except (SafetensorError, OSError, ValueError) as error:
            raise LeadlineError(f"{file} cannot be read ({error}); remove its checkpoint") from error


def listed(out: Path) -> list[tuple[int, Path]]:
    """List the step and the folder of everything that is named like a checkpoint, oldest first.

    A checkpoint that was about to be replaced counts if the new one is missing.

    Args:
        out: The folder of a training run; the list is empty if it does not exist.
    """
    if not out.is_dir():
        return []
    paths = sorted(out.iterdir(), key=lambda path: path.name)  # the replaced ones come first
    folders = {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}
    return sorted(folders.items())


def check(folder: Path) -> Saved:
    """Read the checkpoint in ``folder``, whose files must all be there, complete and unchanged.

    Raises:
        UnreadableError: If a file cannot be read for want of permission.
        LeadlineError: If the checkpoint is damaged.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        for name, expected in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                raise LeadlineError(f"{file} is missing")
            size = file.stat().st_size
            if size != expected["size"]:
                raise LeadlineError(f"{file} has {size} bytes instead of {expected['size']}")
            if digest(file) != expected["sha256"]:
                raise LeadlineError(f"{file} is not what was written")
        return Saved(folder, _step(manifest, folder), read_state(folder))
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


def _step(manifest: dict[str, Any], folder: Path) -> int:
    """Return the step that a manifest names, which must be a whole number."""
    if type(manifest["step"]) is not int or manifest["step"] < 0:
        raise LeadlineError(f"{folder / MANIFEST} has the step {excerpt(manifest['step'])}, which is no whole number")
    return manifest["step"]


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of state.json, a mapping whose score, if any, is a number.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    state = read_json(folder / STATE)
    score = state.get("score") if isinstance(state, dict) else "missing"
    number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if not isinstance(state, dict) or not (score is None or number):
        raise LeadlineError(f"{folder / STATE} is no mapping with a number as its score")
    return state


def newest(out: Path) -> Saved | None:
    """Return the newest checkpoint of a run that is not damaged, or None if there is none.

    Raises:
        UnreadableError: If there is no permission to read one. An older one would hide that.
    """
    for _, folder in reversed(listed(out)):
        try:
            return check(folder)
        except UnreadableError:
            raise
        except LeadlineError:
            continue
    return None


def find_checkpoint(out: str | os.PathLike[str], which: Literal["best", "last"] = "best") -> Saved | None:
    """Return a checkpoint of a training run, with a warning for each damaged one that was skipped.

    Args:
        out: The folder of the run.
        which: The "best" checkpoint by its evaluation or the "last" one, which is also taken if none was evaluated.

    Returns:
        The checkpoint, or None if the run has none that is not damaged.

    Raises:
        UnreadableError: If there is no permission to read a checkpoint.
    """
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
    checkpoint = (best_of(whole) if which == "best" else None) or whole[-1]
    for line in damaged:
        warnings.warn(f"{line}; {checkpoint.folder} is taken", stacklevel=2)
    return checkpoint


def best_of(saved: list[Saved]) -> Saved | None:
    """Return the checkpoint with the highest ``score`` in its state.json, the earliest of equals.

    Returns:
        None if no checkpoint has a score.
    """
    scored = [one for one in saved if one.state.get("score") is not None]
    return max(scored, key=lambda one: (one.state["score"], -one.step), default=None)


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
