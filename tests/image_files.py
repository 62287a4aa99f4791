"""Small copies of the sets, written by the tests themselves."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def png(pixels: np.ndarray) -> bytes:
    """(h, w, 3) uint8 -> a PNG, so that every pixel is known."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_parquet(file: Path, encoded: list[bytes], image: str = "img", **columns: list[int]) -> None:
    """The hub's layout: a struct of bytes and path, and integer columns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": one, "path": None} for one in encoded]
    others = {name: pa.array(values, pa.int64()) for name, values in columns.items()}
    pq.write_table(pa.table({image: images, **others}), file)


def noise(count: int, size: int = 32, seed: int = 0) -> np.ndarray:
    """(count, size, size, 3), uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def write_cifar(folder: Path, train: int = 40, test: int = 12, seed: int = 0, **other: Any) -> np.ndarray:
    """A CIFAR-10 of noise; label i % 10. Returns the training images."""
    pixels = noise(train + test, seed=seed)
    for split, part in (("train", pixels[:train]), ("test", pixels[train:])):
        labels = [i % 10 for i in range(len(part))]
        write_parquet(folder / "plain_text" / f"{split}-00000-of-00001.parquet", [png(p) for p in part], label=labels)
    return pixels[:train]


def write_folder(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 6, size: int = 40) -> None:
    """An image folder with splits train and val; sizes differ."""
    for split in ("train", "val"):
        for label, name in enumerate(classes):
            at = folder / split / name
            at.mkdir(parents=True)
            for i in range(each):
                pixels = noise(1, size + 8 * i, seed=100 * label + i)[0][: size + 4 * i]
                (at / f"{i}.png").write_bytes(png(pixels))
