"""The one Transformer block: post-norm, pre-norm, skip-less or attention-only, with or without a cure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leadline.nn.attention import HopfieldAttention
from leadline.nn.cache import LayerCache
from leadline.nn.config import BlockConfig
from leadline.nn.de_escalation import DeEscalation
from leadline.nn.layers import MLP, DropPath, make_norm


def make_de_escalation(c: BlockConfig) -> DeEscalation | None:
    return DeEscalation(c.de_escalation, c.learnable_de_escalation, c.causal_mean) if c.de_escalation else None


class TransformerBlock(nn.Module):
    """Attention, then an MLP, each inside a skip connection and with a norm before or after it.

        post  x = LN(x + gain A(x)),   x = LN(x + F(x))          (TSE algorithm 1)
        pre   x = x + gain A(LN(x)),   x = x + F(LN(x))          (TSE 19)

    Without skips the ``x +`` is gone, without an MLP the second step, with norm "none" the LN.
    De-escalation acts on the stream x, skip included: at the block's end, or where the MLP or the
    attention takes x up.
    """

    def __init__(self, config: BlockConfig, drop_path: float = 0.0) -> None:
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
        self.de_escalation = make_de_escalation(c)
        self.dropout = nn.Dropout(c.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        mask: Tensor | None = None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """x (B, N, d) -> (x (B, N, d), state); see ``HopfieldAttention`` for the arguments."""
        pre = self.config.norm == "pre"
        x = self._de_escalate("attention-input", x, mask, cache)
        y, state = self.attention(self.norm1(x) if pre else x, state, mask, rope=rope, cache=cache)
        return self._after_attention(x, y, lambda site, x: self._de_escalate(site, x, mask, cache)), state

    def _after_attention(self, x: Tensor, y: Tensor, de_escalate: Callable[[str, Tensor], Tensor]) -> Tensor:
        """The rest of the block, from the stream x and what attention made of it."""
        pre = self.config.norm == "pre"
        x = self._join(x, y if self.config.gain == 1 else self.config.gain * y)
        x = x if pre else self.norm1(x)
        if self.mlp is not None:
            x = de_escalate("ffn-input", x)
            x = self._join(x, self.mlp(self.norm2(x) if pre else x))
            x = x if pre else self.norm2(x)
        return de_escalate("block-end", x)

    def _join(self, x: Tensor, branch: Tensor) -> Tensor:
        branch = self.dropout(branch)
        return x + self.drop_path(branch) if self.config.skip else branch

    def _de_escalate(self, site: str, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        if self.de_escalation is None or self.config.de_escalation_at != site:
            return x
        return self.de_escalation(x, mask, cache)


class TransformerStack(nn.ModuleList):
    """``depth`` blocks, the state handed from one to the next; ``layers()`` goes through them.

    ``activation_checkpointing`` recomputes each block in the backward pass. State is an argument and a
    result of every block, so the gradients are exactly those of the plain run.
    """

    activation_checkpointing = False

    def __init__(self, config: BlockConfig) -> None:
        last = max(config.depth - 1, 1)
        blocks = 1 if config.shared_layers else config.depth
        super().__init__(TransformerBlock(config, config.drop_path * i / last) for i in range(blocks))
        self.depth = config.depth
        self.head_dim = config.dim // config.heads if config.head_dim is None else config.head_dim

    def layers(self) -> Iterator[TransformerBlock]:
        """The block of every layer in turn: ``depth`` of them, all the same one when they are shared."""
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
        """x (B, N, d) -> (B, N, d)."""
        state: tuple[Tensor, ...] | None = None
        for i, block in enumerate(self.layers()):
            layer_cache = None if cache is None else cache[i]
            if self.activation_checkpointing and self.training:
                x, state = checkpoint(block, x, state, mask, rope=rope, cache=layer_cache, use_reentrant=False)
            else:
                x, state = block(x, state, mask, rope=rope, cache=layer_cache)
        return x
