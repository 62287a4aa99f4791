"""Captures the attention weights of any running model, from its queries and keys or its softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leadline.anatomy.calling import full_precision

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)
_CHUNK_NUMBERS = 1 << 24  # of attention weights in memory at a time
_MHA = inspect.signature(F.multi_head_attention_forward)
_HEATMAP_TOKENS = 64

_SDPA = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)

Weights = Callable[[int, int, int], Tensor]  # sample, first head, last head -> (1, h, n, n)


class CapturedAttention:
    """The attention of one layer on one batch, whose weights are computed on demand.

    Args:
        batch: Number of samples, B.
        heads: Number of heads, H.
        tokens: Number of queries, n.
        weights: A function of sample, first head and last head (excluded) that returns weights (1, h, n, keys).
        keys: Number of keys, if not n.
    """

    def __init__(self, batch: int, heads: int, tokens: int, weights: Weights, keys: int | None = None) -> None:
        self.batch, self.heads, self.tokens, self.weights = batch, heads, tokens, weights
        self.keys = tokens if keys is None else keys

    def split(self, samples: int) -> CapturedAttention:
        """Return the same attention with the samples apart, where they stand together with the heads as (B H, n, n).

        Args:
            samples: Number of samples, B.
        """
        if self.batch != 1 or samples == 1 or self.heads % samples:
            return self
        heads = self.heads // samples
        return CapturedAttention(
            samples,
            heads,
            self.tokens,
            lambda sample, low, high: self.weights(0, sample * heads + low, sample * heads + high),
            self.keys,
        )

    def chunks(self, width: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the weights in chunks of bounded size: sample, first head, weights (1, h, n, n).

        Args:
            width: Numbers per token that the caller needs beside the weights.
        """
        step = max(1, _CHUNK_NUMBERS // (self.tokens * max(self.tokens, width)))
        for sample in range(self.batch):
            for head in range(0, self.heads, step):
                yield sample, head, self.weights(sample, head, min(head + step, self.heads))

    def heatmap(self) -> Tensor:
        """Return the weights (H, m, m) of the first sample, with m = 64 at most.

        With more tokens neighbours are joined: summed as keys and averaged as queries, so that rows still sum to 1.
        """
        parts = min(self.tokens, _HEATMAP_TOKENS)
        heads = []
        for sample, _, P in self.chunks(1):
            if sample:
                break
            part = torch.arange(self.tokens, device=P.device) * parts // self.tokens
            join = F.one_hot(part, parts).float()  # (n, m)
            heads.append(((join / join.sum(0)).T @ P[0].float() @ join).cpu())
        return torch.cat(heads)


class AttentionCapture(TorchFunctionMode):
    """A mode in which every attention that runs is handed to ``receive``; results do not change.

    Attention is recognised in four ways:

    - ``scaled_dot_product_attention``, which transformers, timm and Leadline call with the final queries and keys;
    - ``multi_head_attention_forward`` of ``nn.MultiheadAttention``, whose projections are computed again;
    - a softmax over the last axis with a square result: eager attention, and Leadline's reference path;
    - a product with square weights that are at least 0 and whose rows sum to 1, for weights made in another way.

    Weights that are changed between their softmax and their product are captured as they are in the product.

    Args:
        expected_tokens: Returns the number of tokens of the attention to capture, or None if none is wanted now.
        receive: Called with each captured attention.
        miss: Called with the reason, in words, why an attention that ran is not the one to capture, and with that
            attention, within windows or to fewer keys than tokens, if its weights can be read.
    """

    def __init__(
        self,
        expected_tokens: Callable[[], int | None],
        receive: Callable[[CapturedAttention], None],
        miss: Callable[[str, CapturedAttention | None], None] = lambda reason, attention: None,
    ) -> None:
        super().__init__()
        self.expected_tokens, self.receive, self.miss = expected_tokens, receive, miss
        self.pending: Tensor | None = None  # the result of the softmax captured last, until the next product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pending is not None and func in _PRODUCTS:
            softmax, self.pending = self.pending, None
            if _is_changed(args[0], softmax):
                changed = _from_weights(args[0])
                if changed is not None:
                    self.receive(changed)
        tokens = self.expected_tokens()
        if tokens is None:
            return func(*args, **kwargs)
        captured: CapturedAttention | None = None
        if func is F.scaled_dot_product_attention:
            captured = _from_sdpa(tokens, *args, **kwargs)
        elif func is F.multi_head_attention_forward:
            with full_precision(args[0].device):
                captured = _from_mha(tokens, _MHA.bind(*args, **kwargs))
        elif func in _PRODUCTS and len(args) > 1 and _is_stochastic(args[0], tokens):
            captured = _from_weights(args[0])
        result = func(*args, **kwargs)
        if func in _SOFTMAX and _is_square(result, tokens) and _over_last(result, args, kwargs):
            captured, self.pending = _from_weights(result), result
        if captured is not None:
            self.receive(captured)
        elif (reason := _reason(func, args, kwargs, result, tokens)) is not None:
            self.miss(reason, _partial(func, args, kwargs, result, tokens))
        return result


def _is_square(x: Any, tokens: int) -> bool:
    return isinstance(x, Tensor) and x.ndim in (3, 4) and x.shape[-1] == x.shape[-2] == tokens > 1


def _over_last(result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(dim, int) and dim % result.ndim == result.ndim - 1


def _is_changed(P: Any, softmax: Tensor) -> bool:
    """Return whether P are attention weights made from those of a softmax, other than by rounding."""
    if not isinstance(P, Tensor) or P.shape != softmax.shape or P.data_ptr() == softmax.data_ptr():
        return False
    return not torch.allclose(P, softmax.to(P.dtype), atol=1e-6) and _is_stochastic(P, softmax.shape[-1])


def _reason(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tokens: int) -> str | None:
    """Return why an operation is attention, but not of all tokens to each other; None if it is none."""
    if func is F.scaled_dot_product_attention:
        query, key = args[0] if args else kwargs["query"], args[1] if len(args) > 1 else kwargs["key"]
        queries, keys = query.shape[-2], key.shape[-2]
    elif func is F.multi_head_attention_forward:
        queries, keys = len(args[0]), len(args[1])
    elif func in _SOFTMAX and result.ndim >= 3 and _over_last(result, args, kwargs):
        queries, keys = result.shape[-2:]
    else:
        return None
    if queries == tokens and keys == tokens + 1:
        return "a sink takes part in its softmax beside the tokens"
    return f"its attention is of {queries} queries to {keys} keys, and it has {tokens} tokens"


def _partial(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tokens: int
) -> CapturedAttention | None:
    """Capture attention within windows, or to fewer keys than tokens; None if its weights cannot be read."""
    if func is F.scaled_dot_product_attention:
        given = _SDPA.bind(*args, **kwargs)
        given.apply_defaults()
        query, key, mask = (given.arguments[name] for name in ("query", "key", "attn_mask"))
        if query.ndim != 4 or given.arguments["is_causal"]:
            return None
        return from_queries(query, key, mask, scale=given.arguments["scale"])
    sink = func in _SOFTMAX and result.shape[-1] == tokens + 1
    return None if func not in _SOFTMAX or result.ndim > 4 or sink else _from_weights(result)


def _is_stochastic(P: Any, tokens: int) -> bool:
    if not _is_square(P, tokens) or not P.is_floating_point() or bool((P < 0).any()):
        return False
    sums = P.float().sum(-1)
    return bool((((sums - 1).abs() < 1e-3) | (sums == 0)).all()) and bool((sums > 0).any())


def _from_weights(P: Tensor) -> CapturedAttention | None:
    """Wrap weights P (B, H, n, keys). A P of three axes is taken as the heads of one sample."""
    P = P.detach()
    P = P if P.ndim == 4 else P.unsqueeze(0)
    return CapturedAttention(
        P.shape[0], P.shape[1], P.shape[-2], lambda sample, low, high: P[sample : sample + 1, low:high], P.shape[-1]
    )


def _from_sdpa(
    tokens: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> CapturedAttention | None:
    if query.ndim == 3:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        attn_mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    if query.ndim != 4 or not query.shape[-2] == key.shape[-2] == tokens > 1:
        return None
    return from_queries(query, key, attn_mask, is_causal, scale)


def from_queries(
    q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> CapturedAttention:
    """Wrap the weights softmax(scale q k^T + mask), computed on demand.

    Args:
        q: (B, H, n, D).
        k: (B, Hkv, keys, D).
        mask: Boolean, True = may be attended to, or numbers to add; broadcastable to (B, H, n, keys).
        causal: Hide what comes after each query.
        scale: Factor of the scores; D^-0.5 by default.
    """
    q, k = q.detach(), k.detach()
    B, H, n, width = q.shape
    group = H // k.shape[1]
    scale = width**-0.5 if scale is None else scale
    if mask is not None:
        mask = mask.detach().expand(B, H, n, k.shape[2])

    def weights(sample: int, low: int, high: int) -> Tensor:
        here = slice(sample, sample + 1)
        keys = k[here, low // group : (high - 1) // group + 1]
        keys = keys.repeat_interleave(group, 1)[:, low % group :][:, : high - low]  # head i reads key head i // group
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = (q[here, low:high].to(wide) * scale) @ keys.to(wide).mT
        if mask is not None:
            part = mask[here, low:high]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        if causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0)  # a query that sees nothing gives 0

    return CapturedAttention(B, H, n, weights, k.shape[2])


def _from_mha(tokens: int, call: inspect.BoundArguments) -> CapturedAttention | None:
    """Project the queries and keys of ``multi_head_attention_forward``, (n, B, d) or (n, d), as it does itself."""
    call.apply_defaults()
    a = call.arguments
    query, key = a["query"], a["key"]
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    extra = any(a[name] is not None for name in ("bias_k", "static_k")) or a["add_zero_attn"]
    if extra or not len(query) == len(key) == tokens > 1:
        return None
    width, heads, b = a["embed_dim_to_check"], a["num_heads"], a["in_proj_bias"]
    if a["use_separate_proj_weight"]:
        w_q, w_k = a["q_proj_weight"], a["k_proj_weight"]
    else:
        w_q, w_k = a["in_proj_weight"][:width], a["in_proj_weight"][width : 2 * width]
    b_q, b_k = (None, None) if b is None else (b[:width], b[width : 2 * width])
    q, k = (
        F.linear(x, weight, offset).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (B, H, n, D)
        for x, weight, offset in ((query, w_q, b_q), (key, w_k, b_k))
    )
    bias = torch.zeros(len(q), 1, 1, tokens, dtype=q.dtype, device=q.device)
    padding, mask = (_additive(a[name], q) for name in ("key_padding_mask", "attn_mask"))
    if padding is not None:  # (B, n), or (n,) without a batch
        bias = bias + padding.view(-1, 1, 1, tokens)
    if mask is not None:  # (n, n), or (B H, n, n)
        bias = bias + (mask if mask.ndim == 2 else mask.view(-1, heads, tokens, tokens))
    return from_queries(q, k, bias)


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Convert a mask of ``nn.MultiheadAttention`` (True = hidden) to numbers to add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -torch.inf)
