"""Transformer-XL (Dai et al., 2019): relative positions, a memory of the segment before, a tied adaptive softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leadline.errors import LeadlineError, check_choice
from leadline.models.base import Model, check_ids
from leadline.models.generation import collect
from leadline.models.init import init_weights
from leadline.nn import BlockConfig, TransformerStack
from leadline.nn.adaptive_softmax import AdaptiveSoftmax
from leadline.nn.layers import make_norm
from leadline.nn.relative import Memory, RelativeBlock, check_memory
from leadline.ops import sinusoid


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(BlockConfig):
    vocab_size: int = 267_735  # words in order of frequency
    max_tokens: int = 150  # of a segment in training and evaluation; the model itself takes any number
    memory_length: int = 150  # tokens of the past that a layer remembers
    cutoffs: tuple[int, ...] = (20_000, 40_000, 200_000)
    depth: int = 16
    dim: int = 410
    heads: int = 10
    ffn: int | None = 2100
    mlp: str = "relu"
    norm: str = "post"
    norm_eps: float = 1e-5
    causal: bool = True
    qkv_bias: bool = False
    de_escalation_at: str = "ffn-input"
    de_escalation_form: str = "causal"  # "leaky": the mean of the whole segment, future included, as TSE's Fig. 7
    embedding_dropout: float = 0.0
    init: str = "normal"

    from_zero: ClassVar[tuple[str, ...]] = (*BlockConfig.from_zero, "memory_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        check_choice("de_escalation_form", self.de_escalation_form, ("causal", "leaky"))
        if self.de_escalation_form == "leaky" and not self.de_escalation:
            raise LeadlineError("de_escalation_form is 'leaky' without de_escalation; give tau with it, such as 1.0")
        if not self.causal:
            raise LeadlineError("causal is False; a decoder must not see the future (for an encoder see bert_base)")
        if self.scheme != "forward-backward" or self.formula != "softmax":
            raise LeadlineError(
                f"scheme is {self.scheme!r} and formula {self.formula!r}; relative attention takes 'forward-backward' "
                "with 'softmax'"
            )

    @property
    def causal_mean(self) -> bool:
        return self.de_escalation_form == "causal"


class TransformerXL(Model):
    """``model(ids (B, M), memory=None, targets=None) -> (log-probabilities (B, M, V) or the mean loss, memory)``.

    Every target is a token id and counts. Memory is a flat tuple of tensors without gradient, or None at the start of a
    text; hand back what came out with the segment before. A layer then attends to the last ``memory_length`` tokens
    before the segment as well.
    """

    family: ClassVar[str] = "transformer_xl"
    Config: ClassVar[type[BlockConfig]] = TransformerXLConfig
    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        c = config
        self.memory_length = c.memory_length  # may be set to another length, such as a longer one to evaluate with
        self.token = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = RelativeStack(c)
        head_dim = self.blocks.head_dim
        self.u = nn.Parameter(torch.empty(c.heads, head_dim))
        self.v = nn.Parameter(torch.empty(c.heads, head_dim))
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.norm == "pre" else nn.Identity()
        self.softmax = AdaptiveSoftmax(c.dim, c.vocab_size, c.cutoffs)
        init_weights(self, c.init)
        for parameter in (self.u, self.v, self.softmax.cluster_weight):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def encode(self, ids: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Hidden states (B, M, d) after the final norm, and the memory for the segment after this one."""
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
        x, memory = self.encode(ids, memory)
        if targets is None:
            return self.softmax.log_probs(x, self.token.weight), memory
        return self.softmax.nll(x, targets, self.token.weight).mean(), memory

    def token_loss(self, ids: Tensor, targets: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """-log p of every target (B, M), in nats, and the memory."""
        x, memory = self.encode(ids, memory)
        return self.softmax.nll(x, targets, self.token.weight), memory

    def generate(self, ids: Tensor, max_new_tokens: int, cache: bool = True, **options: Any) -> Tensor:
        """Continue ids (B, M) by up to ``max_new_tokens``; options as ``Decoder.generate`` has them, without a mask.

        cache  the past is the memory, ``memory_length`` tokens of it; without it all tokens are computed again.
        """
        return collect(self, ids, max_new_tokens, cache, **options)


class RelativeStack(TransformerStack):
    """The blocks; each has its share of the memory, and the state runs from one to the next."""

    Block = RelativeBlock

    @property
    def remembers(self) -> int:
        return cast(RelativeBlock, self[0]).remembers

    def layers(self) -> Iterator[RelativeBlock]:
        return cast(Iterator[RelativeBlock], super().layers())

    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Memory | None, *, keep: int, **positions: Any
    ) -> tuple[Tensor, Memory]:
        """x (B, M, d) -> (B, M, d), and the memory of all layers."""
        state: Memory | None = None
        kept: list[Tensor] = []
        share = self.remembers
        for i, block in enumerate(self.layers()):
            own = None if memory is None else memory[i * share : (i + 1) * share]
            if self.activation_checkpointing and self.training:
                x, state, new = checkpoint(block, x, state, own, keep=keep, use_reentrant=False, **positions)
            else:
                x, state, new = block(x, state, own, keep=keep, **positions)
            kept += new
        return x, tuple(kept)
