"""The Hugging Face hub's client, kept from talking while we wait for it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
