"""Folders of things that are computed once: whole or not there, and made by one process while the others wait."""

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
Tell = Callable[[str, int, int | None], None]  # what is made, parts that are done, of how many if that is known
_TELL: ContextVar[Tell | None] = ContextVar("tell", default=None)
_DAY = 86400.0


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where caches lie: the given folder, that of $LEADLINE_CACHE, or ~/.cache/leadline."""
    return Path(folder or os.environ.get("LEADLINE_CACHE") or Path.home() / ".cache" / "leadline")


def kept(
    name: str,
    folder: str | os.PathLike[str] | None,
    make: Callable[[Path], object],
    what: str,
    whole: Callable[[Path], bool] = lambda at: True,
) -> Path:
    """The folder ``name`` in the cache; where there is none ``make`` fills a new one, which gets its name when whole.

    what   stands in the error when that is not possible, such as "images".
    whole  whether a folder found is undamaged; one that is not is made again.
    """
    root = cache_folder(folder)
    target = root / name
    try:
        if target.is_dir() and whole(target):  # it may be another's, and not ours to write to
            return target
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not target.is_dir() or not whole(target):
                for left in root.glob(f"{name}.*.part"):  # by a process that was killed
                    if time.time() - left.stat().st_mtime > _DAY:
                        shutil.rmtree(left, ignore_errors=True)
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
def telling(tell: Tell) -> Iterator[None]:
    """Inside, ``tell`` hears how far the things have come that are made."""
    before = _TELL.set(tell)
    try:
        yield
    finally:
        _TELL.reset(before)


def counted(parts: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The parts that something is made of, each told as it is taken, be it in another thread."""
    return _counted(parts, what, total, _TELL.get())


def _counted(parts: Iterable[T], what: str, total: int | None, tell: Tell | None) -> Iterator[T]:
    for done, part in enumerate(parts):
        if tell is not None:
            tell(what, done, total)
        yield part


def _to_disk(folder: Path) -> None:
    """A rename may reach the disk before the bytes do; then a power cut leaves a short file under the final name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process makes a cache, the others wait for it; where there are no such locks, each makes its own."""
    with file.open("w") as held:
        lock(held.fileno(), wait=True)
        yield
