"""Text from files, folders and the hub, by split, in blocks: plain, compressed or parquet."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leadline.data.hub import check_shards, opened_parquet, quiet_hub
from leadline.data.text.tokenizers import BETWEEN_LINES
from leadline.errors import LeadlineError, check_choice, need

SPLITS = ("train", "valid", "test")
WIKITEXT = {"wikitext103": "wikitext-103-v1", "wikitext2": "wikitext-2-v1"}  # subsets of the hub's data set
WIKITEXT_HUB = "Salesforce/wikitext"
PLAIN = (".txt", ".tokens", ".text", ".raw", ".md", ".rst")
PACKED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_ALLOWED = f"{', '.join(PLAIN)}, each also with {', '.join(PACKED)}, or .parquet"
BLOCK = 1 << 20  # characters
_WORDS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
_WORDS |= {"dev": "valid", "test": "test"}
_PLACES = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}
_LONGEST = 0.04  # share of the text: if no line is longer, every split has a line
_BLANK = re.compile(r"\s")
_BEFORE_BLANK = re.compile(r"\S(?=\s)")  # a place that no word or byte pair crosses


@dataclass(frozen=True)
class Corpus:
    """Text with its splits.

    Args:
        origin: The file, folder or name on the hub.
        parts: Files of each split.
        by_place: The text names no split: 90 % are for training, the next 5 % for validation, the last 5 % for test.
        rows: Tables of the hub, by split.
        column: The column of the text in tables.
        left_out: Files that name no split, beside others that do.
        unread: Files that look like text in a form that is not known.
    """

    origin: str
    parts: dict[str, list[Path]] = field(default_factory=dict)
    by_place: bool = False  # one text: the first 90 % are for training, 5 % for validation, 5 % for the test
    rows: dict[str, Any] = field(default_factory=dict)  # by split, of the hub
    column: str = "text"
    left_out: tuple[Path, ...] = ()  # files that name no split, beside others that do
    unread: tuple[Path, ...] = ()  # files that look like text, but how to read them is not known

    @property
    def splits(self) -> list[str]:
        """The splits that there are, in the order of ``SPLITS``."""
        return [split for split in SPLITS if split in self.parts or split in self.rows]

    def blocks(self, split: str) -> Iterator[str]:
        """Yield the text of a split in pieces of about a megabyte; a piece ends at the end of a line where it can."""
        self.check(split)
        if split in self.rows:
            return _joined(_line(row[self.column], self.where(split), self.column) for row in self.rows[split])
        if self.by_place:
            return _joined(self._lines_of(split))
        return _joined(_read_all(self.parts[split], self.column))

    def check(self, split: str) -> None:
        """Raise unless the corpus has the split."""
        check_choice("split", split, SPLITS)
        if split in self.splits:
            return
        if self.rows:
            there = ", ".join(self.splits)
            what = "write its parts to a folder as train.txt, valid.txt and test.txt and give that by data.path=FOLDER"
        else:
            there = ", ".join(f"{own} ({_names(self.parts[own])})" for own in self.splits)
            what = f"give a folder with {split}.txt too, or name no file or folder after a split: all is one text then"
        raise LeadlineError(f"{self.origin} has no {split} text, only {there}; {what}")

    def where(self, split: str) -> str:
        """Return a name of the split for messages."""
        files = self.parts.get(split, [])
        return str(files[0]) if len(files) == 1 and not self.by_place else f"the {split} text of {self.origin}"

    @property
    def notice(self) -> str | None:
        """A sentence on files that are not read, or None."""
        reasons = {
            "since others are named after a split and these are not": self.left_out,
            f"since they do not end in {_ALLOWED}": self.unread,
        }
        parts = [
            f"not read, {why}: {_names([file.relative_to(self.origin) for file in files])}"
            for why, files in reasons.items()
            if files
        ]
        return f"{self.origin}: {'; '.join(parts)}" if parts else None

    def fingerprint(self, split: str) -> str:
        """Return a fingerprint that changes when the text of the split does."""
        if split in self.rows:
            return f"{self.rows[split]._fingerprint}-{self.column}"
        digest = hashlib.sha256(f"{f'{split}, cut' if self.by_place else ''}-{self.column}".encode())
        for file in self.parts[split]:
            digest.update(_suffix(file).encode())
            try:
                with file.open("rb") as stream:
                    while chunk := stream.read(1 << 22):
                        digest.update(chunk)
            except OSError as error:
                raise _unreadable(file, error) from error
        return digest.hexdigest()

    def _lines_of(self, split: str) -> Iterator[str]:
        """Yield the lines that begin in the share of a split; where a line is very long, exactly that share."""
        total = longest = 0
        for line in self._lines():
            total, longest = total + len(line), max(longest, len(line))
        first, last = (share * total for share in _PLACES[split])
        within = longest > _LONGEST * total
        at = 0
        for line in self._lines():
            if within:
                yield line[_word_end(line, int(first) - at) : _word_end(line, int(last) - at)]
            elif first <= at < last:
                yield line
            at += len(line)

    def _lines(self) -> Iterator[str]:
        """Yield all lines of a text without splits; those longer than a block in pieces."""
        for block in _joined(_read_all(self.parts["train"], self.column)):
            yield from block.splitlines(keepends=True)


def open_text(
    path: str | os.PathLike[str] | None = None,
    *,
    hub: str | None = None,
    subset: str | None = None,
    column: str = "text",
) -> Corpus:
    """Return a corpus from a file or folder, or from the hub by ``datasets``.

    A file or folder name with a split in it (train.txt.xz, wiki.valid.tokens, train-00000-of-00001.parquet) assigns the
    file to that split, and files without one are not read. Where no name has one, all files are one text, whose last
    tenth is for validation and test. Hidden files and folders are skipped.

    Args:
        path: A file, or a folder with files at any depth: .txt, .tokens, .md, .rst, .text, .raw, each also as .xz, .gz
            or .bz2, or .parquet.
        hub: The name of a data set on the hub.
        subset: Its configuration there.
        column: The column of the text in parquet and on the hub. A row is a line, or several; the end of the last line
            is added where it is missing.

    Raises:
        LeadlineError: Nothing readable is there, or files contradict each other.
    """
    if (path is None) == (hub is None):
        raise LeadlineError("give either the path of a file or folder of text, or the name of a data set on the hub")
    if hub is not None:
        return _from_hub(hub, subset, column)
    root = Path(path or "")
    if not root.exists():
        raise LeadlineError(f"{root} does not exist; give a file or a folder of text")
    there = [root] if root.is_file() else sorted(file for file in root.rglob("*") if _in_sight(file, root))
    files = [file for file in there if _suffix(file)]
    if not files:
        raise LeadlineError(f"{root} holds no text; files must end in {_ALLOWED}")
    unread = tuple(file for file in there if not _suffix(file) and any(s.lower() in PLAIN for s in file.suffixes))
    if column != "text" and not any(_suffix(file) == ".parquet" for file in files):
        raise LeadlineError(f"data.column is {column!r} and {root} holds no parquet, which has columns; leave it out")
    check_shards(files)
    _refuse_twice(files)
    named = [_split_of(file.relative_to(root) if root.is_dir() else Path(file.name)) for file in files]
    if any(named):
        parts: dict[str | None, list[Path]] = {}
        for file, own in zip(files, named, strict=True):
            parts.setdefault(own, []).append(file)
        left_out = tuple(parts.pop(None, ()))
        splits = {str(own): of_split for own, of_split in parts.items()}
        return Corpus(str(root), splits, column=column, left_out=left_out, unread=unread)
    return Corpus(str(root), dict.fromkeys(SPLITS, files), by_place=True, column=column, unread=unread)


def count_words(text: str) -> int:
    """Count words as WikiText does: what blanks separate, and the end of every line."""
    return len(text.split()) + text.count("\n")


def _in_sight(file: Path, root: Path) -> bool:
    """Tell whether it is a file and neither it nor a folder on the way to it is hidden."""
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)


def _refuse_twice(files: Iterable[Path]) -> None:
    seen: dict[Path, Path] = {}
    for file in files:
        plain = file.with_suffix("") if file.suffix.lower() in PACKED else file
        if (other := seen.setdefault(plain, file)) != file:
            raise LeadlineError(f"{other} and {file.name} are one text twice by their names; remove one of them")


def _split_of(file: Path) -> str | None:
    """Return the split that a name gives by its first, second or last part without numbers, or by a folder."""
    stem = file.name.lower().removesuffix(_suffix(file))
    parts = [part for part in re.split(r"[._-]", stem) if part != "of" and not part.isdigit()]
    for name in (*parts[:2], *parts[-1:], *(folder.name.lower() for folder in file.parents)):
        if name in _WORDS:
            return _WORDS[name]
    return None


def _suffix(file: Path) -> str:
    """Return the part of the name that says how to read the file, such as ".txt.xz"; "" for other files."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes[-1:] == [".parquet"] or (suffixes and suffixes[-1] in PLAIN):
        return suffixes[-1]
    return "".join(suffixes) if len(suffixes) == 2 and suffixes[1] in PACKED and suffixes[0] in PLAIN else ""


def _read_all(files: Iterable[Path], column: str) -> Iterator[str]:
    """Yield the text of one file after the other; each begins a line."""
    last = "\n"
    for file in files:
        if last != "\n":
            yield "\n"
            last = "\n"
        for chunk in _read(file, column):
            yield chunk
            last = chunk[-1:] or last


def _read(file: Path, column: str) -> Iterator[str]:
    if _suffix(file) == ".parquet":
        yield from _read_parquet(file, column)
        return
    opened = PACKED.get(file.suffix.lower(), open)
    try:
        with opened(file, "rt", encoding="utf-8-sig", newline="") as stream:
            while chunk := stream.read(BLOCK):
                yield chunk
    except UnicodeDecodeError as error:
        raise LeadlineError(f"{file} is not UTF-8 ({error.reason}); convert it, or leave it out") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> LeadlineError:
    if isinstance(error, PermissionError):
        return LeadlineError(f"{file} cannot be read ({error.strerror}); give it read permission, or leave it out")
    return LeadlineError(f"{file} cannot be read ({error}); it may be damaged or cut short")


def _read_parquet(file: Path, column: str) -> Iterator[str]:
    with opened_parquet(file) as source:
        if column not in source.schema_arrow.names:
            names = ", ".join(source.schema_arrow.names)
            raise LeadlineError(
                f"{file} has the columns {names}; name the one with the text by data.column=NAME in a recipe, for "
                "leadline evaluate by --recipe"
            )
        for batch in source.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield _line(text, str(file), column)


def _line(text: Any, where: str, column: str) -> str:
    """Return a row of a table with the end of its line."""
    if not isinstance(text, str | None):
        raise LeadlineError(
            f"{where}: column {column!r} holds {type(text).__name__} and no text; name the one that does by "
            "data.column=NAME"
        )
    text = text or ""
    return text if text.endswith("\n") else f"{text}\n"


def _names(files: Sequence[Path], most: int = 3) -> str:
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return ", ".join(str(file) for file in files[:most]) + more


def _joined(chunks: Iterable[str]) -> Iterator[str]:
    """Join chunks into blocks of about ``BLOCK`` characters that end at the end of a line.

    A cut between two lines without blanks around it is preferred: byte-pair encodings then give the same tokens as for
    the whole text. A longer line is cut between words.
    """
    pending: list[str] = []
    size = 0
    for chunk in chunks:
        pending.append(chunk)
        size += len(chunk)
        if size >= BLOCK:
            text = "".join(pending)
            at = _last(BETWEEN_LINES, text, size // 2) or text.rfind("\n") + 1
            at = at or _last(_BEFORE_BLANK, text, size - 1024) or size
            yield text[:at]
            pending, size = [text[at:]], len(text) - at
    if size:
        yield "".join(pending)


def _word_end(line: str, at: int) -> int:
    """Return the first place from ``at`` on that is not inside a word, or ``at`` where there is none."""
    if at <= 0 or at >= len(line):
        return max(at, 0)
    blank = _BLANK.search(line, at)
    return at if blank is None else blank.start()


def _last(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return the end of the last match from ``start`` on, or 0."""
    return max((match.end() for match in pattern.finditer(text, start)), default=0)


def _from_hub(name: str, subset: str | None, column: str) -> Corpus:
    datasets = need("datasets", "data")
    try:
        with quiet_hub():
            tables = datasets.load_dataset(name, subset)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise LeadlineError(
            f"{name!r} ({subset or 'default'}) is not on this machine and could not be downloaded "
            f"({type(error).__name__}); give a local copy by data.path=FOLDER"
        ) from error
    rows = {_WORDS[split]: table for split, table in tables.items() if split in _WORDS}
    if not rows:
        raise LeadlineError(
            f"{name} has the splits {', '.join(tables)}; train, validation and test are needed, give them by "
            "data.path=FOLDER"
        )
    for split, table in rows.items():
        if column not in table.column_names:
            names = ", ".join(table.column_names)
            raise LeadlineError(f"{name}, {split}, has the columns {names}; name the text's by data.column=NAME")
    return Corpus(name, rows=rows, column=column)
