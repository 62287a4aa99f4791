"""Writing files as a whole or not at all, with ordinary permissions and never through a planted link."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import Tensor

_DAY = 86400.0  # seconds
# A pipe must not make the opening wait. Windows has neither of the two.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield a new file beside ``file`` to write to; it takes the name of ``file`` at the end.

    Its name is random and it is created exclusively, so that no link planted under that name is followed. Where
    ``file`` is a link, the link is replaced and not what it points to. If anything fails, the new file is removed and
    the old one stays. What a killed process left is removed after a day.
    """
    for old in _drafts(file):
        with suppress(OSError):
            if time.time() - old.lstat().st_mtime > _DAY:
                old.unlink()
    new = file.with_name(f".{file.name[:40]}.{secrets.token_hex(8)}.new")
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666))  # less the umask
    try:
        yield new
        os.replace(new, file)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder`` to fill; it takes the name of ``folder``, which is missing or empty.

    The files in it get ordinary permissions. If anything fails, nothing is left; what a killed process left is removed
    after a day.
    """
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
    for old in _drafts(folder):
        if time.time() - old.lstat().st_mtime > _DAY:
            shutil.rmtree(old, ignore_errors=True)
    new = folder.with_name(f".{folder.name[:40]}.{secrets.token_hex(8)}.new")
    new.mkdir()
    try:
        yield new
        mode = new.stat().st_mode & 0o666  # as the umask has it
        for file in new.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(mode)
        if folder.is_dir():
            folder.rmdir()
        os.rename(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _drafts(file: Path) -> list[Path]:
    """List what earlier calls of ``whole`` left beside a file."""
    start = f".{file.name[:40]}."
    with suppress(OSError), os.scandir(file.parent) as entries:
        return [Path(entry.path) for entry in entries if entry.name.startswith(start) and entry.name.endswith(".new")]
    return []


def open_to_append(file: Path) -> TextIO:
    """Open a text file to append to, such as a log; made where it is missing, no link is followed.

    Raises:
        OSError: It is a link, no regular file, or cannot be opened.
    """
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return open(handle, "a", encoding="utf-8", newline="")


def read_text(file: Path, most: int = 1 << 28, errors: str = "strict") -> str:
    """Return the text of a regular file.

    Args:
        file: The file. A link is followed.
        most: Largest size in bytes.
        errors: What happens to bytes that are no UTF-8, as in ``bytes.decode``.

    Raises:
        OSError: It is missing, no regular file such as a pipe, larger, or cannot be read.
        UnicodeDecodeError: It is no UTF-8.
    """
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(file))
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(file))
    return content.decode(errors=errors)


def read_json(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: See ``read_text``.
        ValueError: It is no JSON, or nested too deeply.
    """
    try:
        return json.loads(read_text(file))
    except RecursionError:
        raise ValueError("it has too many lists in lists") from None


@contextmanager
def opened_to_lock(file: Path) -> Iterator[int]:
    """Open a file to lock, made where it is missing; its content stays and no link is followed.

    Yields:
        The file descriptor.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write safetensors with ordinary permissions; the library itself makes files that only their owner can read."""
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(mode)


def csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a CSV file in which no text starts a formula of a spreadsheet; such a cell begins with ``'``."""
    return {_csv_cell(name): _csv_cell(value) for name, value in row.items()}


def _csv_cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
