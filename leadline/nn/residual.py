"""Rules by which a branch of a block joins the residual stream, one small entry per rule."""

from __future__ import annotations

from torch import Tensor, nn

from leadline.nn.config import BlockConfig
from leadline.nn.layers import DropPath


class Residual(nn.Module):
    """The rule without a norm, x + gain f(x), and the base class of the other rules.

    A block has one instance for each branch f, attention and MLP. A new rule overrides ``read`` or ``join``,
    makes its parameters, if any, in ``__init__``, and gets an entry in ``RULES``.

    Args:
        config: Configuration of the block.
        layer: Index of the block in its stack, from 0.
        branch: "attention" or "mlp". The gain is the attention's.
    """

    def __init__(self, config: BlockConfig, layer: int, branch: str) -> None:
        super().__init__()
        self.skip, self.gain = config.skip, config.gain if branch == "attention" else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(config.drop_path * layer / max(config.depth - 1, 1))

    def read(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return what the branch takes in, (B, N, d), from the stream x (B, N, d)."""
        return x

    def join(self, x: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        """Return the stream (B, N, d) after the branch, from the stream x before it and the branch's output."""
        return self.add(x, branch)

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return x + gain branch, with dropout and drop path; without the skip connection, the branch alone."""
        branch = self.dropout(branch if self.gain == 1 else self.gain * branch)
        return x + self.drop_path(branch) if self.skip else branch


class Pre(Residual):
    """Pre-norm: x + gain f(N(x)) (TSE 19)."""

    def read(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return N(x)."""
        return norm(x)


class Post(Residual):
    """Post-norm: N(x + gain f(x)) (TSE algorithm 1)."""

    def join(self, x: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        """Return N(x + gain branch)."""
        return norm(self.add(x, branch))


RULES: dict[str, type[Residual]] = {"none": Residual, "pre": Pre, "post": Post}  # the choices of BlockConfig.norm
