"""One call of a block: what was seen on the way through it, and what its parts did to the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leadline.anatomy.blocks import Parts
from leadline.metrics import token_diversity
from leadline.metrics._tokens import split
from leadline.probing.attention import Caught

_NO_SKIP = 10.0  # gain beyond which attention adds to nothing: a block without a skip connection


@dataclass
class Normed:
    """One call of a norm inside a block."""

    late: bool  # after attention began
    before: Tensor  # (B, n, d)
    after: Tensor
    source: Tensor  # the very tensors, kept so that what takes them up is known by its address
    result: Tensor


@dataclass
class Passage:
    """What entered the block, (B, n, d), and what its hooks saw. Copies: a model may add in place."""

    layer: int
    parts: Parts
    x: Tensor
    source: Tensor
    attended: bool = False
    attention_input: Tensor | None = None
    caught: Caught | None = None
    norms: list[Normed] = field(default_factory=list)
    mlp_input: Tensor | None = None
    mlp_source: Tensor | None = None

    def middle(self, y: Tensor) -> Tensor | None:
        """The stream after attention was added, (B, n, d); None where attention and MLP run side by side."""
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
        """Whether a tensor is what entered the block, and not what a block working in place made of it."""
        return copy is not None and source.data_ptr() == self.source.data_ptr() and torch.equal(copy, self.x)

    @property
    def post(self) -> bool:
        """Norms behind the additions: none comes before attention, and the MLP, if any, takes up a norm's result."""
        if not self.norms or not all(norm.late for norm in self.norms):
            return False
        pointers = [norm.result.data_ptr() for norm in self.norms]
        return self.mlp_source is None or self.mlp_source.data_ptr() in pointers

    def rates(self, y: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """r = t_div(before) / t_div(after), (B,), of the parts; y (B, n, d) is what leaves the block.

        attention  from what enters the block to the stream after attention was added
        mlp        from there (post-norm: behind the norm) to the stream after the MLP was added
        norm       the product over the norms. In a post-norm block attention x norm x mlp is the block's rate; in a
                   pre-norm block, whose norms act on branches, attention x mlp is
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
        """(B,): how large what attention adds is against what it is added to, in the token mean.

        With z the stream after attention was added and z = s x + R, s by least squares, it is the root of
        ||Pi1 R||^2 / ||Pi1 s x||^2: gain^2 d sigma^2 in TSE (9) where attention keeps means (mu_1 = 1), as it nearly
        does, whatever norm stands before it and whatever part alpha of x it hands on. NaN without a skip connection.
        """
        middle = self.middle(y)
        if middle is None:
            return None
        x, z = self.x.double(), middle.double()
        s = (x * z).sum((-2, -1)) / x.square().sum((-2, -1))
        R = z - s[:, None, None] * x
        added, there = (split(part, mask)[0].square().sum((-2, -1)) for part in (R, x))
        gain = (added / there).sqrt() / s.abs()
        return torch.where(gain < _NO_SKIP, gain, torch.nan)
