"""TSE's Algorithm 1 and its pre-norm form (19) on raw weights, many random trials at once.

X (T, n, d) holds one trial per row. A weight is (T, d, m) for one draw per trial, or (d, m) for the same in all trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.ops import attention_weights
from leadline.papers.shared.entry import Claim, Context, within

STREAM = 1000  # random streams per experiment; a chunk of trials uses one
LAST = 5  # blocks over which the final r is averaged


class Sizes(NamedTuple):
    """Sizes of a block.

    Args:
        n: Number of tokens.
        d: Width.
        heads: Number of heads.
        ffn: Width q of the FFN. TSE does not state it; 2d as in the example of the code that it used.
    """

    n: int = 64
    d: int = 512
    heads: int = 8
    ffn: int = 1024

    @classmethod
    def of(cls, setting: Mapping[str, Any]) -> Sizes:
        """Return the sizes that the setting of an entry holds."""
        return cls(*(setting[name] for name in cls._fields))


class Weights(NamedTuple):
    """Weights of a block, all heads side by side.

    Args:
        q: W_q (.., d, d).
        k: W_k (.., d, d).
        w: [W_1 ... W_h] (.., d, d), values and output projection in one.
        w1: First matrix of the FFN (.., d, q).
        w2: Second matrix of the FFN (.., q, d).
    """

    q: Tensor
    k: Tensor
    w: Tensor
    w1: Tensor
    w2: Tensor


class Steps(NamedTuple):
    """Outputs of the steps of a block.

    Args:
        P: Attention matrices (T, h, n, n).
        branch: P X W (T, n, d), side by side over the heads, before the gain.
        y1: After attention and its skip.
        y2: After the first norm; with pre-norm the same as ``y1``.
        y3: After the FFN and its skip; with pre-norm the output of the block (19).
        y4: Output of the block.
    """

    P: Tensor
    branch: Tensor
    y1: Tensor
    y2: Tensor
    y3: Tensor
    y4: Tensor


def draw_tokens(sizes: Sizes, trials: int, generator: torch.Generator) -> Tensor:
    """Draw standard normal tokens (trials, n, d)."""
    return torch.randn(trials, sizes.n, sizes.d, generator=generator, device=generator.device)


def draw_value(sizes: Sizes, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw W (*lead, d, d), normal with variance 1/d, so that d sigma^2 = 1 as in Theorem 2.6."""
    d = sizes.d
    return torch.randn(*lead, d, d, generator=generator, device=generator.device) / math.sqrt(d)


def draw_weights(sizes: Sizes, lead: tuple[int, ...], generator: torch.Generator) -> Weights:
    """Draw all weights of a block, each with the leading dimensions ``lead``.

    W_q and W_k are uniform in (-1, 1)/sqrt(d), as printed below (2); W_1 and W_2 as torch draws a linear map.
    """
    d, q = sizes.d, sizes.ffn

    def uniform(rows: int, columns: int) -> Tensor:
        weight = torch.empty(*lead, rows, columns, device=generator.device)
        return weight.uniform_(-1, 1, generator=generator).div_(math.sqrt(rows))  # torch's Linear: 1/sqrt(fan in)

    return Weights(uniform(d, d), uniform(d, d), draw_value(sizes, lead, generator), uniform(d, q), uniform(q, d))


def attention(X: Tensor, weights: Weights, heads: int, formula: str = "softmax") -> Tensor:
    """Return P (T, h, n, n) (2), with the score scale 1/sqrt(d/h)."""
    q, k = ((X @ w).unflatten(-1, (heads, -1)).transpose(-3, -2) for w in (weights.q, weights.k))
    k = q if formula == "symmetric" else k
    return attention_weights(q @ k.mT / math.sqrt(q.shape[-1]), formula=formula)


def attend(P: Tensor, X: Tensor, w: Tensor) -> Tensor:
    """Return [P_1 X W_1 ... P_h X W_h] (T, n, d) (Proposition 2.9)."""
    values = (X @ w).unflatten(-1, (P.shape[-3], -1)).transpose(-3, -2)
    return (P @ values).transpose(-3, -2).flatten(-2)


def layer_norm(X: Tensor) -> Tensor:
    """Return layer norm of each token, without weights."""
    return F.layer_norm(X, X.shape[-1:])


def ffn(X: Tensor, weights: Weights) -> Tensor:
    """Return the FFN's output, without its skip."""
    return F.relu(X @ weights.w1) @ weights.w2


def post_norm(X: Tensor, weights: Weights, heads: int, gain: float = 1.0, formula: str = "softmax") -> Steps:
    """Run a post-norm block: Algorithm 1."""
    P = attention(X, weights, heads, formula)
    branch = attend(P, X, weights.w)
    y1 = X + gain * branch
    y2 = layer_norm(y1)
    y3 = y2 + ffn(y2, weights)
    return Steps(P, branch, y1, y2, y3, layer_norm(y3))


def pre_norm(X: Tensor, weights: Weights, heads: int, gain: float = 1.0, formula: str = "softmax") -> Steps:
    """Run a pre-norm block (19)."""
    normed = layer_norm(X)
    P = attention(normed, weights, heads, formula)
    branch = attend(P, normed, weights.w)
    y1 = X + gain * branch
    z = y1 + ffn(layer_norm(y1), weights)
    return Steps(P, branch, y1, y1, z, z)


def de_escalate(X: Tensor, tau: float | Tensor) -> Tensor:
    """Return (I - tau Pi) X (21)."""
    return X - tau * X.mean(-2, keepdim=True)


def measure_trials(
    context: Context, trials: int, chunk: int, measure: Callable[[int, int], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Measure random trials in chunks, in parallel.

    Args:
        context: Where to run.
        trials: Number of trials.
        chunk: Number of trials that one call of ``measure`` takes.
        measure: Takes the first trial of a chunk and the number of its trials; returns tensors (..., trials).

    Returns:
        The tensors of all trials, by name.
    """
    starts = range(0, trials, chunk)
    return join_chunks(context.map(lambda start: measure(start, min(chunk, trials - start)), starts))


def join_chunks(chunks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate tensors (..., trials) by name, on the CPU. A name that some chunks lack takes the others."""
    return {name: torch.cat([chunk[name] for chunk in chunks if name in chunk], dim=-1).cpu() for name in chunks[0]}


def rate_tends(name: str, rate: Tensor, gain: float) -> Claim:
    """Return the claim that r (depth,) tends to 1 + gain^2 over the last blocks (Remark 2.8)."""
    return within(name, rate[-LAST:].mean().item(), 1 + gain**2, 0.05, kind="shape")
