"""The decoder that GPT-2 and LLaMA share: tokens in, logits of the next token out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.models.base import Model, check_ids
from leadline.models.configs import DecoderConfig, ModelConfig
from leadline.models.generation import collect
from leadline.models.init import init_weights
from leadline.nn import LayerCache, Positions, TransformerStack
from leadline.nn.layers import make_norm


class Decoder(Model):
    """A causal language model: ``model(ids (B, N), mask=None) -> logits (B, N, vocab_size)``.

    The families differ in the defaults of their configurations alone.
    """

    Config: ClassVar[type[ModelConfig]] = DecoderConfig
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        c = config
        self.token = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = TransformerStack(c)
        self.positions = Positions(c.positions, c.max_tokens, c.dim, self.blocks.head_dim, c.rope)
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.final_norm else nn.Identity()
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
        """Compute the hidden states (B, N, d) after the final norm; arguments as in ``forward``."""
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
        """Compute the logits of the next token after every token.

        Args:
            ids: Token ids (B, N); with a cache the tokens after the cached ones.
            mask: (B, N), True for a real token; with a cache it covers the cached tokens too.
            positions: (N,) or (B, N). None: 0, 1, 2, ..., padding counted, as transformers does.
            cache: One ``LayerCache`` per layer, which this call extends.

        Returns:
            Logits (B, N, vocab_size).
        """
        x = self.encode(ids, mask, positions=positions, cache=cache)
        return F.linear(x, self.token.weight) if self.head is None else self.head(x)

    def generate(self, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any) -> Tensor:
        """Continue ids (B, N) by up to ``max_new_tokens``.

        Args:
            ids: Token ids of the prompts (B, N).
            max_new_tokens: The largest number of tokens to add.
            cache: Store keys and values instead of computing them again; the result is the same.
            **options: ``temperature``, ``top_k``, ``top_p``, ``mask``, ``stop`` and ``generator``, see
                ``leadline.models.generation.stream_tokens``.

        Returns:
            The prompts and their continuations (B, N + new).
        """
        return collect(self, ids, max_new_tokens, cache, slide=False, **options)
