"""The one Transformer block, with or without a cure, and the stack of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leadline.nn.attention import HopfieldAttention
from leadline.nn.cache import LayerCache
from leadline.nn.config import BlockConfig
from leadline.nn.de_escalation import DeEscalation
from leadline.nn.layers import MLP, make_norm
from leadline.nn.residual import RULES


def make_de_escalation(config: BlockConfig) -> DeEscalation | None:
    """Make the de-escalation that a configuration asks for, or None."""
    if not config.de_escalation:
        return None
    return DeEscalation(config.de_escalation, config.learnable_de_escalation, config.causal_mean)


class TransformerBlock(nn.Module):
    """Attention and then an MLP, two branches that join the stream x by one rule.

    The rule is ``config.norm``, an entry of ``leadline.nn.residual.RULES``::

        post  x = LN(x + gain A(x)),   x = LN(x + F(x))          (TSE algorithm 1)
        pre   x = x + gain A(LN(x)),   x = x + F(LN(x))          (TSE 19)
        none  x = x + gain A(x),       x = x + F(x)

    Without skips the ``x +`` is gone, without an MLP the second step. De-escalation acts on the stream x, skip
    included: at the block's end, or where the MLP or the attention reads x.

    Args:
        config: Configuration of the block.
        layer: Index of the block in its stack, from 0. It decides the rate of drop path.
    """

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__()
        c = self.config = config
        self.attention = HopfieldAttention(
            **c.attention_options,
            scheme=c.scheme,
            causal=c.causal,
            bias=c.bias,
            formula=c.formula,
            tolerance=c.solver_tolerance,
            max_steps=c.solver_steps,
        )
        hidden = 4 * c.dim if c.ffn is None else c.ffn
        self.mlp = MLP(c.dim, hidden, c.mlp, c.bias, c.hidden_dropout) if hidden else None
        with_norm = c.norm != "none"
        self.norm1 = make_norm(c.norm_kind, c.dim, c.norm_eps) if with_norm else nn.Identity()
        self.norm2 = make_norm(c.norm_kind, c.dim, c.norm_eps) if with_norm and hidden else nn.Identity()
        self.residual1 = RULES[c.norm](c, layer, "attention")
        self.residual2 = RULES[c.norm](c, layer, "mlp") if hidden else None
        self.de_escalation = make_de_escalation(c)

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        mask: Tensor | None = None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Apply the block: x (B, N, d) -> (x (B, N, d), state). See ``HopfieldAttention`` for the arguments."""
        x = self._de_escalate("attention-input", x, mask, cache)
        y, state = self.attention(self.residual1.read(x, self.norm1), state, mask, rope=rope, cache=cache)
        return self._after_attention(x, y, lambda site, x: self._de_escalate(site, x, mask, cache)), state

    def _after_attention(self, x: Tensor, y: Tensor, de_escalate: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Apply the rest of the block to the stream x and the output y of the attention, both (B, N, d)."""
        x = self.residual1.join(x, y, self.norm1)
        if self.mlp is not None and self.residual2 is not None:
            x = de_escalate("ffn-input", x)
            x = self.residual2.join(x, self.mlp(self.residual2.read(x, self.norm2)), self.norm2)
        return de_escalate("block-end", x)

    def _de_escalate(self, site: str, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        if self.de_escalation is None or self.config.de_escalation_at != site:
            return x
        return self.de_escalation(x, mask, cache)


class TransformerStack(nn.ModuleList):
    """``depth`` blocks; each hands its attention state to the next.

    Attributes:
        activation_checkpointing: Recompute each block in the backward pass. State is an argument and a result of
            every block, so the gradients are exactly those of the plain run.
    """

    activation_checkpointing = False
    Block: ClassVar[type[TransformerBlock]] = TransformerBlock

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(self.Block(config, layer) for layer in range(1 if config.shared_layers else config.depth))
        self.depth = config.depth
        self.head_dim = config.dim // config.heads if config.head_dim is None else config.head_dim

    def layers(self) -> Iterator[TransformerBlock]:
        """Iterate over the block of each of the ``depth`` layers; shared layers all have the same block."""
        for i in range(self.depth):
            yield cast(TransformerBlock, self[i % len(self)])

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Apply all layers: x (B, N, d) -> (B, N, d). ``cache`` holds one entry per layer."""
        state: tuple[Tensor, ...] | None = None
        for i, block in enumerate(self.layers()):
            layer_cache = None if cache is None else cache[i]
            if self.activation_checkpointing and self.training:
                x, state = checkpoint(block, x, state, mask, rope=rope, cache=layer_cache, use_reentrant=False)
            else:
                x, state = block(x, state, mask, rope=rope, cache=layer_cache)
        return x
