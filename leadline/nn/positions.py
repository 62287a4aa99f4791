"""Position encodings: learned or sinusoidal vectors to add, rotary angles, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from leadline.errors import check_choice
from leadline.ops import rotary_frequencies, rotary_table, sinusoid

KINDS = ("learned", "sinusoidal", "rotary", "none")


class Positions(nn.Module):
    """Position encoding of a model.

    Args:
        kind: "learned", "sinusoidal", "rotary" or "none".
        max_tokens: Size of the table of learned positions; the other kinds have no limit.
        dim: Width of the tokens.
        head_dim: Width of a head, for rotary positions.
        rope: Settings of rotary positions; see ``ops.rotary_frequencies``.
    """

    def __init__(
        self, kind: str, max_tokens: int, dim: int, head_dim: int, rope: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        check_choice("positions", kind, KINDS)
        self.kind, self.head_dim, self.rope = kind, head_dim, dict(rope or {})
        if kind == "rotary":
            rotary_frequencies(head_dim, self.rope)  # bad settings fail here, not in the first forward pass
        self.limit = max_tokens if kind == "learned" else None  # the other kinds have no limit
        self.table = nn.Embedding(max_tokens, dim) if kind == "learned" else None

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Encode tokens x (B, N, d) at the positions ``at``, (N,) or (B, N).

        Returns:
            The tokens, with vectors added where the kind has them, and the rotary table or None.
        """
        if self.table is not None:
            return x + self.table(at), None
        if self.kind == "sinusoidal":
            return x + sinusoid(at, x.shape[-1]).to(x.dtype), None
        return x, rotary_table(at, self.head_dim, self.rope) if self.kind == "rotary" else None

    def extra_repr(self) -> str:
        return self.kind
