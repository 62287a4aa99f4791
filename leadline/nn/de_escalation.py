"""De-escalation: removes excess similarity from the tokens (TSE 21)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.nn.cache import LayerCache
from leadline.nn.strength import Strength


class DeEscalation(nn.Module):
    """Subtract the fraction tau of the mean of the tokens: Y = (I - tau Pi) X (TSE 21).

    After tau = 1 the mean of the tokens is exactly 0, so nothing that pools by the mean may follow.

    Args:
        tau: Fraction in (0, 1].
        learnable: Make tau a parameter.
        causal: Subtract from token t the mean of the real tokens before it, m_t = mean_{s<t} x_s with m_1 = 0. The
            mean over all tokens would show every token its future; a mean that included t would erase token 1.
    """

    def __init__(self, tau: float = 1.0, learnable: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.tau = Strength("tau", tau, interval="(0, 1]", learnable="layer" if learnable else None)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """De-escalate tokens: x (B, N, d) -> (B, N, d).

        Args:
            x: Tokens (B, N, d).
            mask: Boolean, True = a real token, (B, N); while decoding (B, tokens in the cache + N). Padding does not
                count in the mean.
            cache: Sums over past tokens, for the causal form while decoding. These N tokens are added to them.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if mask is None and not self.causal:
            return x - self.tau() * x.mean(1, keepdim=True, dtype=wide).to(x.dtype)
        real = torch.ones_like(x[..., :1]) if mask is None else mask[:, -x.shape[1] :, None].to(x.dtype)  # (B, N, 1)
        tokens = x.to(wide) if mask is None else x.to(wide).masked_fill(real == 0, 0)
        real = real.to(wide)
        if not self.causal:
            mean = tokens.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
            return x - self.tau() * mean.to(x.dtype)
        past, count = _sum_before(tokens), _sum_before(real)
        if cache is not None:
            past, count = past + cache.sum, count + cache.count
            cache.sum, cache.count = past[:, -1:] + tokens[:, -1:], count[:, -1:] + real[:, -1:]
        return x - self.tau() * (past / count.clamp(min=1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


def _sum_before(x: Tensor) -> Tensor:
    """Sum x (B, N, d) over the tokens before each token -> (B, N, d), with 0 for the first token."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1].cumsum(1)
