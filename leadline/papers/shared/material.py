"""The images and the text that entries use: whether they are available, and a hash of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        images: A local copy of CIFAR-10 or CIFAR-100, or a folder with both by their names; None for those of the hub.
        embedded: Whether scikit-learn's digits replace CIFAR-10.
        text: A file or folder of text to train on.
    """

    images: Path | None = None
    embedded: bool = False
    text: Path | None = None
    _errors: dict[str, LeadlineError | None] = field(default_factory=dict, init=False)
    _hashes: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict, init=False)

    def folder_of(self, image_set: str) -> Path | None:
        """Return the local copy of a set: a folder of its name in ``images``, else ``images`` itself."""
        if self.images is None or not (self.images / image_set).is_dir():
            return self.images
        return self.images / image_set

    def check(self, entries: Sequence[Entry]) -> None:
        """Check the images before anything runs.

        Raises:
            LeadlineError: If a local copy cannot be read, or if every entry needs images and there are none.
        """
        if self.embedded:
            return
        sets = {entry.image_set for entry in entries if entry.images}
        errors = [error for image_set in sorted(sets) if (error := self._missing(image_set))]
        local = self.images is not None and len(errors) == len(sets)
        if errors and (local or (len(errors) == len(sets) and all(entry.images for entry in entries))):
            raise errors[0]

    def lacks(self, entry: Entry) -> LeadlineError | None:
        """Return the error for what an entry needs and does not have, or None."""
        if entry.images and not self.embedded:
            return self._missing(entry.image_set)
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
        return self._hash(entry.image_set, ("test",) if entry.group == "init" else SPLITS)

    def _missing(self, image_set: str) -> LeadlineError | None:
        """Return the error for a set that cannot be read, or None."""
        if image_set not in self._errors:
            self._errors[image_set] = None
            try:
                if image_set == "cifar10":
                    load_cifar10("test", self.folder_of(image_set), 1)
                else:
                    next(iter(open_rows(image_set, self.folder_of(image_set), "test")))
            except LeadlineError as error:
                self._errors[image_set] = error
        return self._errors[image_set]

    def _hash(self, image_set: str, splits: tuple[str, ...]) -> str:
        key = image_set, splits
        if key not in self._hashes:
            digest = hashlib.sha256()
            for split in splits:
                for encoded, label in open_rows(image_set, self.folder_of(image_set), split):
                    digest.update(encoded + bytes([label]))
            self._hashes[key] = digest.hexdigest()[:10]
        return self._hashes[key]

    @cached_property
    def _text_id(self) -> str:
        assert self.text is not None
        corpus = open_text(self.text)
        return hashlib.sha256("".join(corpus.fingerprint(split) for split in corpus.splits).encode()).hexdigest()[:10]
