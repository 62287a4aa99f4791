"""The linear-memory path: for sequences so long that no N x N tensor fits.

The state is, for each layer so far, its queries, its keys and a small tensor (2, H): what the layer did to the scores,
h <- c[0] h + c[1] q k^T, kept on the CPU unless alpha' is a tensor elsewhere. Scores are rebuilt from these inside the
kernels: l products for layer l, instead of one and a read. With a window of W layers the older ones are left out; what
is neglected has the weight alpha'^W at most.

Backward goes through the queries in strips: a kernel writes the weights P and the gradient G of the scores of a strip,
strip x N, and large matrix products do the rest, since G meets the queries and keys of all layers at once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from leadline.ops import backends
from leadline.ops.hopfield import linear_kernels as kernels
from leadline.ops.hopfield.reference import check_heads, check_start
from leadline.ops.launch import Launch

PIECE = 2**27  # bytes of the largest temporary tensor
STRIP = 2048  # queries of a strip, where that fits: every strip reads and writes the gradients of all keys
FORWARD, GRADIENT = (128, 128, 8, 4), (64, 64, 4, 3)  # queries, keys, warps, stages: the best of a sweep on an H200


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None,
    alpha_prime: float | Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> str | None:
    """Why these inputs cannot take the linear-memory path, or None."""
    if bias is not None:
        return "a bias is carried"
    if isinstance(alpha_prime, Tensor) and alpha_prime.requires_grad:
        return "alpha' is learned"
    if state is not None and not is_state(state):
        return "the state comes from another path"
    return backends.unsupported(q, k, v, mask) or backends.too_large(q[:1], k[:1], v[:1])


def is_state(state: tuple[Tensor, ...]) -> bool:
    return len(state) % 3 == 0


def hopfield_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None = None,
    *,
    alpha_prime: float | Tensor = 0.5,
    start: str = "zero",
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See ``leadline.ops.hopfield_attention``."""
    check_start(start)
    check_heads(q, k, v, alpha_prime, dropout)
    state = state or ()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep = torch.as_tensor(alpha_prime, dtype=torch.float32).expand(q.shape[1])
    new = torch.ones_like(keep) if start == "scores" and not state else 1 - keep
    state = (*state, q, k, torch.stack((keep, scale * new)))
    if window is not None:
        state = state[-3 * window :]
    seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
    padding = None if mask is None else mask[:, 0, 0].contiguous()
    v = v if v.stride(-1) == 1 else v.contiguous()
    out, _ = _forward(list(state[0::3]), list(state[1::3]), list(state[2::3]), v, padding, seed, causal, dropout)
    return out, state


@torch.library.custom_op("leadline::hopfield_linear_forward", mutates_args=())
def _forward(
    queries: list[Tensor],
    keys: list[Tensor],
    strengths: list[Tensor],
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(queries[-1])
    table, _, shares = _tables(strengths, v)
    rows, columns, options = _tuning(v, FORWARD)
    for b, heads in _pieces(queries, queries[0].shape[1] // v.shape[1]):
        q, k, c, values = _side_by_side(queries, keys, table, shares, v, b, heads)
        o = out[b, heads]
        launch = kernels.forward_kernel.prepare(
            (math.ceil(q.shape[1] / rows), q.shape[0]),
            (*values.stride()[:2], *o.stride()[:2], q.shape[1], len(queries)),
            (shares is not None, causal, mask is not None, dropout, *_constants(v, rows, columns)),
            **options,
        )
        launch((q, k, c, values, o, lse[b, heads], None if mask is None else mask[b], _shifted(seed, b, heads)))
    return out, lse


@_forward.register_fake
def _(queries, keys, strengths, v, mask, seed, causal, dropout):  # type: ignore[no-untyped-def]
    return _outputs(queries[-1])


@torch.library.custom_op("leadline::hopfield_linear_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    strengths: list[Tensor],
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    dropout: float,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The gradients of all queries, of all keys, and of v."""
    _, H, N, D = out.shape
    d_queries, d_keys, d_v = _gradients(queries, keys, v)
    table, weights, shares = _tables(strengths, v)
    rows, columns, options = _tuning(v, GRADIENT)
    group = H // v.shape[1]
    for b, heads in _pieces(queries, group, STRIP):
        q, k, c, values = _side_by_side(queries, keys, table, shares, v, b, heads)
        do = d_out[b, heads]
        delta = (out[b, heads].float() * do.float()).sum(-1)
        count, width = q.shape[0], q.shape[2]
        dq = torch.empty(count, N, width, dtype=torch.float32, device=v.device)
        dk = torch.zeros_like(dq)
        dv = torch.zeros(count, N, D, dtype=torch.float32, device=v.device)
        strip = max(rows, PIECE // (count * N * v.element_size()) // rows * rows)
        for first in range(0, N, strip):
            end = min(N, first + strip)
            seen = end if causal else N
            p, g = (torch.empty(count, end - first, seen, dtype=v.dtype, device=v.device) for _ in range(2))
            launch = kernels.gradient_kernel.prepare(
                (math.ceil(seen / columns), math.ceil((end - first) / rows), count),
                (*values.stride()[:2], *do.stride()[:2], first, seen, end - first, N, len(queries)),
                (shares is not None, causal, mask is not None, dropout, *_constants(v, rows, columns)),
                **options,
            )
            padding = None if mask is None else mask[b]
            launch((q, k, c, values, do, lse[b, heads], delta, padding, _shifted(seed, b, heads), p, g))
            _add_product(dq[:, first:end], g, k[:, :seen], beta=0)
            _add_product(dk[:, :seen], g.mT, q[:, first:end])
            _add_product(dv[:, :seen], p.mT, do[:, first:end])
        for m, (to_q, to_k) in enumerate(zip(d_queries, d_keys, strict=True)):
            part, w = slice(m * D, (m + 1) * D), weights[m, heads]
            # dk came from the queries as they are in q: weighted already, but for what all layers have in common
            _copy(dq[..., part], to_q[b, heads], w)
            _put(to_k, b, heads, group, dk[..., part], w if shares is None else weights[-1, heads])
        _put(d_v, b, heads, group, dv)
    return d_queries, d_keys, d_v


@_backward.register_fake
def _(d_out, queries, keys, strengths, v, *rest):  # type: ignore[no-untyped-def]
    return _gradients(queries, keys, v)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    queries, keys, strengths, v, mask, seed, *ctx.options = inputs
    ctx.layers = len(queries)
    ctx.save_for_backward(*queries, *keys, *strengths, v, mask, seed, *output)


def _differentiate(ctx, d_out, _):  # type: ignore[no-untyped-def]
    L, saved = ctx.layers, ctx.saved_tensors
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_queries, d_keys, d_v = _backward(
        d_out, list(saved[:L]), list(saved[L : 2 * L]), list(saved[2 * L : 3 * L]), *saved[3 * L :], *ctx.options
    )
    return d_queries, d_keys, [None] * L, d_v, *[None] * 4


_forward.register_autograd(_differentiate, setup_context=_remember)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, N, D = q.shape
    out = q.new_empty_strided(q.shape, (N * H * D, D, H * D, 1))  # laid out for the projection that follows
    return out, q.new_empty(B, H, N, dtype=torch.float32)


def _gradients(queries: list[Tensor], keys: list[Tensor], v: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    fresh = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)  # noqa: E731
    return [fresh(q) for q in queries], [fresh(k) for k in keys], fresh(v)


def _pieces(queries: list[Tensor], group: int, strip: int = 0) -> list[tuple[int, slice]]:
    """Sample and heads that are worked on at once: as many heads as keep the temporary tensors small, which are the
    gradients of all keys, in float32, and a strip of scores."""
    B, H, N, D = queries[0].shape
    most = PIECE // (N * max(4 * len(queries) * D, strip * queries[0].element_size()))
    count = max(group, min(H, most // group * group))  # heads that share their keys stay together
    return [(b, slice(h, min(H, h + count))) for b in range(B) for h in range(0, H, count)]


def _side_by_side(
    queries: list[Tensor], keys: list[Tensor], table: Tensor, shares: Tensor | None, v: Tensor, b: int, heads: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys (heads, N, L D), strengths (L, 2, heads), values (heads, N, D) of one piece."""
    _, H, N, D = queries[0].shape
    group = H // v.shape[1]
    shared = slice(heads.start // group, heads.stop // group)
    q = v.new_empty(heads.stop - heads.start, N, len(queries), D)
    k = v.new_empty(shared.stop - shared.start, N, len(queries), D)
    for m, (from_q, from_k) in enumerate(zip(queries, keys, strict=True)):
        _copy(from_q[b, heads], q[:, :, m], None if shares is None else shares[m, heads])
        _copy(from_k[b, shared], k[:, :, m])
    q, k, values = q.flatten(2), k.flatten(2), v[b, shared]
    if group > 1:
        k, values = k.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    return q, k, table[..., heads].contiguous(), values


def _tables(strengths: list[Tensor], v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """On v's device: the strengths (L, 2, H), each layer's weight in the last layer's scores (L, H), and that weight
    relative to the last layer's if queries can be multiplied by it without rounding."""
    table = torch.stack([strength.cpu() for strength in strengths])
    weights = _weights(table)
    shares = weights / weights[-1]
    ready = bool((torch.frexp(shares).mantissa == 0.5).all())  # powers of 2
    # from pageable memory this does not wait for the device, and the copy is made before it returns
    to_device = lambda x, dtype: x.to(v.device, dtype, non_blocking=True)  # noqa: E731
    return (
        to_device(table, torch.float32),
        to_device(weights, torch.float32),
        to_device(shares, torch.float32) if ready else None,
    )


def _weights(table: Tensor) -> Tensor:
    """(L, H), float64: the weight of each layer's q k^T in the last layer's scores."""
    weights, later = [], torch.ones(table.shape[-1], dtype=torch.float64)
    for keep, new in table.double().flip(0):
        weights.append(new * later)
        later = later * keep
    return torch.stack(weights[::-1])


def _add_product(acc: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
    """acc (float32) = beta acc + a b, accumulated in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.baddbmm(acc, a, b, out_dtype=torch.float32, beta=beta, out=acc)
    else:
        torch.baddbmm(acc, a.float(), b.float(), beta=beta, out=acc)


def _put(to: Tensor, b: int, heads: slice, group: int, grad: Tensor, weight: Tensor | None = None) -> None:
    """Write the gradients (heads, N, D) of keys or values; query heads that share one are added up."""
    place = to[b, heads.start // group : heads.stop // group]
    if group == 1:
        _copy(grad, place, weight)
    else:
        grad = grad if weight is None else grad * weight[:, None, None]
        place.copy_(grad.unflatten(0, (-1, group)).sum(1))


def _copy(x: Tensor, to: Tensor, factor: Tensor | None = None) -> None:
    """to = factor x, (heads, N, D) with any strides but the last: much faster than torch's general kernels for that."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    launch = _copy_launch(x.device, x.dtype, to.dtype, x.shape, x.stride(), to.stride(), factor is None)
    launch((x, to, factor))


@lru_cache(maxsize=1024)
def _copy_launch(
    device: torch.device,
    x_dtype: torch.dtype,
    to_dtype: torch.dtype,
    shape: tuple[int, ...],
    x: tuple[int, ...],
    to: tuple[int, ...],
    plain: bool,
) -> Launch:
    """x, to: strides."""
    heads, N, D = shape
    grid, block = (math.ceil(N / 64), heads), max(16, triton.next_power_of_2(D))
    return kernels.copy_kernel.prepare(grid, (*x[:2], *to[:2], N), (D, block, 64), num_warps=4)


def _shifted(seed: Tensor | None, b: int, heads: slice) -> Tensor | None:
    """A seed of its own for each piece; within one it differs by the head."""
    return None if seed is None else seed + 1009 * b + heads.start


def _tuning(v: Tensor, best: tuple[int, int, int, int]) -> tuple[int, int, dict[str, Any]]:
    """Queries and keys of a program's block of scores, and options of the launch."""
    rows, columns, warps, stages = (64, 64, 4, 1) if v.dtype == torch.float32 else best
    if v.is_cuda:  # as many stages as fit beside one more tile
        line = v.element_size() * triton.next_power_of_2(v.shape[-1])
        card: Any = torch.cuda.get_device_properties(v.device)
        room = card.shared_memory_per_block_optin - rows * line
        stages = max(1, min(stages, room // ((rows + columns) * line)))
    return rows, columns, {"num_warps": warps, "num_stages": stages}


def _constants(v: Tensor, rows: int, columns: int) -> tuple[object, ...]:
    """D, BLOCK_D, BM, BN, PRECISION of the kernels."""
    D, single = v.shape[-1], v.dtype == torch.float32
    return D, max(16, triton.next_power_of_2(D)), rows, columns, "ieee" if single else "tf32"
