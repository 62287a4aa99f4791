"""The cache of one layer for decoding: keys, values, and sums for causal de-escalation."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values of the past tokens, and the sums that causal de-escalation needs.

    Carried scores need nothing here: their state runs from layer to layer within one forward pass.
    The buffers grow as they fill.

    Args:
        capacity: Number of tokens beyond which the buffers do not grow ahead of need.

    Attributes:
        length: Number of tokens in the cache.
        keys: Buffer (B, Hkv, room, D), of which the first ``length`` tokens are filled; None while empty.
        values: Buffer of the same shape.
        sum: Sum of the real past tokens at the layer's de-escalation site, (B, 1, d).
        count: Number of those tokens, (B, 1, 1).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.sum: Tensor | float = 0.0
        self.count: Tensor | float = 0.0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, Hkv, M, D) after those in the cache, and return all keys and values so far."""
        end = self.length + k.shape[2]
        if self.keys is None or self.values is None or end > self.keys.shape[2]:
            room = max(end, min(self.capacity, max(2 * end, 256)))
            self.keys, self.values = self._grown(self.keys, k, room), self._grown(self.values, v, room)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: Tensor | None, like: Tensor, room: int) -> Tensor:
        new = like.new_empty(*like.shape[:2], room, like.shape[3])
        if old is not None:
            new[:, :, : self.length] = old[:, :, : self.length]
        return new
