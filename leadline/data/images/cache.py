"""Images decoded once: a small set as one array, a large one as a flat file of encoded images.

The name of a cache folder depends on the files that it was made of, see ``leadline.data.made_once``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from leadline.data.images.sets import FolderRows, Rows, decode, read_file
from leadline.data.made_once import counted, made_once
from leadline.errors import LeadlineError

_FORMAT = 1  # changes when what is stored changes
_PIXELS, _LABELS, _OFFSETS, _PACK = "pixels.npy", "labels.npy", "offsets.npy", "images.bin"


class Pixels(NamedTuple):
    """A split in memory, or mapped into it."""

    images: Tensor  # (N, channels, height, width), uint8
    labels: Tensor  # (N,), int64


class Encoded(Protocol):
    """A split whose images stay encoded and are read one by one."""

    labels: np.ndarray  # (N,), int64

    def read(self, index: int) -> tuple[bytes, str]:
        """Return the encoded image and the name of its origin."""
        ...


def decoded(rows: Rows, size: int | None, folder: str | os.PathLike[str] | None = None) -> Pixels:
    """Return a split as one array, mapped into memory.

    Args:
        rows: The split.
        size: Pixels a side: other images are resized by their short side and cut in the middle. None: all images must
            have the same size already.
        folder: The cache, see ``cache_folder``.
    """
    at = _made(rows, {"size": size}, folder, lambda draft: _decode_all(rows, size, draft), (_PIXELS, _LABELS))
    return Pixels(_mapped(at / _PIXELS), torch.from_numpy(np.load(at / _LABELS)))


def encoded(rows: Rows, folder: str | os.PathLike[str] | None = None) -> Encoded:
    """Return a split that can be read in any order.

    Files of an image folder are read in place. Parquet has no quick way to one row, so its encoded images are first
    copied into one flat file.

    Args:
        rows: The split.
        folder: The cache, see ``cache_folder``.
    """
    if isinstance(rows, FolderRows):
        return _Files(rows)
    at = _made(rows, {"packed": True}, folder, lambda draft: _pack(rows, draft), (_OFFSETS, _LABELS))
    return _Packed(rows, at / _PACK, np.load(at / _OFFSETS, mmap_mode="r"), np.load(at / _LABELS))


def _made(
    rows: Rows,
    options: dict[str, Any],
    folder: str | os.PathLike[str] | None,
    make: Callable[[Path], None],
    arrays: tuple[str, str],
) -> Path:
    """Return the cache folder of a split; ``make`` fills it where it is absent or damaged."""
    name = hashlib.sha256(json.dumps([_FORMAT, options, rows.key()]).encode()).hexdigest()[:20]
    return made_once(name, folder, make, "images", lambda at: _whole(at, arrays))


def _whole(folder: Path, arrays: tuple[str, str]) -> bool:
    """Tell whether the files are as long as they say: a full disk or a lost write cuts them short."""
    try:
        loaded = {name: np.load(folder / name, mmap_mode="r") for name in arrays}
        return _OFFSETS not in loaded or (folder / _PACK).stat().st_size == loaded[_OFFSETS][-1]
    except (ValueError, EOFError, FileNotFoundError):
        return False


def _decode_all(rows: Rows, size: int | None, folder: Path) -> None:
    labels = np.empty(len(rows), dtype=np.int64)
    side = size
    with (folder / _PIXELS).open("wb") as file:  # written in order: a full disk would crash a mapped file
        for i, row in enumerate(counted(rows, f"decoding {len(rows)} images", len(rows))):
            image = decode(row.encoded, rows.where(i))
            if size is not None:
                image = _fitted(image, size)
            elif image.width != image.height or side not in (None, image.width):
                raise LeadlineError(
                    f"{rows.where(i)} has {image.width} x {image.height} pixels and is not like the images before it; "
                    "give data.image_size to resize them"
                )
            if i == 0:
                side = image.width
                shape = (len(rows), 3, side, side)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_2_0(file, header)
            file.write(np.asarray(image).transpose(2, 0, 1).tobytes())
            labels[i] = row.label
    np.save(folder / _LABELS, labels)


def _fitted(image: Any, size: int) -> Any:
    """Resize the short side to ``size`` and return the middle square."""
    if image.size != (size, size):
        scale = size / min(image.size)
        image = image.resize([max(size, round(side * scale)) for side in image.size], resample=3)  # bicubic
        left, top = (image.width - size) // 2, (image.height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return image


def _pack(rows: Rows, folder: Path) -> None:
    labels, offsets = np.empty(len(rows), dtype=np.int64), np.zeros(len(rows) + 1, dtype=np.int64)
    with (folder / _PACK).open("wb") as file:
        for i, row in enumerate(counted(rows, f"copying {len(rows)} images", len(rows))):
            file.write(row.encoded)
            offsets[i + 1] = offsets[i] + len(row.encoded)
            labels[i] = row.label
    np.save(folder / _OFFSETS, offsets)
    np.save(folder / _LABELS, labels)


def _mapped(file: Path) -> Tensor:
    """Return a stored array that shares the pages of its file, private and writable, so that torch does not warn."""
    return torch.from_numpy(np.load(file, mmap_mode="c"))


@dataclass
class _Packed:
    rows: Rows
    file: Path
    offsets: np.ndarray
    labels: np.ndarray

    def read(self, index: int) -> tuple[bytes, str]:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        with self.file.open("rb") as file:
            file.seek(start)
            return file.read(end - start), self.rows.where(index)


class _Files:
    def __init__(self, rows: FolderRows) -> None:
        self.files = [file for file, _ in rows.files]
        self.labels = np.array([label for _, label in rows.files], dtype=np.int64)

    def read(self, index: int) -> tuple[bytes, str]:
        return read_file(self.files[index]), str(self.files[index])
