"""Files that are written whole or not at all, and readable by whom the user lets read."""

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
    """A path beside ``file`` to write to. It takes the file's name at the end, or goes if something fails."""
    new = file.with_name(f"{file.name}.new")
    try:
        yield new
        os.replace(new, file)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """As safetensors, whose library makes files for the eyes of their owner alone: this one is as any other."""
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(mode)
