"""Cache folders: computed once by one process while others wait, complete and unchanged or made again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from leadline.errors import LeadlineError
from leadline.files import opened_to_lock, read_json
from leadline.machine import lock

T = TypeVar("T")
Report = Callable[[str, int, int | None], None]  # the work, parts done, parts in all where that is known
_REPORT: ContextVar[Report | None] = ContextVar("report", default=None)
_DAY = 86400.0
_FINGERPRINT = "fingerprint.json"
_PIECE = 1 << 20  # bytes of a large file that are read at a time
_PIECES = 64  # of a large file that are read; a smaller file is read wholly


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

    The new folder gets its name once it is complete. One process makes it, others wait. It holds a fingerprint of its
    files, which every opening checks: their sizes and SHA-256. Of a file above 64 MiB 64 pieces of 1 MiB are hashed,
    the first, the last and evenly spaced ones, so an opening takes at most about .2 s per file. That shows a cut or
    exchanged file, but not every changed byte of a large one.

    Args:
        name: Name of the folder in the cache.
        folder: The cache, see ``cache_folder``.
        make: Fills the empty folder that it is given.
        what: What the folder holds, such as "images", for the error message.
        whole: Tells whether an existing folder is undamaged.

    Raises:
        LeadlineError: The cache cannot be written, or holds something of that name by somebody else.
    """
    root = cache_folder(folder)
    target = root / name
    try:
        if root.is_dir() and _open_to_all(root.stat()):
            warnings.warn(
                f"everybody can write to the cache {root} and so change what is read from it; run chmod o-w on it, "
                "or give another folder",
                stacklevel=2,
            )
        if _usable(target, whole):  # the cache may belong to another user and not be writable
            return target
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not _usable(target, whole):
                for draft in root.glob(f"{name}.*.part"):  # of a process that was killed
                    if time.time() - draft.stat().st_mtime > _DAY:
                        shutil.rmtree(draft, ignore_errors=True)
                draft = root / f"{name}.{uuid.uuid4().hex}.part"
                draft.mkdir()
                try:
                    make(draft)
                    (draft / _FINGERPRINT).write_text(json.dumps(_fingerprint(draft)))
                    _to_disk(draft)
                    if target.is_symlink():
                        target.unlink()
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


def _usable(target: Path, whole: Callable[[Path], bool]) -> bool:
    """Return whether a folder of the cache is there, made by somebody who is trusted, and unchanged.

    Those trusted are this user, the owner of the cache, and root.

    Raises:
        LeadlineError: Somebody else made it.
    """
    if target.is_symlink() or not target.is_dir():
        return False
    owner, root = target.lstat().st_uid, target.parent.stat()
    if _open_to_all(root) and owner not in (os.getuid(), root.st_uid, 0):
        raise LeadlineError(
            f"{target} was made by another user (number {owner}) in a cache that everybody can write to; "
            "give another folder by data.cache=FOLDER in the recipe, or by $LEADLINE_CACHE"
        )
    try:
        before = read_json(target / _FINGERPRINT)
    except (OSError, ValueError):
        return False  # of an earlier version, or damaged
    return bool(before == _fingerprint(target)) and whole(target)


def _open_to_all(root: os.stat_result) -> bool:
    """Return whether everybody can write to a folder; Windows has no such bit."""
    return os.name != "nt" and bool(root.st_mode & stat.S_IWOTH)


def _fingerprint(folder: Path) -> dict[str, list[int | str]]:
    """Return the size and the SHA-256 of every file, of large files that of evenly spaced pieces."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != _FINGERPRINT)
    return {file.relative_to(folder).as_posix(): [file.stat().st_size, _digest(file)] for file in files}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= _PIECE * _PIECES:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        total = hashlib.sha256()
        for i in range(_PIECES):
            stream.seek(i * (size - _PIECE) // (_PIECES - 1))
            total.update(stream.read(_PIECE))
        return total.hexdigest()


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
    with opened_to_lock(file) as handle:
        lock(handle, wait=True)
        yield
