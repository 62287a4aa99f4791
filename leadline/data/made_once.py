"""Cache folders: computed once by one process while others wait, complete or absent."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from leadline.errors import LeadlineError
from leadline.machine import lock

T = TypeVar("T")
Report = Callable[[str, int, int | None], None]  # the work, parts done, parts in all where that is known
_REPORT: ContextVar[Report | None] = ContextVar("report", default=None)
_DAY = 86400.0


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all caches: the given one, $LEADLINE_CACHE, or ~/.cache/leadline."""
    return Path(folder or os.environ.get("LEADLINE_CACHE") or Path.home() / ".cache" / "leadline")


def made_once(
    name: str,
    folder: str | os.PathLike[str] | None,
    make: Callable[[Path], object],
    what: str,
    whole: Callable[[Path], bool] = lambda at: True,
) -> Path:
    """Return a folder of the cache; where it is absent or damaged, ``make`` fills a new one.

    The new folder gets its name once it is complete. One process makes it, others wait.

    Args:
        name: Name of the folder in the cache.
        folder: The cache, see ``cache_folder``.
        make: Fills the empty folder that it is given.
        what: What the folder holds, such as "images", for the error message.
        whole: Tells whether an existing folder is undamaged.

    Raises:
        LeadlineError: The cache cannot be written.
    """
    root = cache_folder(folder)
    target = root / name
    try:
        if target.is_dir() and whole(target):  # the cache may belong to another user and not be writable
            return target
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not target.is_dir() or not whole(target):
                for draft in root.glob(f"{name}.*.part"):  # of a process that was killed
                    if time.time() - draft.stat().st_mtime > _DAY:
                        shutil.rmtree(draft, ignore_errors=True)
                draft = root / f"{name}.{uuid.uuid4().hex}.part"
                draft.mkdir()
                try:
                    make(draft)
                    _to_disk(draft)
                    shutil.rmtree(target, ignore_errors=True)
                    os.rename(draft, target)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise LeadlineError(
            f"{what} cannot be cached in {root} ({error.strerror or error}); "
            "make room there, or give another folder by data.cache=FOLDER in the recipe or, where it names none, by "
            "$LEADLINE_CACHE"
        ) from error
    return target


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Inside the context, ``report`` is called with the progress of everything that is being made.

    Args:
        report: Called as report(what, parts done, parts in all or None).
    """
    before = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(before)


def counted(parts: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield ``parts`` and report each one as it is taken, in whichever thread that happens.

    Args:
        parts: What something is made of.
        what: The work, for the progress bar.
        total: Number of parts, where it is known.
    """
    return _counted(parts, what, total, _REPORT.get())


def _counted(parts: Iterable[T], what: str, total: int | None, report: Report | None) -> Iterator[T]:
    for done, part in enumerate(parts):
        if report is not None:
            report(what, done, total)
        yield part


def _to_disk(folder: Path) -> None:
    """Write every file of a folder through to the disk.

    A rename may reach the disk before the bytes do; a power cut would then leave a short file under the final name.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of a cache folder; without file locks on this system every process makes its own copy."""
    with file.open("w") as stream:
        lock(stream.fileno(), wait=True)
        yield
