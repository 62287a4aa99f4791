"""The largest attention score of each head, from the queries and keys or the softmax of a running model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax)
_CHUNK = 1 << 24  # scores in memory at a time


class LargestScores(TorchFunctionMode):
    """A mode in which the first attention of every block call is read: its largest score per head.

    Scores are those before the softmax, with scale and bias, among the keys that a real query may see.

    Args:
        blocks: The blocks; each call of one of them is a layer.
        mask: (B, n), True = a real token.
    """

    def __init__(self, blocks: Sequence[nn.Module], mask: Tensor | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.blocks = list(dict.fromkeys(blocks))
        self.by_layer: list[Tensor | None] = []  # (H,), mean over samples
        self.open = False  # whether the attention of the running block is still to come

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Read the attention of the model that runs inside."""
        handles = [block.register_forward_pre_hook(self._begin) for block in self.blocks]
        handles += [block.register_forward_hook(self._end) for block in self.blocks]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.by_layer.append(None)
        self.open = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.open = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.open and func is F.scaled_dot_product_attention:
            self._note(_from_sdpa(self._real, *args, **kwargs))
        elif self.open and func in _SOFTMAX and isinstance(args[0], Tensor) and args[0].ndim == 4:
            scores, real = args[0].detach(), self._real(args[0])
            scores = scores if real is None else scores.masked_fill(~real[:, None, :, None], -torch.inf)
            self._note(scores.amax((-2, -1)))
        return func(*args, **kwargs)

    def _real(self, queries: Tensor) -> Tensor | None:
        """Return the mask if it is about the queries (B, H, m, any)."""
        return self.mask if self.mask is not None and self.mask.shape == (queries.shape[0], queries.shape[2]) else None

    def _note(self, largest: Tensor | None) -> None:
        """Take the largest scores (B, H) of the attention that runs."""
        if largest is not None:
            self.by_layer[-1] = largest.double().mean(0).cpu()
            self.open = False


def _from_sdpa(
    real_of: Callable[[Tensor], Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the largest score (B, H) of an attention of query (B, H, m, D) to key (B, Hkv, n, D)."""
    if query.ndim != 4 or query.shape[1] % key.shape[1]:
        return None
    q, k = query.detach(), key.detach()
    (B, H, m, width), n = q.shape, k.shape[-2]
    group = H // k.shape[1]
    mask = None if attn_mask is None else attn_mask.detach().expand(B, H, m, n)
    future = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(1) if is_causal else None
    real = real_of(q)
    out = q.new_full((B, H), -torch.inf, dtype=torch.float32)
    rows = max(1, _CHUNK // (m * n))
    scale = width**-0.5 if scale is None else scale
    for sample in range(B):
        for low in range(0, H, rows):
            heads = slice(low, min(low + rows, H))
            keys = k[sample].repeat_interleave(group, 0)[heads].float()
            scores = (q[sample, heads].float() * scale) @ keys.mT
            if mask is not None:
                part = mask[sample, heads]
                scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
            if future is not None:
                scores = scores.masked_fill(future, -torch.inf)
            if real is not None:
                scores = scores.masked_fill(~real[sample][:, None], -torch.inf)
            out[sample, heads] = scores.amax((-2, -1))
    return out


def largest_scores(
    blocks: Sequence[nn.Module], forward: Callable[[], Any], mask: Tensor | None = None
) -> list[list[float] | None]:
    """Return the largest score of each head by layer, mean over samples; None where no attention was recognised.

    Args:
        blocks: The blocks, each call of which is a layer.
        forward: Runs the model on the batch.
        mask: (B, n), True = a real token.
    """
    mode = LargestScores(blocks, mask)
    with torch.no_grad(), mode.attached():
        forward()
    return [None if scores is None else scores.tolist() for scores in mode.by_layer]
