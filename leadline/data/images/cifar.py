"""CIFAR-10 as tensors, from the hub or from a local folder in the layout of the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.data.hub import quiet_hub
from leadline.data.images.digits import Split
from leadline.data.images.sets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    LAYOUTS,
    decode,
    image_rows,
    parquet_batches,
    parquet_files,
)
from leadline.errors import LeadlineError, check_choice, need

CIFAR10 = LAYOUTS["cifar10"].hub


def load_cifar10(split: str = "test", data: str | os.PathLike[str] | None = None, limit: int | None = None) -> Split:
    """Return images (N, 3, 32, 32) in [0, 1] and labels (N,), in the order of the set.

    Args:
        split: "train" or "test".
        data: A local folder with the parquet files of the hub, ``[plain_text/]test-00000-of-00001.parquet`` and so on.
            None: ``datasets`` downloads the set or finds it in its cache.
        limit: The number of images; None: all.

    Raises:
        LeadlineError: The set is absent, incomplete or damaged.
    """
    check_choice("split", split, ("train", "test"))
    if limit is not None and limit < 1:
        raise LeadlineError(f"limit is {limit}; it must be at least 1, or None for all images")
    table = _from_hub(split, limit) if data is None else _from_folder(Path(data), split, limit)
    if not {"img", "label"} <= set(table.column_names):
        raise LeadlineError(f"the columns are {', '.join(table.column_names)}; CIFAR-10's parquet has img and label")
    rows = list(image_rows(table, LAYOUTS["cifar10"], _where))
    images = [_decode(row.encoded, i) for i, row in enumerate(rows)]
    for i, image in enumerate(images):
        if image.shape != images[0].shape:
            sides = " x ".join(map(str, image.shape[:0:-1]))
            raise LeadlineError(f"{_where(i)} has {sides} pixels, not as many as row 0; CIFAR-10's images are alike")
    return Split(torch.stack(images).float() / 255, torch.tensor([row.label for row in rows]))


def prepare(images: Tensor, size: int = 224) -> Tensor:
    """Resize and normalise images as models of ImageNet expect: (N, 3, size, size), bilinear.

    Args:
        images: (N, 1 or 3, h, w) in [0, 1].
        size: Pixels a side.
    """
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    mean, std = (images.new_tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images.expand(-1, 3, -1, -1) - mean) / std


def _from_folder(folder: Path, split: str, limit: int | None) -> Any:
    table = need("pyarrow", "data").Table
    parts, rows = [], 0
    for file in parquet_files(folder, split, CIFAR10):
        for batch in parquet_batches(file):
            parts.append(batch)
            rows += batch.num_rows
            if limit is not None and rows >= limit:
                return table.from_batches(parts).slice(0, limit)
    if not parts:
        raise LeadlineError(f"the {split} split of CIFAR-10 in {folder} has no rows; give a whole copy")
    return table.from_batches(parts)


def _from_hub(split: str, limit: int | None) -> Any:
    datasets = need("datasets", "data")
    try:
        with quiet_hub():
            rows = datasets.load_dataset(CIFAR10, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise LeadlineError(
            f"CIFAR-10 is not on this machine and {CIFAR10!r} could not be downloaded ({type(error).__name__}); give a "
            "local copy with --data FOLDER, or use scikit-learn's digits instead with --embedded"
        ) from error
    count = len(rows) if limit is None else min(limit, len(rows))
    return rows.with_format("arrow")[:count]  # img stays encoded: the same table as from a folder


def _decode(encoded: bytes, row: int) -> Tensor:
    """Decode an image into (3, h, w), uint8."""
    image = decode(encoded, _where(row))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def _where(row: int) -> str:
    return f"row {row} of CIFAR-10"
