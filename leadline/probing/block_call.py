"""One call of a block: its inner tensors as hooks see them, and its rates and gain."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leadline.anatomy.blocks import Parts
from leadline.metrics import token_diversity
from leadline.metrics._tokens import split
from leadline.probing.attention_capture import CapturedAttention

_NO_SKIP = 10.0  # gain above which the block is taken to have no skip connection


@dataclass
class NormCall:
    """One call of a norm inside a block."""

    late: bool  # whether attention had begun
    before: Tensor  # (B, n, d), a copy of the input
    after: Tensor  # a copy of the output
    source: Tensor  # the input itself, which later modules are compared with by address
    result: Tensor  # the output itself


@dataclass
class BlockCall:
    """One call of a block, filled in by hooks. Tensors are copied, because a model may add in place."""

    layer: int
    parts: Parts
    x: Tensor  # (B, n, d), a copy of the block's input
    source: Tensor  # the input itself
    attended: bool = False  # whether attention has begun
    attention_input: Tensor | None = None
    attention: CapturedAttention | None = None
    norms: list[NormCall] = field(default_factory=list)
    mlp_input: Tensor | None = None  # a copy
    mlp_source: Tensor | None = None  # the input itself

    def middle(self, y: Tensor) -> Tensor | None:
        """Return the stream between attention and MLP, (B, n, d).

        Args:
            y: (B, n, d), what leaves the block.

        Returns:
            The stream after the addition of attention; None if attention and MLP run side by side.
        """
        if not self.attended:
            return None
        if self.mlp_source is None:
            if self.parts.mlp is not None:
                return None
            return self.norms[0].before if self.post else y  # attention alone
        feeding = next((n for n in self.norms if n.result.data_ptr() == self.mlp_source.data_ptr()), None)
        if feeding is None:
            return None if self._is_input(self.mlp_source, self.mlp_input) else self.mlp_input
        return feeding.before if feeding.late and not self._is_input(feeding.source, feeding.before) else None

    def _is_input(self, source: Tensor, copy: Tensor | None) -> bool:
        """Whether a tensor is the unchanged input of the block; a block working in place changes it."""
        return copy is not None and source.data_ptr() == self.source.data_ptr() and torch.equal(copy, self.x)

    @property
    def post(self) -> bool:
        """Whether the block is post-norm: no norm before attention, and the MLP, if any, reads a norm's output."""
        if not self.norms or not all(norm.late for norm in self.norms):
            return False
        pointers = [norm.result.data_ptr() for norm in self.norms]
        return self.mlp_source is None or self.mlp_source.data_ptr() in pointers

    def rates(self, y: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Return the rate of escalation r = t_div(before) / t_div(after), (B,), of each part of the block.

        - "attention": from the block's input to the stream after the addition of attention;
        - "mlp": from there (post-norm: after the norm) to the stream after the addition of the MLP;
        - "norm": the product over the norms.

        The block's rate is attention x norm x mlp in a post-norm block. In a pre-norm block, whose norms act on
        branches, it is attention x mlp.

        Args:
            y: (B, n, d), what leaves the block.
            mask: (B, n), True = a real token.
        """

        def rate(before: Tensor, after: Tensor) -> Tensor:
            return token_diversity(before, mask) / token_diversity(after, mask)

        rates = {}
        if self.norms:
            rates["norm"] = torch.stack([rate(norm.before, norm.after) for norm in self.norms]).prod(0)
        middle = self.middle(y)
        if middle is not None:
            rates["attention"] = rate(self.x, middle)
            if self.mlp_input is not None and self.post:
                rates["mlp"] = rate(self.mlp_input, self.norms[-1].before)
            elif self.mlp_input is not None:
                rates["mlp"] = rate(middle, y)
        return rates

    def gain(self, y: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the size (B,) of what attention adds, relative to what it is added to, in the token mean.

        Let z = s x + R be the stream after the addition of attention, with s by least squares. The gain is the root
        of ||Pi1 R||^2 / ||Pi1 s x||^2. That is gain^2 d sigma^2 in TSE (9) if attention keeps means (mu_1 = 1), which
        it nearly does. It depends neither on a norm before attention nor on the part alpha of x that it passes on.

        Args:
            y: (B, n, d), what leaves the block.
            mask: (B, n), True = a real token.

        Returns:
            The gain, NaN without a skip connection; None if attention and MLP run side by side.
        """
        middle = self.middle(y)
        if middle is None:
            return None
        x, z = self.x.double(), middle.double()
        s = (x * z).sum((-2, -1)) / x.square().sum((-2, -1))
        R = z - s[:, None, None] * x
        branch, skip = (split(part, mask)[0].square().sum((-2, -1)) for part in (R, x))
        gain = (branch / skip).sqrt() / s.abs()
        return torch.where(gain < _NO_SKIP, gain, torch.nan)
