"""Chains of layers that a bench compares: carried scores, or a dense bias, each by several methods.

Every method is a function of the layers' q, k, v (and biases) that returns the outputs of the layers. ``flash`` is
torch's fused attention without a carry or a bias: times of the other methods are given as multiples of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.ops import biased_attention, hopfield_attention
from leadline.ops.hopfield import reference

ALPHA_PRIME = 0.5
Layer = Sequence[Tensor]  # q, k, v, and a bias where there is one
Method = Callable[[Sequence[Layer], bool], list[Tensor]]


@dataclass(frozen=True)
class Shape:
    """The size of a chain of layers, and the backend of Leadline that is compared at it."""

    layers: int
    batch: int
    heads: int
    tokens: int
    causal: bool
    backend: str = "auto"
    width: int = 64  # of a head


GPU_SHAPES = {
    "gpt2_small": Shape(12, 12, 12, 1024, True),
    "gpt2_medium": Shape(24, 4, 16, 1024, True),
    "vit_base": Shape(12, 128, 12, 197, False),
    "vit_large": Shape(24, 32, 16, 197, False),
    "long_4096": Shape(12, 2, 12, 4096, True),
    "long_16384": Shape(12, 1, 12, 16384, True, backend="linear"),
}
CPU_SHAPES = {"vit_base": Shape(4, 8, 12, 197, False), "vit_large": Shape(4, 4, 16, 197, False)}


def draw(shape: Shape, device: str, dtype: torch.dtype, std: float = 1.0, bias: bool = False) -> list[Layer]:
    """Draw layers whose scores have standard deviation ``std``; values, and a bias shared by the samples, have 1."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.width)

    def one(factor: float) -> Tensor:
        return (factor * torch.randn(size, device=device, generator=generator)).to(dtype).transpose(1, 2)

    layers: list[Layer] = []
    for _ in range(shape.layers):
        layer = [one(std**0.5), one(std**0.5), one(1.0)]
        if bias:
            full = (1, shape.heads, shape.tokens, shape.tokens)
            layer.append(torch.randn(full, device=device, generator=generator).to(dtype))
        layers.append([x.requires_grad_() for x in layer])
    return layers


def hopfield_methods(backend: str) -> dict[str, Method]:
    """Return the methods of carrying scores through depth, by name."""
    return {
        "flash": _flash,
        "leadline": _chain(lambda q, k, v, state, causal: _ours(q, k, v, state, causal, backend)),
        "eager": _chain(_eager),
        "compiled": _chain(_once(_eager)),
        "sdpa_bias": _chain(_sdpa),
        "flex": _chain(_flex),
    }


def biased_methods(_: str) -> dict[str, Method]:
    """Return the methods of adding a bias that has a gradient, by name."""
    return {
        "flash": _flash,
        "leadline": _each(lambda q, k, v, bias, causal: biased_attention(q, k, v, bias, causal=causal)),
        "eager": _each(_eager_bias),
        "compiled": _each(_once(_eager_bias)),
        "sdpa_bias": _each(_sdpa_bias),
        "flex": _each(_flex_bias),
    }


def _flash(layers: Sequence[Layer], causal: bool) -> list[Tensor]:
    return [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for q, k, v, *_ in layers]


def _chain(step: Callable[..., tuple[Tensor, Any]]) -> Method:
    def run(layers: Sequence[Layer], causal: bool) -> list[Tensor]:
        state, outs = None, []
        for q, k, v in layers:
            out, state = step(q, k, v, state, causal)
            outs.append(out)
        return outs

    return run


def _each(step: Callable[..., Tensor]) -> Method:
    return lambda layers, causal: [step(*layer, causal) for layer in layers]


def _once(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a step at its first call."""
    made: list[Callable[..., Any]] = []

    def call(*inputs: Any) -> Any:
        if not made:
            torch.compiler.reset()
            made.append(torch.compile(step, dynamic=False))
        return made[0](*inputs)

    return call


def _ours(q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool, backend: str) -> tuple[Tensor, Any]:
    return hopfield_attention(q, k, v, state, alpha_prime=ALPHA_PRIME, causal=causal, backend=backend)


def _eager(q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> tuple[Tensor, Any]:
    return reference.hopfield_attention(q, k, v, state, alpha_prime=ALPHA_PRIME, causal=causal)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's attention with alpha' h as its bias; h itself has to be computed beside it."""
    new = (1 - ALPHA_PRIME) * q.shape[-1] ** -0.5
    if state is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=new), new * (q @ k.mT)
    old = ALPHA_PRIME * state
    bias = old.masked_fill(_future(q), -torch.inf) if causal else old
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=new), old + new * (q @ k.mT)


def _flex(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """FlexAttention with h as a captured tensor; h itself has to be computed beside it."""
    new = (1 - ALPHA_PRIME) * q.shape[-1] ** -0.5
    scores = new * (q @ k.mT)
    if state is None:
        return _flex_call(q, k, v, None, causal, new), scores
    old = ALPHA_PRIME * state
    return _flex_call(q, k, v, old, causal, new), old + scores


def _eager_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return biased_attention(q, k, v, bias, causal=causal, backend="reference")


def _sdpa_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    bias = bias.masked_fill(_future(q), -torch.inf) if causal else bias
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1))


def _flex_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return _flex_call(q, k, v, bias[0], causal, q.shape[-1] ** -0.5)


def _future(q: Tensor) -> Tensor:
    N = q.shape[2]
    return torch.ones(N, N, dtype=torch.bool, device=q.device).triu(1)


_compiled_flex: list[Callable[..., Any]] = []


def _flex_call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if bias is not None and bias.numel() >= 2**31:  # seen with torch 2.11; nothing runs on the GPU after that
        raise RuntimeError(f"a captured tensor of {bias.numel():.2g} elements: illegal memory access in torch's kernel")
    if not _compiled_flex:
        _compiled_flex.append(torch.compile(flex_attention, dynamic=False))

    def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (bias[b, h, i, j] if bias.ndim == 4 else bias[h, i, j])  # type: ignore[index,union-attr]

    mask = _lower_blocks(q.shape[2], q.device) if causal else None
    return _compiled_flex[0](q, k, v, score_mod=None if bias is None else modified, block_mask=mask, scale=scale)


@lru_cache(maxsize=1)
def _lower_blocks(tokens: int, device: torch.device) -> Any:
    """What FlexAttention needs to leave out the blocks above the diagonal."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device)
