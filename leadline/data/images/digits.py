"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, embedded in the package, no download."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leadline.data.images.cache import Pixels
from leadline.errors import need

DIGITS_MEAN, DIGITS_STD = (0.3049,), (0.3758,)


class Split(NamedTuple):
    images: Tensor  # (N, channels, height, width), float32
    labels: Tensor  # (N,), int64


def load_digits(seed: int = 0) -> tuple[Split, Split]:
    """Training (80 %) and test images, pixels scaled to [0, 1]; ``seed`` decides which are which."""
    digits = need("sklearn.datasets", "data").load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order.split((int(0.8 * len(order)), len(order) - int(0.8 * len(order))))
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def digits_as_bytes() -> tuple[Pixels, Pixels]:
    """The same two splits (of seed 0), pixels in [0, 255]."""
    train, test = (Pixels((split.images * 255).round().byte(), split.labels) for split in load_digits())
    return train, test
