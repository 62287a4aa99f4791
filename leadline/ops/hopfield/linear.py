"""The linear-memory path of Hopfield attention, for sequences so long that no N x N tensor fits.

The state holds three tensors for each layer so far: its queries, its keys and its strengths c (2, H). They say what the
layer did to the scores, h <- c[0] h + c[1] q k^T, and lie on the CPU unless alpha' is a tensor elsewhere. The kernels
rebuild the scores from these: l products for layer l, instead of one product and a read. With a window of W layers the
older ones are left out; the weight of what is neglected is alpha'^W at most.

The backward pass goes through the queries in strips. A kernel writes the weights P and the gradient G of a strip's
scores, both strip x N. Large matrix products do the rest, since G meets the queries and keys of all layers at once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from leadline.ops import backends
from leadline.ops.hopfield import linear_kernels as kernels
from leadline.ops.hopfield.reference import check_heads, check_start
from leadline.ops.launch import Launch

PIECE = 2**27  # bytes of the largest temporary tensor
STRIP = 2048  # queries of a strip, where that fits: every strip reads and writes the gradients of all keys
PARTS = 3  # tensors that a layer adds to the state: queries, keys, strengths


class Tiling(NamedTuple):
    """Queries (rows) and keys (columns) of a program's block of scores, and options of its launch."""

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def speed(self) -> dict[str, Any]:
        """Triton's options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# the best of a sweep on an H200, see docs/kernels.md
FORWARD = Tiling(rows=128, columns=128, warps=8, stages=4)
GRADIENT = Tiling(rows=64, columns=64, warps=4, stages=3)
SINGLE = Tiling(rows=64, columns=64, warps=4, stages=1)  # for float32


class Tables(NamedTuple):
    """The effect of the layers on the scores, on the device of the values."""

    strengths: Tensor  # (L, 2, H)
    weights: Tensor  # (L, H), of each layer in the last layer's scores
    shares: Tensor | None  # (L, H), weights relative to the last layer's, if queries can take them without rounding


class Piece(NamedTuple):
    """A sample of the batch and some of its heads, computed at once."""

    sample: int
    heads: slice


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None,
    alpha_prime: float | Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> str | None:
    """Return why these inputs cannot take the linear-memory path, or None."""
    if bias is not None:
        return "a bias is carried"
    if isinstance(alpha_prime, Tensor) and alpha_prime.requires_grad:
        return "alpha' is learned"
    if state is not None and not is_state(state):
        return "the state comes from another path"
    return backends.unsupported(q, k, v, mask) or backends.too_large(q[:1], k[:1], v[:1])


def is_state(state: tuple[Tensor, ...]) -> bool:
    """Return whether a state comes from this path; those of the other paths are one tensor."""
    return len(state) % PARTS == 0


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
    """Compute ``leadline.ops.hopfield_attention`` with the linear-memory kernels."""
    check_start(start)
    check_heads(q, k, v, alpha_prime, dropout)
    state = state or ()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep = torch.as_tensor(alpha_prime, dtype=torch.float32).expand(q.shape[1])
    new = torch.ones_like(keep) if start == "scores" and not state else 1 - keep
    state = (*state, q, k, torch.stack((keep, scale * new)))
    if window is not None:
        state = state[-PARTS * window :]
    seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
    padding = None if mask is None else mask[:, 0, 0].contiguous()
    v = v if v.stride(-1) == 1 else v.contiguous()
    queries, keys, strengths = (list(state[part::PARTS]) for part in range(PARTS))
    out, _ = _forward(queries, keys, strengths, v, padding, seed, causal, dropout)
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
    """Return out and lse."""
    out, lse = _outputs(queries[-1])
    tables, tiling = _tables(strengths, v), _tuning(v, FORWARD)
    constants = _constants(v, tiling, ready=tables.shares is not None, causal=causal, mask=mask, dropout=dropout)
    for piece in _pieces(queries, queries[0].shape[1] // v.shape[1]):
        b, heads = piece
        q, k, c, values = _side_by_side(queries, keys, tables, v, piece)
        o = out[b, heads]
        launch = kernels.forward_kernel.prepare(
            (math.ceil(q.shape[1] / tiling.rows), q.shape[0]),
            (*values.stride()[:2], *o.stride()[:2], q.shape[1], len(queries)),
            constants,
            **tiling.speed,
        )
        launch((q, k, c, values, o, lse[b, heads], None if mask is None else mask[b], _shifted(seed, piece)))
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
    """Return the gradients of all queries, of all keys, and of v."""
    _, H, N, D = out.shape
    d_queries, d_keys, d_v = _gradients(queries, keys, v)
    tables, tiling = _tables(strengths, v), _tuning(v, GRADIENT)
    constants = _constants(v, tiling, ready=tables.shares is not None, causal=causal, mask=mask, dropout=dropout)
    group = H // v.shape[1]
    for piece in _pieces(queries, group, STRIP):
        b, heads = piece
        q, k, c, values = _side_by_side(queries, keys, tables, v, piece)
        do = d_out[b, heads]
        delta = (out[b, heads].float() * do.float()).sum(-1)
        count, width = q.shape[0], q.shape[2]
        dq = torch.empty(count, N, width, dtype=torch.float32, device=v.device)
        dk = torch.zeros_like(dq)
        dv = torch.zeros(count, N, D, dtype=torch.float32, device=v.device)
        strip = max(tiling.rows, PIECE // (count * N * v.element_size()) // tiling.rows * tiling.rows)
        for first in range(0, N, strip):
            end = min(N, first + strip)
            seen = end if causal else N
            p, g = (torch.empty(count, end - first, seen, dtype=v.dtype, device=v.device) for _ in range(2))
            launch = kernels.gradient_kernel.prepare(
                (math.ceil(seen / tiling.columns), math.ceil((end - first) / tiling.rows), count),
                (*values.stride()[:2], *do.stride()[:2], first, seen, end - first, N, len(queries)),
                constants,
                **tiling.speed,
            )
            padding = None if mask is None else mask[b]
            launch((q, k, c, values, do, lse[b, heads], delta, padding, _shifted(seed, piece), p, g))
            _add_product(dq[:, first:end], g, k[:, :seen], beta=0)
            _add_product(dk[:, :seen], g.mT, q[:, first:end])
            _add_product(dv[:, :seen], p.mT, do[:, first:end])
        for m, (to_q, to_k) in enumerate(zip(d_queries, d_keys, strict=True)):
            part, weight = slice(m * D, (m + 1) * D), tables.weights[m, heads]
            # dk came from the queries as they are in q: weighted already, but for what all layers have in common
            _copy(dq[..., part], to_q[b, heads], weight)
            _put(to_k, piece, group, dk[..., part], weight if tables.shares is None else tables.weights[-1, heads])
        _put(d_v, piece, group, dv)
    return d_queries, d_keys, d_v


@_backward.register_fake
def _(d_out, queries, keys, strengths, v, *rest):  # type: ignore[no-untyped-def]
    return _gradients(queries, keys, v)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    queries, keys, strengths, v, mask, seed, ctx.causal, ctx.dropout = inputs
    ctx.layers = len(queries)
    ctx.save_for_backward(*queries, *keys, *strengths, v, mask, seed, *output)


def _differentiate(ctx, d_out, _):  # type: ignore[no-untyped-def]
    L, saved = ctx.layers, ctx.saved_tensors
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    queries, keys, strengths = (list(saved[part * L : (part + 1) * L]) for part in range(PARTS))
    v, mask, seed, out, lse = saved[PARTS * L :]
    d_queries, d_keys, d_v = _backward(
        d_out, queries, keys, strengths, v, mask, seed, out, lse, ctx.causal, ctx.dropout
    )
    return d_queries, d_keys, [None] * L, d_v, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, N, D = q.shape
    out = q.new_empty_strided(q.shape, (N * H * D, D, H * D, 1))  # laid out for the projection that follows
    return out, q.new_empty(B, H, N, dtype=torch.float32)


def _gradients(queries: list[Tensor], keys: list[Tensor], v: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    fresh = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)  # noqa: E731
    return [fresh(q) for q in queries], [fresh(k) for k in keys], fresh(v)


def _pieces(queries: list[Tensor], group: int, strip: int = 0) -> list[Piece]:
    """Cut the batch into pieces that keep the temporary tensors small.

    Those are the gradients of all keys, in float32, and a strip of scores.
    """
    B, H, N, D = queries[0].shape
    most = PIECE // (N * max(4 * len(queries) * D, strip * queries[0].element_size()))
    count = max(group, min(H, most // group * group))  # heads that share their keys stay together
    return [Piece(b, slice(h, min(H, h + count))) for b in range(B) for h in range(0, H, count)]


def _side_by_side(
    queries: list[Tensor], keys: list[Tensor], tables: Tables, v: Tensor, piece: Piece
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries and keys (heads, N, L D), strengths (L, 2, heads) and values (heads, N, D) of one piece."""
    _, H, N, D = queries[0].shape
    b, heads = piece
    group = H // v.shape[1]
    shared = slice(heads.start // group, heads.stop // group)
    q = v.new_empty(heads.stop - heads.start, N, len(queries), D)
    k = v.new_empty(shared.stop - shared.start, N, len(queries), D)
    for m, (from_q, from_k) in enumerate(zip(queries, keys, strict=True)):
        _copy(from_q[b, heads], q[:, :, m], None if tables.shares is None else tables.shares[m, heads])
        _copy(from_k[b, shared], k[:, :, m])
    q, k, values = q.flatten(2), k.flatten(2), v[b, shared]
    if group > 1:
        k, values = k.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    return q, k, tables.strengths[..., heads].contiguous(), values


def _tables(strengths: list[Tensor], v: Tensor) -> Tables:
    """Combine what the layers do to the scores, and put it on v's device."""
    table = torch.stack([strength.cpu() for strength in strengths])
    weights = _weights(table)
    shares = weights / weights[-1]
    ready = bool((torch.frexp(shares).mantissa == 0.5).all())  # powers of 2

    def upload(x: Tensor) -> Tensor:
        # from pageable memory this does not wait for the device, and the copy is made before it returns
        return x.to(v.device, torch.float32, non_blocking=True)

    return Tables(upload(table), upload(weights), upload(shares) if ready else None)


def _weights(table: Tensor) -> Tensor:
    """Return the weight of each layer's q k^T in the last layer's scores: (L, 2, H) -> (L, H), float64."""
    weights, later = [], torch.ones(table.shape[-1], dtype=torch.float64)
    for keep, new in table.double().flip(0):
        weights.append(new * later)
        later = later * keep
    return torch.stack(weights[::-1])


def _add_product(acc: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
    """Compute acc = beta acc + a b in place; acc is float32 and sums are in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.baddbmm(acc, a, b, out_dtype=torch.float32, beta=beta, out=acc)
    else:
        torch.baddbmm(acc, a.float(), b.float(), beta=beta, out=acc)


def _put(to: Tensor, piece: Piece, group: int, grad: Tensor, weight: Tensor | None = None) -> None:
    """Write the gradients (heads, N, D) of keys or values; query heads that share one are added up."""
    b, heads = piece
    place = to[b, heads.start // group : heads.stop // group]
    if group == 1:
        _copy(grad, place, weight)
    else:
        grad = grad if weight is None else grad * weight[:, None, None]
        place.copy_(grad.unflatten(0, (-1, group)).sum(1))


def _copy(x: Tensor, to: Tensor, factor: Tensor | None = None) -> None:
    """Write factor x to ``to``, both (heads, N, D) with any strides but the last.

    This is much faster than torch's general kernels.
    """
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
    """Prepare the copy kernel; x and to are strides."""
    heads, N, D = shape
    grid, block = (math.ceil(N / 64), heads), max(16, triton.next_power_of_2(D))
    return kernels.copy_kernel.prepare(grid, (*x[:2], *to[:2], N), {"D": D, "BLOCK_D": block, "ROWS": 64}, num_warps=4)


def _shifted(seed: Tensor | None, piece: Piece) -> Tensor | None:
    """Give each piece a seed of its own; within a piece it differs by the head."""
    return None if seed is None else seed + 1009 * piece.sample + piece.heads.start


def _tuning(v: Tensor, best: Tiling) -> Tiling:
    """Choose the tiling for values v: ``best`` with as many stages as fit into shared memory beside one more tile."""
    tiling = SINGLE if v.dtype == torch.float32 else best
    if not v.is_cuda:
        return tiling
    line = v.element_size() * triton.next_power_of_2(v.shape[-1])
    card: Any = torch.cuda.get_device_properties(v.device)
    room = card.shared_memory_per_block_optin - tiling.rows * line
    stages = max(1, min(tiling.stages, room // ((tiling.rows + tiling.columns) * line)))
    return tiling._replace(stages=stages)


def _constants(
    v: Tensor, tiling: Tiling, *, ready: bool, causal: bool, mask: Tensor | None, dropout: float
) -> dict[str, Any]:
    """Return the compile-time parameters of the kernels."""
    D = v.shape[-1]
    return {
        "READY": ready,
        "CAUSAL": causal,
        "MASKED": mask is not None,
        "DROPOUT": dropout,
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "BM": tiling.rows,
        "BN": tiling.columns,
        "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32",
    }
