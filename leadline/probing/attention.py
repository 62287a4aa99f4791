"""Attention weights of any model: caught where queries and keys enter the kernel, rebuilt a few heads at a time."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leadline.metrics import attention_entropy, delta, omega, second_eigenvalue
from leadline.probing.tally import ENTROPY_BIN, Histogram, Mean

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)
_NUMBERS_AT_A_TIME = 1 << 24  # of a chunk of attention matrices
_MHA = inspect.signature(F.multi_head_attention_forward)
_HEATMAP_TOKENS = 64

Weights = Callable[[int, int, int], Tensor]  # sample, first head, last head -> (1, h, n, n)


@contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Our own sums: without gradients, and in full precision where the model runs under autocast."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class Caught:
    """The attention of one layer on one batch: B samples, H heads, n tokens, and how to get the weights."""

    def __init__(self, batch: int, heads: int, tokens: int, weights: Weights) -> None:
        self.batch, self.heads, self.tokens, self.weights = batch, heads, tokens, weights

    def chunks(self, width: int) -> Iterator[tuple[int, int, Tensor]]:
        """(sample, first head, weights (1, h, n, n)), in chunks of bounded size."""
        step = max(1, _NUMBERS_AT_A_TIME // (self.tokens * max(self.tokens, width)))
        for sample in range(self.batch):
            for head in range(0, self.heads, step):
                yield sample, head, self.weights(sample, head, min(head + step, self.heads))


class AttentionCatcher(TorchFunctionMode):
    """Sees every attention that runs under it, hands it to ``receive`` and changes nothing.

    Three doors lead in: ``scaled_dot_product_attention`` (transformers, timm and our fused path, after rotary angles
    and norms of queries and keys), ``multi_head_attention_forward`` (``nn.MultiheadAttention``; its projections are
    done again), and a softmax over the last axis of a square result (eager attention, our reference path). Weights
    that are made in another way are known by the product they enter: square, at least 0, with rows that sum to 1.
    ``wanted()`` says whether anybody listens, and for how many tokens.
    """

    def __init__(self, wanted: Callable[[], int | None], receive: Callable[[Caught], None]) -> None:
        super().__init__()
        self.wanted, self.receive = wanted, receive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tokens = self.wanted()
        if tokens is None:
            return func(*args, **kwargs)
        caught: Caught | None = None
        if func is F.scaled_dot_product_attention:
            caught = _from_sdpa(tokens, *args, **kwargs)
        elif func is F.multi_head_attention_forward:
            with measuring(args[0].device):
                caught = _from_mha(tokens, _MHA.bind(*args, **kwargs))
        elif func in _PRODUCTS and len(args) > 1 and _is_stochastic(args[0], tokens):
            caught = _from_weights(args[0])
        result = func(*args, **kwargs)
        if func in _SOFTMAX and _is_square(result, tokens) and _over_last(result, args, kwargs):
            caught = _from_weights(result)
        if caught is not None:
            self.receive(caught)
        return result


class AttentionTally:
    """What one layer's heads do: figures per sample and head, then means."""

    def __init__(self) -> None:
        self.entropy, self.delta, self.omega, self.second = Mean(), Mean(), Mean(), Mean()
        self.uniform = Mean()
        self.entropies: Histogram | None = None

    def add(self, caught: Caught, X: Tensor | None, mask: Tensor | None) -> None:
        """X (B, n, d) is what entered the attention, mask (B, n) is True at real tokens."""
        width = 1 if X is None else X.shape[-1]
        self.entropies = self.entropies or Histogram(0.0, ENTROPY_BIN, 1, caught.heads)
        rows: dict[str, list[Tensor]] = defaultdict(list)
        for sample, head, P in caught.chunks(width):
            real = None if mask is None else mask[sample : sample + 1]
            P = P.float() if P.dtype in (torch.float16, torch.bfloat16) else P
            P = P if real is None else P.masked_fill(~real[:, None, :, None], 0)
            entropy = attention_entropy(P)[0]  # (h, n)
            rows["queries"].append(entropy if real is None else entropy[:, real[0]])
            rows["delta"].append(delta(P, real, tolerance=1e-6)[0])
            rows["second"].append(second_eigenvalue(P, real, tolerance=1e-6)[0])
            if X is not None:
                rows["omega"].append(omega(X[sample : sample + 1].to(P), P, real)[0])
            if head + len(entropy) == caught.heads:  # the last heads of this sample
                whole = {name: torch.cat(parts)[None] for name, parts in rows.items()}  # (1, H) or (1, H, n)
                self.uniform.add(_uniform_entropy(P, real))
                self.entropies.add(whole["queries"][0])
                self.entropy.add(whole["queries"].mean(-1))
                self.delta.add(whole["delta"])
                self.second.add(whole["second"])
                if X is not None:
                    self.omega.add(whole["omega"])
                rows.clear()

    def distributions(self) -> list[Any] | None:
        if self.entropies is None:
            return None
        return [self.entropies.distribution(row) for row in range(len(self.entropies.counts))]


def heatmap(caught: Caught) -> Tensor:
    """(H, m, m): the heads of the first sample. Beyond m = 64 tokens neighbours are joined, summed as keys and
    averaged as queries, so that rows still sum to 1."""
    parts = min(caught.tokens, _HEATMAP_TOKENS)
    heads = []
    for sample, _, P in caught.chunks(1):
        if sample:
            break
        part = torch.arange(caught.tokens, device=P.device) * parts // caught.tokens
        join = F.one_hot(part, parts).float()  # (n, m)
        heads.append(((join / join.sum(0)).T @ P[0].float() @ join).cpu())
    return torch.cat(heads)


def _uniform_entropy(P: Tensor, real: Tensor | None) -> Tensor:
    """(1,): mean over queries of log(keys in sight). Causal is what has nothing above its diagonal."""
    n = P.shape[-1]
    real = torch.ones(1, n, dtype=torch.bool, device=P.device) if real is None else real
    if P.triu(1).any():
        return real.sum(-1).double().log()
    return real.cumsum(-1)[real].double().log().mean()[None]


def _is_square(x: Any, tokens: int) -> bool:
    return isinstance(x, Tensor) and x.ndim in (3, 4) and x.shape[-1] == x.shape[-2] == tokens > 1


def _over_last(result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(dim, int) and dim % result.ndim == result.ndim - 1


def _is_stochastic(P: Any, tokens: int) -> bool:
    if not _is_square(P, tokens) or not P.is_floating_point() or bool((P < 0).any()):
        return False
    sums = P.float().sum(-1)
    return bool((((sums - 1).abs() < 1e-3) | (sums == 0)).all()) and bool((sums > 0).any())


def _from_weights(P: Tensor) -> Caught | None:
    """P (B, H, n, n), or (H, n, n) or (B, n, n) taken as one sample's heads."""
    P = P.detach()
    P = P if P.ndim == 4 else P.unsqueeze(0)
    return Caught(P.shape[0], P.shape[1], P.shape[-1], lambda sample, low, high: P[sample : sample + 1, low:high])


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
) -> Caught | None:
    if query.ndim == 3:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        attn_mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    if query.ndim != 4 or not query.shape[-2] == key.shape[-2] == tokens > 1:
        return None
    return from_queries(query, key, attn_mask, is_causal, scale)


def from_queries(
    q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Caught:
    """Weights softmax(scale q k^T + mask), built when asked for; q (B, H, n, D), k (B, Hkv, n, D)."""
    q, k = q.detach(), k.detach()
    B, H, n, width = q.shape
    group = H // k.shape[1]
    scale = width**-0.5 if scale is None else scale
    if mask is not None:
        mask = mask.detach().expand(B, H, n, n)

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

    return Caught(B, H, n, weights)


def _from_mha(tokens: int, call: inspect.BoundArguments) -> Caught | None:
    """The queries and keys of ``multi_head_attention_forward``, (n, B, d) or (n, d), projected as it does."""
    call.apply_defaults()
    a = call.arguments
    query, key = a["query"], a["key"]
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    extra = any(a[name] is not None for name in ("bias_k", "static_k")) or a["add_zero_attn"]
    if extra or not len(query) == len(key) == tokens > 1:
        return None
    width, heads, bias = a["embed_dim_to_check"], a["num_heads"], a["in_proj_bias"]
    if a["use_separate_proj_weight"]:
        w_q, w_k = a["q_proj_weight"], a["k_proj_weight"]
    else:
        w_q, w_k = a["in_proj_weight"][:width], a["in_proj_weight"][width : 2 * width]
    b_q, b_k = (None, None) if bias is None else (bias[:width], bias[width : 2 * width])
    q, k = (
        F.linear(x, w, b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (B, H, n, D)
        for x, w, b in ((query, w_q, b_q), (key, w_k, b_k))
    )
    added = torch.zeros(len(q), 1, 1, tokens, dtype=q.dtype, device=q.device)
    padding, mask = (_to_add(a[name], q) for name in ("key_padding_mask", "attn_mask"))
    if padding is not None:  # (B, n), or (n,) without a batch
        added = added + padding.view(-1, 1, 1, tokens)
    if mask is not None:  # (n, n), or (B H, n, n)
        added = added + (mask if mask.ndim == 2 else mask.view(-1, heads, tokens, tokens))
    return from_queries(q, k, added)


def _to_add(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of ``nn.MultiheadAttention``, True = hidden, as numbers to add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -torch.inf)
