"""Attention by relative position over the segment before, and the block around it (Dai et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.nn.attention import HopfieldAttention
from leadline.nn.block import BlockConfig, TransformerBlock
from leadline.nn.cache import LayerCache
from leadline.ops import hopfield_attention, standard_attention

Memory = tuple[Tensor, ...]


class RelativeAttention(HopfieldAttention):
    """Causal attention whose scores know how far a key lies back, over past tokens and these.

        S_ij = ((q_i + u) k_j + (q_i + v) r_{i-j}) / sqrt(head width),   r_n = W_R R_n, R_n the sinusoid of n

    All four parts are scores, so Hopfield attention carries all of them, memory included: the state is
    (B, H, M, N) for M tokens that see N - M past ones. u and v (heads, head width) are given by the model,
    which has one pair for all layers.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(**config.attention_options, causal=True, bias=False)
        self.relative = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)  # W_R

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: Memory | None = None,
        *,
        past: Tensor | None,
        distances: Tensor,
        u: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Memory | None]:
        """x (B, M, d), past (B, N - M, d) or None -> (y (B, M, d), state).

        distances  (N, d): R_n for n = N - 1, ..., 0.
        """
        q, keys, values = self.project(x)
        if past is not None:
            _, old_keys, old_values = self.project(past)
            keys, values = torch.cat((old_keys, keys), 2), torch.cat((old_values, values), 2)
        r = self.relative(distances).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (H, N, D)
        bias = shift((self.head_dim**-0.5 * (q + v[:, None])) @ r.mT)  # (B, H, M, N)
        q = q + u[:, None]
        dropout = self.dropout if self.training else 0.0
        if self.alpha_prime.off:
            out, state = standard_attention(q, keys, values, mask=bias, causal=True, dropout=dropout), None
        else:
            out, state = hopfield_attention(
                q,
                keys,
                values,
                state,
                alpha_prime=self.alpha_prime(),
                start=self.start,
                bias=bias,
                causal=True,
                dropout=dropout,
                backend=self.backend,
            )
        return self.mix(x, self.proj(out.transpose(1, 2).flatten(2))), state


class RelativeBlock(TransformerBlock):
    """The block with relative attention and a memory of the tokens before this segment.

    A layer remembers what its attention took in, (B, m, d), and, when it is de-escalated causally, the tokens at
    the place of de-escalation too: the mean then runs over what attention sees, the memory and the segment so far.
    The leaky form takes the mean over the whole segment, its future included (TSE 21 as printed).
    """

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.attention = RelativeAttention(config)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Memory | None = None, memory: Memory | None = None, *, keep: int, **positions: Tensor
    ) -> tuple[Tensor, Memory | None, Memory]:
        """x (B, M, d) -> (x (B, M, d), state, memory); ``positions`` are distances, u and v of the attention.

        memory  what this layer returned for the segment before, or None; its last ``keep`` tokens are kept.
        """
        stream = _Stream(self, memory, keep)
        x = stream.de_escalate("attention-input", x)
        past = None if memory is None or memory[0].shape[1] == 0 else memory[0]
        stream.remember(0, x)
        past = None if past is None else self.residual1.read(past, self.norm1)
        y, state = self.attention(self.residual1.read(x, self.norm1), state, past=past, **positions)
        return self._after_attention(x, y, stream.de_escalate), state, tuple(stream.kept)

    @property
    def remembers(self) -> int:
        """How many tensors this layer keeps of a segment."""
        return 2 if self.de_escalation is not None and self.de_escalation.causal else 1


class _Stream:
    """The memory of one layer while a segment runs through it."""

    def __init__(self, block: RelativeBlock, memory: Memory | None, keep: int) -> None:
        self.block, self.memory, self.keep = block, memory, keep
        self.kept: list[Any] = [None] * block.remembers

    def remember(self, place: int, x: Tensor) -> None:
        """Keep the last tokens of memory and segment, without their gradient."""
        x = x.detach()
        whole = x if self.memory is None else torch.cat((self.memory[place].to(x.dtype), x), 1)
        self.kept[place] = whole[:, max(whole.shape[1] - self.keep, 0) :]

    def de_escalate(self, site: str, x: Tensor) -> Tensor:
        block = self.block
        if block.de_escalation is None or block.config.de_escalation_at != site:
            return x
        if not block.de_escalation.causal:
            return block.de_escalation(x)
        before = LayerCache(0)
        if self.memory is not None:
            old = self.memory[1]
            before.sum = old.sum(1, keepdim=True, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
            before.count = float(old.shape[1])
        self.remember(1, x)
        return block.de_escalation(x, cache=before)


def shift(scores: Tensor) -> Tensor:
    """(..., M, N) with column c for the distance N - 1 - c -> (..., M, N) with column j for key j.

    Query i of M stands at N - M + i, so key j lies N - M + i - j back: column M - 1 - i + j. With one more column, the
    flat tensor cut M numbers later and folded at N again moves row i by just that. Keys of the future get numbers of
    other rows; they are never seen.
    """
    M, N = scores.shape[-2:]
    return F.pad(scores, (1, 0)).flatten(-2)[..., M:].unflatten(-1, (M, N))


def check_memory(memory: Memory | None, depth: int, remembers: int, batch: int, dim: int) -> None:
    """Memory is what the model returned: one or two tensors (B, m, d) a layer."""
    if memory is None:
        return
    wanted = depth * remembers
    shapes = {tuple(tensor.shape) for tensor in memory}
    fits = all(len(shape) == 3 and shape[0] == batch and shape[2] == dim for shape in shapes) and len(shapes) == 1
    if len(memory) != wanted or not fits:
        raise LeadlineError(
            f"memory holds {len(memory)} tensors of shapes {sorted(shapes)}; this model and batch take {wanted} of "
            f"shape ({batch}, tokens, {dim}): give what the model returned for the segment before"
        )
