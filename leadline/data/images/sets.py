"""The known sets of images: their files, their columns, and their rows."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from leadline.data.hub import check_shards, opened_parquet, quiet_hub
from leadline.errors import LeadlineError, Stopped, check_choice, need

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPLITS = ("train", "test")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}


@dataclass(frozen=True)
class Layout:
    """A set in the parquet layout of the hub."""

    title: str
    hub: str  # name on the hub
    image: str  # column of the encoded images
    label: str
    classes: int
    size: int | None  # pixels a side; None: every image has its own
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})


LAYOUTS = {
    "cifar10": Layout(
        "CIFAR-10", "uoft-cs/cifar10", "img", "label", 10, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
    "cifar100": Layout(
        "CIFAR-100",
        "uoft-cs/cifar100",
        "img",
        "fine_label",
        100,
        32,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "imagenet": Layout(
        "ImageNet-1k",
        "ILSVRC/imagenet-1k",
        "image",
        "label",
        1000,
        None,
        IMAGENET_MEAN,
        IMAGENET_STD,
        {"train": "train", "test": "validation"},  # the labels of its own test split are not public
    ),
}


class Row(NamedTuple):
    """An encoded image and its label."""

    encoded: bytes
    label: int


class Rows(Protocol):
    """A split as encoded images, read from the first to the last."""

    classes: int

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...
    def where(self, index: int) -> str:
        """Return the file and the row of an image, for a message."""
        ...

    def key(self) -> list[Any]:
        """Return what the content depends on: names, sizes and times of the files."""
        ...


def open_rows(name: str, path: str | Path | None, split: str, classes: Sequence[str] | None = None) -> Rows:
    """Return the rows of a split of CIFAR-10, CIFAR-100, ImageNet-1k or a folder of class folders.

    Args:
        name: "cifar10", "cifar100", "imagenet" or "folder".
        path: A local copy; None: ``datasets`` downloads the set or finds it in its cache.
        split: "train" or "test".
        classes: Of a folder, the class names in the order of their labels; None: those of its training images.

    Raises:
        LeadlineError: The set is absent, incomplete or damaged.
    """
    check_choice("set of images", name, [*LAYOUTS, "folder"])
    check_choice("split", split, SPLITS)
    if name == "folder":
        if path is None:
            raise LeadlineError("data.name is 'folder' and data.path is not given; give the folder with train and test")
        return FolderRows(Path(path), split, classes)
    layout = LAYOUTS[name]
    rows: Rows = HubRows(layout, split) if path is None else ParquetRows(layout, Path(path), split)
    if not len(rows):
        raise LeadlineError(
            f"the {layout.splits[split]} split of {layout.title} in {path or layout.hub} has no rows; give a whole copy"
        )
    return rows


def parquet_files(folder: Path, split: str, hub: str) -> list[Path]:
    """Return the shards of a split, in ``folder`` or one folder further down."""
    places = {
        at: [file for file in _content(at) if fnmatch(file.name, f"{split}-*.parquet")]
        for at in (folder, *_folders(folder))
    }
    shards = {at: files for at, files in places.items() if files}
    if not folder.exists():
        raise LeadlineError(f"{folder} does not exist; give the folder of a copy of {hub!r}")
    if not shards:
        raise LeadlineError(f"no {split}-*.parquet in {folder} or a folder in it; give the folder of a copy of {hub!r}")
    if len(shards) > 1:
        raise LeadlineError(f"{split}-*.parquet is in {' and in '.join(map(str, shards))}; give one of these folders")
    (files,) = shards.values()
    check_shards(files)
    return files


def parquet_batches(file: Path, columns: list[str] | None = None, rows: int = 1024) -> Iterator[Any]:
    """Yield the record batches of a parquet file; another kind of file or a missing column is an error."""
    with opened_parquet(file) as table:
        has = table.schema_arrow.names
        if columns is not None and not set(columns) <= set(has):
            raise LeadlineError(f"{file} has the columns {', '.join(has)}; it must have {' and '.join(columns)}")
        yield from table.iter_batches(batch_size=rows, columns=columns)


class ParquetRows:
    """A split in the parquet layout of the hub, in any number of shards."""

    def __init__(self, layout: Layout, folder: Path, split: str) -> None:
        self.layout, self.classes = layout, layout.classes
        self.files = parquet_files(folder, layout.splits[split], layout.hub)
        self.counts: list[int] = []
        for file in self.files:
            with opened_parquet(file) as table:
                self.counts.append(table.metadata.num_rows)

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[Row]:
        first = 0
        for file in self.files:
            for batch in parquet_batches(file, [self.layout.image, self.layout.label], rows=256):
                yield from image_rows(batch, self.layout, self.where, first)
                first += batch.num_rows

    def where(self, index: int) -> str:
        for file, count in zip(self.files, self.counts, strict=True):
            if index < count:
                return f"row {index} of {file}"
            index -= count
        raise IndexError(index)

    def key(self) -> list[Any]:
        return [self.layout.title, *_stamps(self.files)]


class HubRows:
    """A split that ``datasets`` downloads; its images stay encoded."""

    def __init__(self, layout: Layout, split: str) -> None:
        self.layout, self.classes = layout, layout.classes
        datasets = need("datasets", "data")
        try:
            with quiet_hub():
                self.table = datasets.load_dataset(layout.hub, split=layout.splits[split]).with_format("arrow")
        except (OSError, datasets.exceptions.DatasetsError) as error:
            raise LeadlineError(
                f"{layout.title} is not on this machine and {layout.hub!r} could not be downloaded "
                f"({type(error).__name__}); give a local copy by data.path=FOLDER, or data.name=digits"
            ) from error

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Row]:
        first = 0
        for table in self.table.iter(batch_size=256):
            yield from image_rows(table, self.layout, self.where, first)
            first += table.num_rows

    def where(self, index: int) -> str:
        return f"row {index} of {self.layout.hub}"

    def key(self) -> list[Any]:
        return [self.layout.title, self.table._fingerprint]


class FolderRows:
    """A folder ``train`` and a folder ``test`` (or ``val``, ``validation``), each with a folder of images per class."""

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None = None) -> None:
        if not folder.is_dir():
            raise LeadlineError(f"{folder} is no folder; give one with train and test, in each a folder per class")
        names = ("train",) if split == "train" else ("test", "val", "validation")
        root = next((folder / name for name in names if (folder / name).is_dir()), None)
        if root is None:
            raise LeadlineError(
                f"{folder} has no folder {' or '.join(names)}; it must hold train and test, in each a folder per class"
            )
        self.names = [at.name for at in _folders(folder / "train")] if classes is None else list(classes)
        self.classes = len(self.names)
        if self.classes == 1 and classes is None:
            raise LeadlineError(f"{folder / 'train'} has one class, {self.names[0]}; it must hold a folder per class")
        self.files: list[tuple[Path, int]] = []
        for at in _folders(root):
            if at.name not in self.names:
                known = f"of {folder / 'train'}" if classes is None else f"that was trained ({_some(self.names)})"
                raise LeadlineError(f"{at} is no class {known}; the class folders must agree")
            self.files += [(file, self.names.index(at.name)) for file in _images_in(at)]
        empty = sorted({*self.names} - {self.names[label] for _, label in self.files}) if split == "train" else []
        if self.files and empty and classes is None:
            raise LeadlineError(f"{root / empty[0]} has no images; put some there, or remove the folder")
        if not self.files:
            raise LeadlineError(f"{root} has no images in class folders ({', '.join(sorted(_SUFFIXES))})")

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Row]:
        for file, label in self.files:
            yield Row(read_file(file), label)

    def where(self, index: int) -> str:
        return str(self.files[index][0])

    def key(self) -> list[Any]:
        labels = [label for _, label in self.files]  # links may be moved from class to class, their files stay
        return ["folder", self.names, labels, *_stamps([file for file, _ in self.files])]


def decode(encoded: bytes, where: str) -> Any:
    """Decode an image with PIL into RGB; the error for a damaged one names it by ``where``."""
    image = need("PIL.Image", "data")
    try:
        opened = image.open(io.BytesIO(encoded))
        if opened.mode.startswith("I;16"):  # PIL would cut off what is above 255
            opened = image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
        elif opened.mode in ("I", "F"):
            raise ValueError(f"its numbers are {'floats' if opened.mode == 'F' else '32 bits'}, save it with 8 or 16")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PIL warns of transparency in a palette
            return opened.convert("RGB")
    except Stopped:  # by a signal
        raise
    except Exception as error:  # a damaged file may raise anything in PIL
        why = re.sub(r" <[^>]*>", "", str(error).partition("\n")[0])  # PIL names the bytes by their address
        raise LeadlineError(
            f"{where} is no image that can be decoded ({type(error).__name__}: {why:.80}); "
            "replace it by another of its class, or remove it before a run begins"
        ) from error


def read_file(file: Path) -> bytes:
    """Return the bytes of a file; one that cannot be read is a LeadlineError."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error


def image_rows(table: Any, layout: Layout, where: Callable[[int], str], first: int = 0) -> Iterator[Row]:
    """Yield the rows of a part of a split.

    Args:
        table: An arrow table or record batch.
        layout: Names of its columns.
        where: Names a row of the split.
        first: Number of the part's first row in the split.
    """
    images, types = table.column(layout.image), need("pyarrow", "data").types
    parts = {part.name: part.type for part in images.type} if types.is_struct(images.type) else {}
    if "bytes" not in parts or not (types.is_binary(parts["bytes"]) or types.is_large_binary(parts["bytes"])):
        raise LeadlineError(
            f"{where(first)} has no encoded image: {layout.image} is {images.type}; it must be a struct with binary "
            f"bytes, as in {layout.hub!r}"
        )
    encoded = need("pyarrow.compute", "data").struct_field(images, "bytes").to_pylist()
    for i, (image, label) in enumerate(zip(encoded, table.column(layout.label).to_pylist(), strict=True), start=first):
        if type(label) is not int or not 0 <= label < layout.classes:
            raise bad_label(label, layout.classes, where(i))
        yield Row(image or b"", label)


def bad_label(label: object, classes: int, where: str) -> LeadlineError:
    """Return the error for a label outside 0 to classes - 1."""
    return LeadlineError(
        f"{where} has the label {label!r}; it must be a whole number from 0 to {classes - 1}, correct or remove it"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _content(folder: Path) -> list[Path]:
    """Return the sorted content of a folder; nothing where there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(error) from error


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden."""
    return [at for at in _content(folder) if at.name[0] != "." and at.is_dir()]


def _images_in(folder: Path) -> list[Path]:
    """Return image files at any depth. Links are followed, hidden names skipped, no folder is read twice."""

    def fail(error: OSError) -> None:
        raise _unreadable(error) from error

    images: list[Path] = []
    seen: set[str] = set()
    for at, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(at)
        folders[:] = [] if real in seen else [name for name in folders if name[0] != "."]
        if real not in seen:
            images += [Path(at, name) for name in files if name[0] != "." and Path(name).suffix.lower() in _SUFFIXES]
        seen.add(real)
    return sorted(file for file in images if file.is_file())


def _unreadable(error: OSError) -> LeadlineError:
    return LeadlineError(f"{error.filename} cannot be read ({error.strerror})")


def _stamps(files: list[Path]) -> list[Any]:
    return [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
