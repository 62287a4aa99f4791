"""Batches of tokens: shuffled windows of a text, or lanes that read it in order with a memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from leadline.data.base import mix_seed, part_of_batch
from leadline.errors import LeadlineError

RESIDENT = 1 << 30  # tokens; a shorter text lies on the GPU as a whole


class _TokenBatches(ABC):
    """The common part of both kinds.

    A batch is {"ids": (b, length), "targets": (b, length)}; a target is the token after its id.
    """

    steps_per_epoch: int

    def __init__(
        self, ids: np.ndarray, length: int, size: int, *, accumulate: int, seed: int, device: torch.device
    ) -> None:
        self.ids, self.length, self.size, self.accumulate, self.seed = ids, length, size, accumulate, seed
        self.device = device
        self.offsets = torch.arange(length + 1)
        self.resident: Tensor | None = None
        if device.type == "cuda" and len(ids) < RESIDENT:
            self.resident = torch.from_numpy(ids.astype(np.int32)).to(device)
            self.offsets = self.offsets.to(device)

    @abstractmethod
    def starts(self, step: int) -> np.ndarray:
        """Return the first token of each sample in the global batch of a step, (size,)."""

    def __call__(self, step: int, micro: int = 0, *, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        mine = part_of_batch(self.size, micro, self.accumulate, rank=rank, world=world)
        starts = torch.from_numpy(self.starts(step)[mine])
        if self.resident is not None:
            starts = starts.pin_memory().to(self.device, non_blocking=True)
            tokens = self.resident[starts[:, None] + self.offsets].long()
        else:
            tokens = torch.from_numpy(self.ids[(starts[:, None] + self.offsets).numpy()].astype(np.int64))
            if self.device.type == "cuda":
                tokens = tokens.pin_memory()
            tokens = tokens.to(self.device, non_blocking=True)
        return {"ids": tokens[:, :-1], "targets": tokens[:, 1:]}


class Windows(_TokenBatches):
    """Windows of ``length`` tokens side by side, in another order and with another offset every epoch.

    Order and offset of an epoch come from (seed, epoch) alone, so a run can resume from the number of a
    step.

    Args:
        ids: (n,), the tokens of the text.
        length: Tokens of a window.
        size: Windows of an optimizer step.
        accumulate: Forward passes of a step.
        seed: Seed of the order.
        device: Where the batches lie.
    """

    def __init__(
        self, ids: np.ndarray, length: int, size: int, *, accumulate: int = 1, seed: int = 0, device: torch.device
    ) -> None:
        super().__init__(ids, length, size, accumulate=accumulate, seed=seed, device=device)
        self.windows = (len(ids) - length) // length  # at any offset, with a target for the last token
        self.steps_per_epoch = self.windows // size
        if self.steps_per_epoch < 1:
            raise LeadlineError(
                f"the text has {len(ids)} tokens, too few for one batch of {size} windows of {length}; "
                "give more text, a smaller batch.size or a smaller data.tokens"
            )
        self._epoch: tuple[int, np.ndarray, int] | None = None

    def starts(self, step: int) -> np.ndarray:
        """Return the first token of each window in a step, (size,)."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            draw = np.random.default_rng(mix_seed(self.seed, epoch))
            self._epoch = epoch, draw.permutation(self.windows), int(draw.integers(self.length))
        _, order, offset = self._epoch
        return order[at * self.size : (at + 1) * self.size] * self.length + offset


class Lanes(_TokenBatches):
    """The text in ``size`` stretches, read side by side in order, a segment of ``length`` tokens a step.

    Each sample continues where it stopped, so that a memory of the segment before fits. At the end of an epoch a sample
    continues with the next stretch, which follows its own in the text.

    Args:
        ids: (n,), the tokens of the text.
        length: Tokens of a segment.
        size: Stretches, which are the samples of an optimizer step.
        accumulate: Forward passes of a step.
        seed: Not used: the order is that of the text.
        device: Where the batches lie.
    """

    def __init__(
        self, ids: np.ndarray, length: int, size: int, *, accumulate: int = 1, seed: int = 0, device: torch.device
    ) -> None:
        super().__init__(ids, length, size, accumulate=accumulate, seed=seed, device=device)
        self.steps_per_epoch = (len(ids) - 1) // size // length
        if self.steps_per_epoch < 1:
            raise LeadlineError(
                f"the text has {len(ids)} tokens, too few for {size} lanes of {length}; "
                "give more text, a smaller batch.size or a smaller data.tokens"
            )

    def starts(self, step: int) -> np.ndarray:
        """Return the first token of each segment in a step, (size,)."""
        epoch, at = divmod(step, self.steps_per_epoch)
        lane = (np.arange(self.size) + epoch) % self.size
        return lane * (self.steps_per_epoch * self.length) + at * self.length
