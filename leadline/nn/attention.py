"""Hopfield attention: self-attention that carries scores through depth and retains its input."""

from __future__ import annotations

from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice
from leadline.nn.cache import LayerCache
from leadline.nn.schemes import SCHEMES, step
from leadline.nn.strength import Strength
from leadline.ops import FORMULAS, hopfield_attention, packed_attention, rotate, standard_attention


class HopfieldAttention(nn.Module):
    """Self-attention as one step of a modern Hopfield network (HOP 53, 54).

    ::

        h = alpha' h_before + (1 - alpha') Q K^T / sqrt(head width)
        y = alpha x + (1 - alpha) W_O softmax(h) V

    alpha = alpha' = 0 is standard attention, computed by torch's fused kernels. These formulas are the main scheme,
    "forward-backward". The other schemes are in ``leadline.nn.schemes``; they have no cache and no kernels.

    Args:
        dim: Width of the tokens.
        heads: Number of heads of the queries.
        alpha: Weight of the input x in y, in [0, 1).
        alpha_prime: Weight of the old scores in h, in [0, 1).
        scheme: Discretisation of the Hopfield dynamics, one of ``leadline.nn.schemes.SCHEMES``.
        causal: Let a token see itself and the tokens before it only.
        start: What the first layer does without a state, "zero" or "scores"; see ``ops.hopfield_attention``.
        kv_heads: Number of heads of keys and values, a divisor of ``heads`` (grouped queries). None: ``heads``.
        head_dim: Width of a head. None: ``dim / heads``.
        learnable_alpha: None (fixed), "layer" (one number) or "head". A head's alpha weighs its share of the
            channels of y.
        learnable_alpha_prime: None (fixed), "layer" (one number) or "head" (one number per head).
        qkv_bias: Whether the maps to queries, keys and values have a bias.
        bias: Whether the output map W_O has a bias.
        dropout: Probability of dropping an attention weight in training.
        formula: How scores become weights; see ``ops.attention_weights``.
        tolerance: Relative tolerance of the iteration in implicit schemes. None: near rounding.
        max_steps: Limit of that iteration.

    Raises:
        LeadlineError: An option is not allowed, or two of them do not fit together.
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
        self.backend = "auto"  # argument of ops.hopfield_attention
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
        """Apply attention to M tokens that see N: themselves and, while decoding, those in the cache.

        Args:
            x: Tokens (B, M, dim).
            state: State that the layer before returned; None at the first layer.
            mask: Boolean (B, N), True = a real token, over the cached tokens and these M.
            rope: Cosines and sines of rotary positions, from ``ops.rotary_table``.
            cache: Keys and values of past tokens. These M tokens are added to it.

        Returns:
            y (B, M, dim), and the state for the next layer. With alpha' = 0 nothing is carried and it is None.
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
        """Return q (B, heads, M, D), and k and v (B, kv_heads, M, D), of the tokens x (B, M, dim)."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return (q, q, v) if self.formula == "symmetric" else (q, k, v)

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return alpha x + (1 - alpha) attended (HOP 53), all (B, M, dim)."""
        if self.alpha.off:
            return attended
        alpha = self.channel_alpha()
        return alpha * x + (1 - alpha) * attended

    def channel_alpha(self) -> float | Tensor:
        """Return the alpha of the channels: a number, or a tensor (dim,) when there is one per head."""
        alpha = self.alpha()
        if isinstance(alpha, Tensor) and alpha.ndim:
            return alpha.repeat_interleave(self.dim // self.heads)
        return alpha

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, scheme={self.scheme}, causal={self.causal}"


def _check_mask(mask: Tensor | None, batch: int, keys: int) -> None:
    if mask is not None and mask.shape != (batch, keys):
        raise LeadlineError(f"mask has shape {tuple(mask.shape)}; it must be {(batch, keys)}")
