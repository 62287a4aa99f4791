"""Small parts of a block: norms, the MLP and drop path."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's
    "swiglu": F.silu,  # with a gate
}


def make_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """Make a LayerNorm ("layer") or an RMSNorm ("rms") over the last ``dim`` channels."""
    check_choice("norm_kind", kind, ("layer", "rms"))
    return nn.LayerNorm(dim, eps=eps) if kind == "layer" else nn.RMSNorm(dim, eps=eps)


class MLP(nn.Module):
    """Two linear maps with an activation between: phi(x W_1) W_2, or (silu(x W_g) * (x W_1)) W_2 with SwiGLU.

    Args:
        dim: Width of the tokens.
        hidden: Width between the two maps.
        kind: Activation, one of ``ACTIVATIONS``.
        bias: Whether the maps have a bias.
        dropout: Probability of dropping a hidden channel, before W_2.
    """

    def __init__(self, dim: int, hidden: int, kind: str = "gelu", bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        check_choice("mlp", kind, ACTIVATIONS)
        self.kind = kind
        self.gate = nn.Linear(dim, hidden, bias=bias) if kind == "swiglu" else None
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: x (..., dim) -> (..., dim)."""
        act = ACTIVATIONS[self.kind]
        hidden = act(self.fc1(x)) if self.gate is None else act(self.gate(x)) * self.fc1(x)
        return self.fc2(self.dropout(hidden))


class DropPath(nn.Module):
    """Stochastic depth: in training, drop a branch for whole samples and scale up the rest.

    Args:
        rate: Probability of dropping a sample, in [0, 1).
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise LeadlineError(f"drop_path is {rate}; it must lie in [0, 1)")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Drop samples of the branch's output x (B, ...) -> (B, ...)."""
        if not self.training or self.rate == 0:
            return x
        keep = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) >= self.rate
        return x * (keep.to(x.dtype) / (1 - self.rate))
