"""Writing files as a whole or not at all, with ordinary permissions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield a path beside ``file`` to write to; it takes the name of ``file`` at the end.

    If anything fails, the new file is removed and the old one stays.
    """
    new = file.with_name(f"{file.name}.new")
    try:
        yield new
        os.replace(new, file)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write safetensors with ordinary permissions; the library itself makes files that only their owner can read."""
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(mode)
