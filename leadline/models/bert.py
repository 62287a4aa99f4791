"""BERT (Devlin et al., 2019): a post-norm encoder with learned positions.

ALBERT (Lan et al., 2020) is one of its forms: one block for all layers, and narrow embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.models.base import Model, check_ids
from leadline.models.init import init_weights
from leadline.nn import BlockConfig, Positions, TransformerStack
from leadline.nn.layers import make_norm


@dataclass(frozen=True, kw_only=True)
class BertConfig(BlockConfig):
    vocab_size: int = 30522
    max_tokens: int = 512
    token_types: int = 2  # 0: no token types
    embedding_dim: int | None = None  # None: dim; else a linear map leads from it to dim (ALBERT)
    norm: str = "post"
    norm_eps: float = 1e-12
    positions: str = "learned"  # "learned", "sinusoidal", "rotary" or "none"
    embedding_dropout: float = 0.0
    init: str = "normal"

    from_zero: ClassVar[tuple[str, ...]] = (*BlockConfig.from_zero, "token_types")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal:
            raise LeadlineError("causal is True; an encoder looks at all of the text (for a decoder see gpt2_small)")


class Bert(Model):
    """``model(ids (B, N), mask=None) -> last hidden state (B, N, d)``."""

    family: ClassVar[str] = "bert"
    Config: ClassVar[type[BlockConfig]] = BertConfig
    config: BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        c = config
        width = c.dim if c.embedding_dim is None else c.embedding_dim
        self.token = nn.Embedding(c.vocab_size, width)
        self.token_type = nn.Embedding(c.token_types, width) if c.token_types else None
        self.embedding_norm = make_norm(c.norm_kind, width, c.norm_eps) if c.norm == "post" else nn.Identity()
        self.widen = nn.Linear(width, c.dim) if c.embedding_dim is not None else nn.Identity()
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.blocks = TransformerStack(c)
        self.positions = Positions(c.positions, c.max_tokens, width, self.blocks.head_dim)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.norm == "pre" else nn.Identity()
        init_weights(self, c.init)

    def embed(
        self, ids: Tensor, types: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(B, N) -> what enters the first block: tokens (B, N, d) and rotary angles."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token(ids)
        if self.token_type is not None:
            x = x + self.token_type(torch.zeros_like(ids) if types is None else types)
        x, rope = self.positions(x, positions)
        return self.widen(self.dropout(self.embedding_norm(x))), rope

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        types: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """mask (B, N), True = a real token; types (B, N) are the sentences, 0 unless given."""
        check_ids(ids, mask, 0, self.positions.limit, self.config.vocab_size)
        x, rope = self.embed(ids, types, positions)
        return self.norm(self.blocks(x, mask, rope=rope))
