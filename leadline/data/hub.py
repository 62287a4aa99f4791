"""The Hugging Face hub: its client kept quiet, and its parquet files opened and counted."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leadline.errors import LeadlineError, Stopped, need

_SHARD = re.compile(r"(.+?)-\d+-of-(\d+)(?:-[0-9a-f]+)?\.parquet$")  # such as train-00000-of-00005.parquet


def check_shards(files: Iterable[Path]) -> None:
    """Raise where the name of a file says that there are more shards than are present.

    Args:
        files: Parquet files, such as train-00000-of-00005.parquet.
    """
    counts: dict[tuple[Path, str, int], int] = {}
    for file in files:
        if match := _SHARD.match(file.name):
            key = (file.parent, match[1], int(match[2]))
            counts[key] = counts.get(key, 0) + 1
    for (folder, name, most), count in counts.items():
        if count < most:
            raise LeadlineError(f"{folder} has {count} of {most} {name} files by their names; give a whole copy")


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the retry messages of the hub's client, since Leadline reports a failure itself.

    A user who set the client to log more than warnings still gets its messages.
    """
    try:
        importlib.import_module("huggingface_hub.utils.logging")  # its first import sets the level
    except ImportError:
        yield
        return
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    if logger.getEffectiveLevel() >= logging.WARNING:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def opened_parquet(file: Path) -> Iterator[Any]:
    """Open a parquet file; a damaged file is a LeadlineError, also when the damage shows while it is read.

    Args:
        file: The parquet file.
    """
    arrow, parquet = need("pyarrow", "data"), need("pyarrow.parquet", "data")
    if file.exists() and not file.is_file():
        raise LeadlineError(f"{file} cannot be read as parquet: it is no regular file; remove it")
    try:
        with parquet.ParquetFile(file) as table:
            yield table
    except (LeadlineError, Stopped):
        raise
    except (arrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:  # damage has many kinds of errors
        why = str(error).partition("\n")[0]
        raise LeadlineError(f"{file} cannot be read as parquet ({why}); it may be damaged or cut short") from error
