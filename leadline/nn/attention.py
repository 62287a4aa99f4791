"""Self-attention whose scores are carried through depth and which keeps a part of its input."""

from __future__ import annotations

from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice
from leadline.nn.cache import LayerCache
from leadline.nn.schemes import SCHEMES, step
from leadline.nn.strength import Strength
from leadline.ops import FORMULAS, hopfield_attention, packed_attention, rotate, standard_attention


class HopfieldAttention(nn.Module):
    """One step of a modern Hopfield network, y = alpha x + (1 - alpha) W_O softmax(h) V with
    h = alpha' h_before + (1 - alpha') Q K^T / sqrt(head width) (HOP 53, 54).

    alpha = alpha' = 0 is standard attention, computed by torch's fused kernels. That is the main scheme,
    "forward-backward"; the others are in ``leadline.nn.schemes``, without cache and kernels.

    alpha, alpha_prime    weights of the old value in [0, 1).
    learnable_alpha, learnable_alpha_prime
                          None (fixed), "layer" (one number) or "head" (one per head; alpha's then weighs
                          the head's share of the channels of y).
    start                 "zero" or "scores": what the first layer does without a state.
    kv_heads              fewer key-value heads than heads: grouped queries.
    dropout               of attention weights, in training.
    formula               how scores become weights: see ``ops.attention_weights``.
    tolerance, max_steps  of the iteration in implicit schemes; the tolerance is relative, None: near rounding.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        alpha: float = 0.5,
        alpha_prime: float = 0.5,
        scheme: str = "forward-backward",
        causal: bool = False,
        *,
        start: str = "zero",
        kv_heads: int | None = None,
        head_dim: int | None = None,
        learnable_alpha: str | None = None,
        learnable_alpha_prime: str | None = None,
        qkv_bias: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        formula: str = "softmax",
        tolerance: float | None = None,
        max_steps: int = 200,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_dim is None and dim % heads):
            raise LeadlineError(f"heads is {heads} and dim {dim}; heads must divide dim")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise LeadlineError(f"kv_heads is {kv_heads} and heads {heads}; kv_heads must divide heads")
        if learnable_alpha == "head" and dim % heads:
            raise LeadlineError(f"heads is {heads} and dim {dim}; an alpha per head needs heads to divide dim")
        check_choice("scheme", scheme, SCHEMES)
        check_choice("start", start, ("zero", "scores"))
        check_choice("formula", formula, FORMULAS)
        if scheme.startswith("backward-") and dropout:
            raise LeadlineError(f"dropout is {dropout}; the scheme {scheme} has no fixed point under it, set it to 0")
        if formula in ("sinkhorn", "symmetric") and causal:
            raise LeadlineError(f"formula is {formula!r}; doubly stochastic weights have no causal form")
        if formula == "symmetric" and kv_heads != heads:
            raise LeadlineError("formula is 'symmetric'; its keys are its queries, so kv_heads must be heads")
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.scheme, self.start, self.causal, self.dropout, self.formula = scheme, start, causal, dropout, formula
        self.tolerance, self.max_steps = tolerance, max_steps
        self.backend = "auto"  # of ops.hopfield_attention
        self.alpha = Strength("alpha", alpha, learnable=learnable_alpha, heads=heads)
        self.alpha_prime = Strength("alpha_prime", alpha_prime, learnable=learnable_alpha_prime, heads=heads)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=qkv_bias)
        self.proj = nn.Linear(heads * self.head_dim, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        mask: Tensor | None = None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """x (B, M, dim) -> (y (B, M, dim), state); with alpha' = 0 nothing is carried and the state is None.

        mask   (B, N), True = a real token, over the cached tokens and these M.
        rope   cos and sin from ``ops.rotary_table`` for rotary positions.
        cache  past keys and values, while decoding.
        """
        if x.ndim != 3 or x.shape[-1] != self.dim or 0 in x.shape:
            raise LeadlineError(f"x has shape {tuple(x.shape)}; it must be (batch, tokens, {self.dim}), none empty")
        if self.scheme != "forward-backward" or self.formula != "softmax":
            if cache is not None:
                raise LeadlineError(
                    f"scheme is {self.scheme!r} and formula {self.formula!r}; a cache needs 'forward-backward' with "
                    "'softmax', generate with cache=False (--no-cache)"
                )
            _check_mask(mask, x.shape[0], x.shape[1])
            return step(self, x, state, mask, rope)
        keys = None if mask is None else mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        if self.alpha_prime.off and rope is None and cache is None and self.kv_heads == self.heads:
            _check_mask(mask, x.shape[0], x.shape[1])
            qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim))
            out = packed_attention(qkv, mask=keys, causal=self.causal, dropout=dropout)
            return self.mix(x, self.proj(out.flatten(2))), None
        q, k, v = self.project(x)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        _check_mask(mask, x.shape[0], k.shape[2])
        if self.alpha_prime.off:
            out, state = standard_attention(q, k, v, mask=keys, causal=self.causal, dropout=dropout), None
        else:
            out, state = hopfield_attention(
                q,
                k,
                v,
                state,
                alpha_prime=self.alpha_prime(),
                start=self.start,
                mask=keys,
                causal=self.causal,
                dropout=dropout,
                backend=self.backend,
            )
        return self.mix(x, self.proj(out.transpose(1, 2).flatten(2))), state

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, heads, M, D), k and v (B, kv_heads, M, D)."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return (q, q, v) if self.formula == "symmetric" else (q, k, v)

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:
        """alpha x + (1 - alpha) attended (HOP 53)."""
        if self.alpha.off:
            return attended
        alpha = self.channel_alpha()
        return alpha * x + (1 - alpha) * attended

    def channel_alpha(self) -> float | Tensor:
        """alpha as it meets the channels: a number, or (dim,) when there is one per head."""
        alpha = self.alpha()
        if isinstance(alpha, Tensor) and alpha.ndim:
            return alpha.repeat_interleave(self.dim // self.heads)
        return alpha

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, scheme={self.scheme}, causal={self.causal}"


def _check_mask(mask: Tensor | None, batch: int, keys: int) -> None:
    if mask is not None and mask.shape != (batch, keys):
        raise LeadlineError(f"mask has shape {tuple(mask.shape)}; it must be {(batch, keys)}")
