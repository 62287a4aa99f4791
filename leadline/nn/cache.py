"""What one layer remembers of the tokens it has seen while decoding."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values of the past tokens, and the sums that causal de-escalation needs.

    Carried scores need nothing here: their state runs from layer to layer within one forward pass.
    The buffers are allocated once, for ``capacity`` tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.sum: Tensor | float = 0.0  # (B, 1, d), of the real past tokens at the layer's de-escalation site
        self.count: Tensor | float = 0.0  # (B, 1, 1)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, Hkv, M, D) behind what is there; returns all keys and values so far."""
        if self.keys is None or self.values is None:
            self.keys = k.new_empty(*k.shape[:2], self.capacity, k.shape[3])
            self.values = v.new_empty(*v.shape[:2], self.capacity, v.shape[3])
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]
