"""Transformer-XL (Dai et al., 2019): relative positions, a memory, a tied adaptive softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leadline.models.base import Model, check_ids
from leadline.models.configs import ModelConfig, TransformerXLConfig
from leadline.models.generation import collect
from leadline.models.init import init_weights
from leadline.nn import TransformerStack
from leadline.nn.adaptive_softmax import AdaptiveSoftmax
from leadline.nn.layers import make_norm
from leadline.nn.relative import Memory, RelativeBlock, check_memory
from leadline.ops import sinusoid


class TransformerXL(Model):
    """A recurrent decoder: ``model(ids (B, M), memory, targets) -> (log-probabilities or the mean loss, memory)``.

    It reads a text segment by segment. Every call returns the memory for the next segment: a flat tuple of tensors
    without gradient. With a memory a layer attends to the last ``memory_length`` tokens before the segment as well.

    Attributes:
        memory_length: Number of past tokens that a layer remembers. It may be changed, such as for an evaluation.
    """

    Config: ClassVar[type[ModelConfig]] = TransformerXLConfig
    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        c = config
        self.memory_length = c.memory_length
        self.token = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = RelativeStack(c)
        head_dim = self.blocks.head_dim
        self.u = nn.Parameter(torch.empty(c.heads, head_dim))
        self.v = nn.Parameter(torch.empty(c.heads, head_dim))
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.final_norm else nn.Identity()
        self.softmax = AdaptiveSoftmax(c.dim, c.vocab_size, c.cutoffs)
        init_weights(self, c.init)
        for parameter in (self.u, self.v, self.softmax.cluster_weight):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def encode(self, ids: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Compute the hidden states (B, M, d) after the final norm, and the memory for the next segment."""
        check_ids(ids, None, 0, None, self.config.vocab_size)
        check_memory(memory, self.config.depth, self.blocks.remembers, len(ids), self.config.dim)
        x = self.dropout(self.token(ids) * self.config.dim**0.5)
        total = ids.shape[1] + (0 if memory is None else memory[0].shape[1])
        distances = sinusoid(torch.arange(total - 1, -1, -1, device=ids.device), self.config.dim).to(x.dtype)
        positions = {"distances": self.dropout(distances), "u": self.u, "v": self.v}
        x, memory = self.blocks(x, memory, keep=self.memory_length, **positions)
        return self.norm(self.dropout(x)), memory

    def forward(
        self, ids: Tensor, memory: Memory | None = None, targets: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Read one segment.

        Args:
            ids: Token ids (B, M).
            memory: What the call for the segment before returned. None: at the start of a text.
            targets: Ids of the next tokens (B, M), each of which counts in the loss. None: no loss is computed.

        Returns:
            Log-probabilities (B, M, vocab_size), or with targets their mean loss; and the memory for the next segment.
        """
        x, memory = self.encode(ids, memory)
        if targets is None:
            return self.softmax.log_probs(x, self.token.weight), memory
        return self.softmax.nll(x, targets, self.token.weight).mean(), memory

    def token_loss(self, ids: Tensor, targets: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Compute -log p of every target (B, M), in nats, and the memory for the next segment."""
        x, memory = self.encode(ids, memory)
        return self.softmax.nll(x, targets, self.token.weight), memory

    def generate(self, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any) -> Tensor:
        """Continue ids (B, M) by up to ``max_new_tokens``.

        Args:
            ids: Token ids of the prompts (B, M), all of one length.
            max_new_tokens: The largest number of tokens to add.
            cache: Read the past from the memory, ``memory_length`` tokens of it; else all tokens are computed again.
            **options: As in ``Decoder.generate``, without ``mask``.

        Returns:
            The prompts and their continuations (B, M + new).
        """
        return collect(self, ids, max_new_tokens, cache, **options)


class RelativeStack(TransformerStack):
    """The blocks of a Transformer-XL. Each has its part of the memory; the state passes from one to the next."""

    Block = RelativeBlock

    @property
    def remembers(self) -> int:
        """Number of memory tensors of one block."""
        return cast(RelativeBlock, self[0]).remembers

    def layers(self) -> Iterator[RelativeBlock]:
        """Yield the block of every layer in turn, ``depth`` of them; shared layers are one block."""
        return cast(Iterator[RelativeBlock], super().layers())

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Memory | None, *, keep: int, **positions: Any
    ) -> tuple[Tensor, Memory]:
        """Apply all layers to x (B, M, d).

        Args:
            x: The stream (B, M, d).
            memory: ``remembers`` tensors per layer, or None.
            keep: Number of tokens in the new memory.
            **positions: Relative positions, see ``RelativeBlock``.

        Returns:
            The stream (B, M, d) and the memory of all layers for the next segment.
        """
        state: Memory | None = None
        memories: list[Tensor] = []
        share = self.remembers
        for i, block in enumerate(self.layers()):
            own = None if memory is None else memory[i * share : (i + 1) * share]
            if self.activation_checkpointing and self.training:
                x, state, new = checkpoint(block, x, state, own, keep=keep, use_reentrant=False, **positions)
            else:
                x, state, new = block(x, state, own, keep=keep, **positions)
            memories += new
        return x, tuple(memories)
