"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path beside ``file`` to write to. It takes the file's name at the end, or goes if something fails."""
    new = file.with_name(f"{file.name}.new")
    try:
        yield new
        os.replace(new, file)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
