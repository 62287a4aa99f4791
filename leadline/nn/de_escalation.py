"""De-escalation: take the excess similarity out of the tokens (TSE 21)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.nn.cache import LayerCache
from leadline.nn.strength import Strength


class DeEscalation(nn.Module):
    """Y = (I - tau Pi) X (21): subtract the fraction tau in (0, 1] of the token mean.

    ``causal`` subtracts from token t the mean of the real tokens before it, m_t = mean_{s<t} x_s, m_1 = 0:
    the mean over all tokens would tell every token about its future, and a mean that included t itself
    would erase token 1. ``mask`` (B, N), True = a real token, keeps padding out of the mean.

    After tau = 1 the mean of the tokens is exactly 0, so nothing that pools by the mean may follow.
    """

    def __init__(self, tau: float = 1.0, learnable: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.tau = Strength("tau", tau, interval="(0, 1]", learnable="layer" if learnable else None)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """x (B, N, d) -> (B, N, d). While decoding, ``mask`` covers the cached tokens too."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if mask is None and not self.causal:
            return x - self.tau() * x.mean(1, keepdim=True, dtype=wide).to(x.dtype)
        real = torch.ones_like(x[..., :1]) if mask is None else mask[:, -x.shape[1] :, None].to(x.dtype)  # (B, N, 1)
        kept = x.to(wide) if mask is None else x.to(wide).masked_fill(real == 0, 0)
        real = real.to(wide)
        if not self.causal:
            mean = kept.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
            return x - self.tau() * mean.to(x.dtype)
        past, count = _sum_before(kept), _sum_before(real)
        if cache is not None:
            past, count = past + cache.sum, count + cache.count
            cache.sum, cache.count = past[:, -1:] + kept[:, -1:], count[:, -1:] + real[:, -1:]
        return x - self.tau() * (past / count.clamp(min=1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


def _sum_before(x: Tensor) -> Tensor:
    """Sums over the tokens before each token, x (B, N, d): (B, N, d), 0 for the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1].cumsum(1)
