"""The training and test images of a run, each opened at its first use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from leadline.data.images.cache import Encoded, Pixels, decoded, encoded
from leadline.data.images.digits import DIGITS_MEAN, DIGITS_STD, digits_as_bytes
from leadline.data.images.plan import Look
from leadline.data.images.sets import IMAGENET_MEAN, IMAGENET_STD, LAYOUTS, SPLITS, FolderRows, Rows, open_rows
from leadline.errors import LeadlineError

_SIZE = 224  # pixels a side, of images that have many sizes


@dataclass
class ImageSets:
    """The images of a recipe, see ``leadline.training.recipe.VisionData``; ``classes`` as in ``open_rows``."""

    name: str
    path: str | None = None
    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    store: str = "auto"
    cache: str | None = None
    classes: Sequence[str] | None = None
    _rows: dict[str, Rows] = field(default_factory=dict, init=False)
    _images: dict[str, Pixels | Encoded] = field(default_factory=dict, init=False)

    def look(self) -> Look:
        """Return the form in which the images reach the model."""
        layout = LAYOUTS.get(self.name)
        classes, size = 10, 8
        mean: tuple[float, ...] = DIGITS_MEAN
        std: tuple[float, ...] = DIGITS_STD
        if layout is not None:
            classes, size, mean, std = layout.classes, layout.size or _SIZE, layout.mean, layout.std
        elif self.name == "folder":
            classes = self.rows("train").classes if self.classes is None else len(self.classes)
            size, mean, std = _SIZE, IMAGENET_MEAN, IMAGENET_STD
        for name, given in (("mean", self.mean), ("std", self.std)):
            if given is not None and len(given) != len(mean):
                raise LeadlineError(f"data.{name} has {len(given)} numbers; these images have {len(mean)} channels")
        return Look(self.image_size or size, self.mean or mean, self.std or std, classes)

    def rows(self, split: str) -> Rows:
        """Return the encoded rows of a split."""
        if split not in self._rows:
            self._rows[split] = open_rows(self.name, self.path, split, self.classes)
        return self._rows[split]

    def images(self, split: str) -> Pixels | Encoded:
        """Return the images of a split, in memory or encoded."""
        if split not in self._images:
            self._images[split] = self._opened(split)
        return self._images[split]

    def _opened(self, split: str) -> Pixels | Encoded:
        if self.name == "digits":
            return digits_as_bytes()[SPLITS.index(split)]
        layout = LAYOUTS.get(self.name)
        if layout is not None and layout.size is not None:
            return decoded(self.rows(split), layout.size, self.cache)
        if self.store == "memory":
            return decoded(self.rows(split), self.image_size or _SIZE, self.cache)
        return encoded(self.rows(split), self.cache)

    def fingerprints(self) -> dict[str, Any]:
        """Return a fingerprint of the labels of each split, and the class names where folders give them."""
        fingerprints: dict[str, Any] = {split: self.fingerprint(split) for split in SPLITS}
        if self.name == "folder" and isinstance(rows := self.rows("train"), FolderRows):
            fingerprints["classes"] = rows.names
        return fingerprints

    def fingerprint(self, split: str) -> str:
        """Return the fingerprint of the labels of a split, in their order."""
        labels = np.asarray(self.images(split).labels, dtype=np.int64)
        return hashlib.sha256(labels.tobytes()).hexdigest()[:20]
