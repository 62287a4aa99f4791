"""How far a probe has come, told block by block."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]  # what is done, blocks passed, of how many if that is known


class Count:
    """Counts blocks as they are passed. A total that proves too small (layers that share a block) is not known."""

    def __init__(self, progress: Progress | None, what: str, total: int | None) -> None:
        self.progress, self.what, self.total = progress, what, total
        self.done = 0

    def __call__(self) -> None:
        self.done += 1
        if self.total is not None and self.done > self.total:
            self.total = None
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)
