"""TSE's Algorithm 1 and its pre-norm form (19) on raw weights, many trials at once.

X (T, n, d) holds a trial each; a weight is (T, d, m), one per trial, or (d, m), the same for all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.ops import attention_weights


class Sizes(NamedTuple):
    n: int = 64  # tokens
    d: int = 512  # width
    heads: int = 8
    ffn: int = 1024  # q, not stated by TSE; 2d as in the example of the code that it used


class Weights(NamedTuple):
    q: Tensor  # (.., d, d), all heads side by side, as is k
    k: Tensor
    w: Tensor  # (.., d, d): [W_1 ... W_h]
    w1: Tensor  # (.., d, q)
    w2: Tensor  # (.., q, d)


class Steps(NamedTuple):
    """What each step of a block gives; with pre-norm, ``y2`` and ``y3`` are the whole block's output (19)."""

    P: Tensor  # (T, h, n, n)
    branch: Tensor  # P X W, side by side over the heads, before the gain
    y1: Tensor
    y2: Tensor
    y3: Tensor
    y4: Tensor


def draw_tokens(sizes: Sizes, trials: int, generator: torch.Generator) -> Tensor:
    """Standard normal tokens (trials, n, d)."""
    return torch.randn(trials, sizes.n, sizes.d, generator=generator, device=generator.device)


def draw_value(sizes: Sizes, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """W (*lead, d, d), normal with variance 1/d, so that d sigma^2 = 1 as in Theorem 2.6."""
    d = sizes.d
    return torch.randn(*lead, d, d, generator=generator, device=generator.device) / math.sqrt(d)


def draw_weights(sizes: Sizes, lead: tuple[int, ...], generator: torch.Generator) -> Weights:
    """W_q, W_k uniform in (-1, 1)/sqrt(d), as printed below (2); W_1, W_2 as torch draws a linear map; W as above."""
    d, q = sizes.d, sizes.ffn

    def uniform(rows: int, columns: int) -> Tensor:
        weight = torch.empty(*lead, rows, columns, device=generator.device)
        return weight.uniform_(-1, 1, generator=generator).div_(math.sqrt(rows))  # torch's Linear: 1/sqrt(fan in)

    return Weights(uniform(d, d), uniform(d, d), draw_value(sizes, lead, generator), uniform(d, q), uniform(q, d))


def attention(X: Tensor, weights: Weights, heads: int, formula: str = "softmax") -> Tensor:
    """P (T, h, n, n) (2), with the score scale 1/sqrt(d/h)."""
    q, k = ((X @ w).unflatten(-1, (heads, -1)).transpose(-3, -2) for w in (weights.q, weights.k))
    k = q if formula == "symmetric" else k
    return attention_weights(q @ k.mT / math.sqrt(q.shape[-1]), formula=formula)


def attend(P: Tensor, X: Tensor, w: Tensor) -> Tensor:
    """[P_1 X W_1 ... P_h X W_h] (T, n, d) (Proposition 2.9)."""
    values = (X @ w).unflatten(-1, (P.shape[-3], -1)).transpose(-3, -2)
    return (P @ values).transpose(-3, -2).flatten(-2)


def layer_norm(X: Tensor) -> Tensor:
    return F.layer_norm(X, X.shape[-1:])


def ffn(X: Tensor, weights: Weights) -> Tensor:
    return F.relu(X @ weights.w1) @ weights.w2


def post_norm(X: Tensor, weights: Weights, heads: int, gain: float = 1.0, formula: str = "softmax") -> Steps:
    """Algorithm 1."""
    P = attention(X, weights, heads, formula)
    branch = attend(P, X, weights.w)
    y1 = X + gain * branch
    y2 = layer_norm(y1)
    y3 = y2 + ffn(y2, weights)
    return Steps(P, branch, y1, y2, y3, layer_norm(y3))


def pre_norm(X: Tensor, weights: Weights, heads: int, gain: float = 1.0, formula: str = "softmax") -> Steps:
    """(19)."""
    normed = layer_norm(X)
    P = attention(normed, weights, heads, formula)
    branch = attend(P, normed, weights.w)
    y1 = X + gain * branch
    z = y1 + ffn(layer_norm(y1), weights)
    return Steps(P, branch, y1, y1, z, z)


def de_escalate(X: Tensor, tau: float | Tensor) -> Tensor:
    """(I - tau Pi) X (21)."""
    return X - tau * X.mean(-2, keepdim=True)
