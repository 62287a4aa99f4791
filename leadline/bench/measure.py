"""Time, memory and error of one method in a bench."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from leadline.bench.chains import ALPHA_PRIME, Layer, Method, Shape, draw
from leadline.ops.hopfield import reference

ROWS = 1024  # queries at a time in the float64 reference


def speed(method: Method, layers: Sequence[Layer], causal: bool, repeats: int, graph: bool) -> dict[str, float | None]:
    """Measure the median milliseconds of a method, forward and forward + backward, and its memory on a GPU.

    Args:
        method: The method.
        layers: Its inputs.
        causal: Whether attention is causal.
        repeats: Runs to take the median of, at most.
        graph: Time the replay of a CUDA graph, which is the work of the device alone. The time of plain calls, with the
            time that Python takes to launch kernels, then stands under ``eager_ms``.

    Returns:
        ``forward_ms``, ``total_ms``, ``eager_ms`` where ``graph`` holds, and ``extra_gib``, memory beyond the inputs.
    """
    leaves = [x for layer in layers for x in layer]
    grads = [torch.randn_like(layer[0]) for layer in layers]
    cuda = leaves[0].is_cuda

    def both() -> Any:
        return torch.autograd.grad(method(layers, causal), leaves, grads, allow_unused=True)

    both()
    extra = None
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30

    def forward() -> Any:
        with torch.no_grad():
            return method(layers, causal)

    figures = {"extra_gib": extra}
    for name, run in (("forward_ms", forward), ("total_ms", both)):
        figures[name] = median_ms(run, cuda, repeats)
        if cuda and graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                outputs = run()  # held while the graph is replayed
            figures["eager_ms"] = figures[name]
            figures[name] = median_ms(captured.replay, cuda, repeats)
            del outputs, captured
    return figures


def median_ms(run: Callable[[], Any], cuda: bool, repeats: int) -> float:
    """Return the median of up to ``repeats`` runs in two seconds, after one to warm up.

    On a GPU its cache is flushed before each run.
    """
    run()
    deadline = time.perf_counter() + 2
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda") if cuda else None
    times: list[float] = []
    while len(times) < repeats and (not times or time.perf_counter() < deadline):
        if flush is None:
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def errors(method: Method, shape: Shape, device: str, dtype: torch.dtype, std: float, kind: str) -> tuple[float, float]:
    """The largest relative error of an output and of a gradient over all layers, against float64.

    One sample and one head are enough, at the full number of layers and tokens. ``kind`` is what the method
    computes: "plain" (flash), "carried" or "biased".
    """
    small = Shape(shape.layers, 1, 1, shape.tokens, shape.causal, shape.backend, shape.width)
    layers, grads = _small(small, device, dtype, std, kind)
    outs = method(layers, shape.causal)
    found = torch.autograd.grad(outs, [x for layer in layers for x in layer], grads)
    outs64, grads64 = _in_float64(small, device, dtype, std, kind)
    worst = lambda got, want: max(_relative(x, y) for x, y in zip(got, want, strict=True))  # noqa: E731
    return worst(outs, outs64), worst(found, grads64)


def _small(shape: Shape, device: str, dtype: torch.dtype, std: float, kind: str) -> tuple[list[Layer], list[Tensor]]:
    """The layers, and the gradients of their outputs."""
    layers = draw(shape, device, dtype, std, bias=kind == "biased")
    generator = torch.Generator(device).manual_seed(1)
    return layers, [torch.randn(x[0].shape, device=device, generator=generator).to(dtype) for x in layers]


@lru_cache(maxsize=4)
def _in_float64(
    shape: Shape, device: str, dtype: torch.dtype, std: float, kind: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients in float64, some queries at a time so that long sequences fit."""
    layers, grads = _small(shape, device, dtype, std, kind)
    exact = [[x.detach().double().requires_grad_() for x in layer] for layer in layers]
    outs = [torch.empty_like(layer[0], requires_grad=False) for layer in exact]
    for first in range(0, shape.tokens, ROWS):
        rows, keys = slice(first, first + ROWS), slice(0, first + ROWS if shape.causal else shape.tokens)
        pieces = _exact(exact, kind, shape.causal, rows, keys)
        torch.autograd.backward(pieces, [g[:, :, rows].double() for g in grads])
        for out, piece in zip(outs, pieces, strict=True):
            out[:, :, rows] = piece.detach()
    return outs, [x.grad for layer in exact for x in layer if x.grad is not None]


def _exact(layers: Sequence[Layer], kind: str, causal: bool, rows: slice, keys: slice) -> list[Tensor]:
    """The outputs of some queries in float64: rows of scores are independent of each other at any depth."""
    state, outs = None, []
    for q, k, v, *bias in layers:
        out, state = reference.hopfield_attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], state, causal=causal,
            alpha_prime=ALPHA_PRIME if kind == "carried" else 0.0,
            bias=bias[0][:, :, rows, keys] if kind == "biased" else None,
        )  # fmt: skip
        outs.append(out)
        if kind != "carried":
            state = None
    return outs


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want).norm() / want.norm())
