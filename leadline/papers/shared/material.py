"""The images and the text that entries use: whether they are available, and a hash of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from leadline.data.images.cifar import load_cifar10
from leadline.data.images.sets import SPLITS, open_rows
from leadline.data.text.files import open_text
from leadline.errors import LeadlineError
from leadline.papers.shared.entry import Entry


@dataclass
class Material:
    """Images and text for the entries of one command.

    Args:
        images: A local copy of CIFAR-10; None for the hub's.
        embedded: Whether scikit-learn's digits replace CIFAR-10.
        text: A file or folder of text to train on.
    """

    images: Path | None = None
    embedded: bool = False
    text: Path | None = None

    def check(self, entries: Sequence[Entry]) -> None:
        """Check the images before anything runs.

        Raises:
            LeadlineError: If a local copy cannot be read, or if every entry needs images and there are none.
        """
        images = any(entry.images for entry in entries) and not self.embedded
        if images and self._no_images and (self.images is not None or all(entry.images for entry in entries)):
            raise self._no_images

    def lacks(self, entry: Entry) -> LeadlineError | None:
        """Return the error for what an entry needs and does not have, or None."""
        if entry.images and not self.embedded and self._no_images:
            return self._no_images
        if entry.text and self.text is None:
            return LeadlineError(
                f"{entry.id} needs text to train on; give a file or folder of it by --text, such as WikiText-103's"
            )
        return None

    def id_of(self, entry: Entry) -> str:
        """Return a hash of the images or the text that an entry uses; empty for the digits, which never change.

        It does not depend on where they are stored. Entries at initialisation use test images only.
        """
        if entry.text:
            return self._text_id
        if not entry.images or self.embedded:
            return ""
        return self._test_id if entry.group == "init" else self._images_id

    @cached_property
    def _no_images(self) -> LeadlineError | None:
        try:
            load_cifar10("test", self.images, 1)
        except LeadlineError as error:
            return error
        return None

    @cached_property
    def _test_id(self) -> str:
        return self._hash("test")

    @cached_property
    def _images_id(self) -> str:
        return self._hash(*SPLITS)

    def _hash(self, *splits: str) -> str:
        digest = hashlib.sha256()
        for split in splits:
            for encoded, label in open_rows("cifar10", self.images, split):
                digest.update(encoded + bytes([label]))
        return digest.hexdigest()[:10]

    @cached_property
    def _text_id(self) -> str:
        assert self.text is not None
        corpus = open_text(self.text)
        return hashlib.sha256("".join(corpus.fingerprint(split) for split in corpus.splits).encode()).hexdigest()[:10]
