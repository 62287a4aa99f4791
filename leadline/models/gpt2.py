"""GPT-2 (Radford et al., 2019): a pre-norm decoder with learned positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.models.base import check_ids
from leadline.models.decoder import Decoder
from leadline.models.init import init_weights
from leadline.nn import BlockConfig, LayerCache, Positions, TransformerStack
from leadline.nn.layers import make_norm


@dataclass(frozen=True, kw_only=True)
class GPT2Config(BlockConfig):
    vocab_size: int = 50257
    max_tokens: int = 1024
    causal: bool = True
    mlp: str = "gelu_tanh"
    norm_eps: float = 1e-5
    positions: str = "learned"  # "learned", "sinusoidal", "rotary" or "none"
    embedding_dropout: float = 0.0
    tied: bool = True  # the head is the token embedding
    init: str = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.causal:
            raise LeadlineError("causal is False; a decoder must not see the future (for an encoder see bert_base)")


class GPT2(Decoder):
    """``model(ids (B, N), mask=None) -> logits (B, N, vocab_size)``."""

    family: ClassVar[str] = "gpt2"
    Config: ClassVar[type[BlockConfig]] = GPT2Config
    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        c = config
        self.token = nn.Embedding(c.vocab_size, c.dim)
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.blocks = TransformerStack(c)
        self.positions = Positions(c.positions, c.max_tokens, c.dim, self.blocks.head_dim)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.norm == "pre" else nn.Identity()
        self.head = None if c.tied else nn.Linear(c.dim, c.vocab_size, bias=False)
        init_weights(self, c.init, scale_residual=c.init == "normal")

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
        check_ids(ids, mask, past, self.positions.limit)
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        x, rope = self.positions(self.token(ids), positions)
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
