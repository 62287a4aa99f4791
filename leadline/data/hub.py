"""The Hugging Face hub: its client, kept from talking while we wait for it, and its tables, cut into parquet files."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leadline.errors import LeadlineError, need

_SHARD = re.compile(r"(.+?)-\d+-of-(\d+)(?:-[0-9a-f]+)?\.parquet$")  # train-00000-of-00005.parquet, or more at its end


def check_shards(files: Iterable[Path]) -> None:
    """Raise where files say by their names that there are more of them."""
    found: dict[tuple[Path, str, int], int] = {}
    for file in files:
        if match := _SHARD.match(file.name):
            key = (file.parent, match[1], int(match[2]))
            found[key] = found.get(key, 0) + 1
    for (folder, name, most), count in found.items():
        if count < most:
            raise LeadlineError(f"{folder} has {count} of {most} {name} files by their names; give a whole copy")


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Within it the hub's client says nothing of its retries: what failed is said once, by our own error.

    Who asked the client for more than warnings still gets them.
    """
    try:
        importlib.import_module("huggingface_hub.utils.logging")  # it sets its level when it is first imported
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
    """A parquet file; what is none, or turns out to be damaged while it is read, is an error."""
    arrow, parquet = need("pyarrow", "data"), need("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(file) as found:
            yield found
    except (arrow.ArrowException, OSError) as error:
        why = str(error).partition("\n")[0]
        raise LeadlineError(f"{file} cannot be read as parquet ({why}); it may be damaged or cut short") from error
