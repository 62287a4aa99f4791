"""Handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels, part of that package."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leadline.data.images.cache import Pixels
from leadline.errors import need

DIGITS_MEAN, DIGITS_STD = (0.3049,), (0.3758,)


class Split(NamedTuple):
    """Images and labels of a split as tensors."""

    images: Tensor  # (N, channels, height, width), float32
    labels: Tensor  # (N,), int64


def load_digits(seed: int = 0) -> tuple[Split, Split]:
    """Return training (80 %) and test images, pixels in [0, 1].

    Args:
        seed: Decides which images are for training.
    """
    digits = need("sklearn.datasets", "data").load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order.split((int(0.8 * len(order)), len(order) - int(0.8 * len(order))))
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def digits_as_bytes() -> tuple[Pixels, Pixels]:
    """Return the two splits of seed 0 with pixels in [0, 255]."""
    train, test = (Pixels((split.images * 255).round().byte(), split.labels) for split in load_digits())
    return train, test
