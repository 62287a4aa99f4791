"""Attention by relative position with a memory, and the block around it (Dai et al., 2019)."""

from __future__ import annotations

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
    """Causal attention, over past tokens and these, whose scores depend on the distance of key and query.

    ::

        S_ij = ((q_i + u) k_j + (q_i + v) r_{i-j}) / sqrt(head width),   r_n = W_R R_n, R_n the sinusoid of n

    All four parts are scores, so Hopfield attention carries all of them, memory included: the state is
    (B, H, M, N) for M tokens that see N - M past ones. u and v (heads, head width) belong to the model,
    which has one pair for all layers.

    Args:
        config: Configuration of the block.
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
        """Apply attention to the M tokens of a segment, which see N: the past ones and themselves.

        Args:
            x: Tokens (B, M, d).
            state: State that the layer before returned; None at the first layer.
            past: Past tokens (B, N - M, d), or None.
            distances: Sinusoids R_n (N, d) for n = N - 1, ..., 0.
            u: Query bias for the content of a key, (heads, head width).
            v: Query bias for the distance of a key, (heads, head width).

        Returns:
            y (B, M, d), and the state for the next layer, None with alpha' = 0.
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

    The memory of a layer holds the input of its attention, (B, m, d). With causal de-escalation it also holds the
    tokens at the de-escalation site: the mean then runs over what attention sees, the memory and the segment so far.
    The leaky form takes the mean over the whole segment, its future included (TSE 21 as printed).

    Args:
        config: Configuration of the block.
        layer: Index of the block in its stack, from 0.
    """

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.attention = RelativeAttention(config)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Memory | None = None, memory: Memory | None = None, *, keep: int, **positions: Tensor
    ) -> tuple[Tensor, Memory | None, Memory]:
        """Apply the block to a segment.

        Args:
            x: Tokens (B, M, d).
            state: State that the layer before returned; None at the first layer.
            memory: Memory that this layer returned for the segment before, or None.
            keep: Number of tokens that the new memory holds at most.
            **positions: ``distances``, ``u`` and ``v`` of ``RelativeAttention``.

        Returns:
            x (B, M, d), the state for the next layer, and the memory for the next segment.
        """
        stream = _Stream(self, memory, keep)
        x = stream.de_escalate("attention-input", x)
        past = None if memory is None or memory[0].shape[1] == 0 else memory[0]
        stream.remember(0, x)
        past = None if past is None else self.residual1.read(past, self.norm1)
        y, state = self.attention(self.residual1.read(x, self.norm1), state, past=past, **positions)
        return self._after_attention(x, y, stream.de_escalate), state, stream.new_memory

    @property
    def remembers(self) -> int:
        """The number of tensors in the memory of this layer."""
        return 2 if self.de_escalation is not None and self.de_escalation.causal else 1


class _Stream:
    """De-escalates the stream of one layer and builds its memory while a segment runs through it.

    Args:
        block: The block of the layer.
        memory: Memory of the segment before, or None.
        keep: Number of tokens that the new memory holds at most.
    """

    def __init__(self, block: RelativeBlock, memory: Memory | None, keep: int) -> None:
        self.block, self.memory, self.keep = block, memory, keep
        self.tensors: dict[int, Tensor] = {}  # of the new memory, by place

    @property
    def new_memory(self) -> Memory:
        """The memory for the next segment."""
        return tuple(self.tensors[place] for place in range(self.block.remembers))

    def remember(self, place: int, x: Tensor) -> None:
        """Store the last tokens of memory and segment, without their gradient, in a place of the new memory."""
        x = x.detach()
        whole = x if self.memory is None else torch.cat((self.memory[place].to(x.dtype), x), 1)
        self.tensors[place] = whole[:, max(whole.shape[1] - self.keep, 0) :]

    def de_escalate(self, site: str, x: Tensor) -> Tensor:
        """De-escalate the tokens x (B, M, d) if ``site`` is where the block does."""
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
    """Reorder scores (..., M, N) from column c for the distance N - 1 - c to column j for key j.

    Query i of M is token N - M + i, so key j lies N - M + i - j tokens back: column M - 1 - i + j. Padding one column,
    flattening, dropping the first M numbers and folding into rows of N moves row i by just that. Keys of the future get
    numbers of other rows; the causal mask hides them.
    """
    M, N = scores.shape[-2:]
    return F.pad(scores, (1, 0)).flatten(-2)[..., M:].unflatten(-1, (M, N))


def check_memory(memory: Memory | None, depth: int, remembers: int, batch: int, dim: int) -> None:
    """Check that ``memory`` is what a model returned: ``remembers`` tensors (B, m, d) for each of ``depth`` layers.

    Raises:
        LeadlineError: The number or the shapes of the tensors do not fit the model and the batch.
    """
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
