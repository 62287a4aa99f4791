"""The images and the text that entries work on: whether they are there, and which ones they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from leadline.data.images.cifar import load_cifar10
from leadline.data.images.sets import SPLITS, open_rows
from leadline.data.text.files import open_text
from leadline.errors import LeadlineError
from leadline.papers.shared.entry import Entry


class Material:
    """What a command was given.

    images    a local copy of CIFAR-10; None: the hub's.
    embedded  scikit-learn's digits in place of it.
    text      a file or folder.
    """

    def __init__(
        self,
        images: str | os.PathLike[str] | None = None,
        embedded: bool = False,
        text: str | os.PathLike[str] | None = None,
    ) -> None:
        self.images = None if images is None else Path(images)
        self.embedded = embedded
        self.text = None if text is None else Path(text)

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise, before an hour has passed, where what was given is bad, or all entries need what is not there."""
        images = any(entry.images for entry in entries) and not self.embedded
        if images and self._no_images and (self.images is not None or all(entry.images for entry in entries)):
            raise self._no_images

    def lacks(self, entry: Entry) -> LeadlineError | None:
        """Why an entry cannot run."""
        if entry.images and not self.embedded and self._no_images:
            return self._no_images
        if entry.text and self.text is None:
            return LeadlineError(
                f"{entry.id} needs text to train on; give a file or folder of it by --text, such as WikiText-103's"
            )
        return None

    def id_of(self, entry: Entry) -> str:
        """Changes with the images or the text, but not with where they lie: results on these are not those on others.

        Entries at initialisation take test images alone. Digits are always the same.
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
