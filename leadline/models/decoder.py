"""What decoders share: tokens in, logits of the next token out. A family is a set of defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.models.base import Model, check_ids
from leadline.models.generation import collect
from leadline.models.init import init_weights
from leadline.nn import BlockConfig, LayerCache, Positions, TransformerStack
from leadline.nn.layers import make_norm


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(BlockConfig):
    vocab_size: int = 50257
    max_tokens: int = 1024
    causal: bool = True
    positions: str = "learned"  # "learned", "sinusoidal", "rotary" or "none"
    rope: dict[str, Any] = field(default_factory=dict)  # rotary settings, see leadline.ops.rotary_frequencies
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0  # the token embedding times this enters the first block
    tied: bool = True  # the head is the token embedding
    init: str = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.embedding_scale < math.inf:
            raise LeadlineError(f"embedding_scale is {self.embedding_scale}; it must be a number above 0, such as 16")
        if not self.causal:
            raise LeadlineError("causal is False; a decoder must not see the future (for an encoder see bert_base)")


class Decoder(Model):
    """``model(ids (B, N), mask=None) -> logits (B, N, vocab_size)``."""

    Config: ClassVar[type[BlockConfig]] = DecoderConfig
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        c = config
        self.token = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = TransformerStack(c)
        self.positions = Positions(c.positions, c.max_tokens, c.dim, self.blocks.head_dim, c.rope)
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.norm == "pre" else nn.Identity()
        self.head = None if c.tied else nn.Linear(c.dim, c.vocab_size, bias=False)
        init_weights(self, c.init, depth=c.depth if c.init == "normal" else None)

    def encode(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Hidden states (B, N, d) after the final norm."""
        past = 0 if cache is None else cache[0].length
        check_ids(ids, mask, past, self.positions.limit, self.config.vocab_size)
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        x, scale = self.token(ids), self.config.embedding_scale
        x, rope = self.positions(x if scale == 1 else x * scale, positions)
        return self.norm(self.blocks(self.dropout(x), mask, rope=rope, cache=cache))

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Logits of the next token.

        mask       (B, N), True = a real token.
        positions  (N,) or (B, N); 0, 1, 2, ... unless given, padding counted, as transformers does.
        cache      one ``LayerCache`` a layer; ids are then the tokens after the cached ones, and mask covers all.
        """
        x = self.encode(ids, mask, positions=positions, cache=cache)
        return F.linear(x, self.token.weight) if self.head is None else self.head(x)

    def generate(self, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any) -> Tensor:
        """Continue ids (B, N) by up to ``max_new_tokens``; returns (B, N + new).

        cache        remember keys and values instead of computing them again; the result is the same.
        temperature  0, the default, takes the likeliest token; above 0 samples, from the ``top_k`` likeliest and
                     from the smallest set with probability ``top_p`` where given, by ``generator`` if given.
        mask         True = a real token; prompts of different lengths are padded on the left.
        stop         a token id after which a sequence is filled with that id.
        """
        return collect(self, ids, max_new_tokens, cache, slide=False, **options)
