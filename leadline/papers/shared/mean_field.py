"""The depth at which tokens collapse, predicted from the setting alone.

Per coordinate, a token matrix has the energy M of the token mean and the energy D of the rest; t_sim = M / (M + D).
Weights W_q, W_k, W_V, W_O, W_1, W_2 are independent with mean 0, and widths are large enough to replace sums by their
means. With n tokens, one block acts on (M, D) as follows.

Scores.   q_i . k_j / sqrt(d_k) has the variance s^2 (M + D)^2, with s^2 = d^2 var(W_q) var(W_k). Of it, s^2 D^2 differs
          from row to row (query and key both from the rest), and s^2 M D is the same in every row (query from the
          mean). Scores of different layers are uncorrelated, so the squares of carried scores add up:
              V = alpha'^2 V + (1 - alpha')^2 s^2 D^2,       U = alpha'^2 U + (1 - alpha')^2 s^2 M D
Weights.  exp of a normal score is log-normal. Attention preserves the mean, adds a part of the rest to it, and
          preserves a small part of the rest:
              m = M + D (e^U - 1) / n,       r = D e^U (e^V - 1) / n
Values.   Multiply by v = (d var(W_V)) (d var(W_O)).
Skips.    With c = 1 in post-norm, and c = 1 / sqrt(M + D) in pre-norm, where attention and FFN take the normed stream:
              M <- (k + g alpha c)^2 M + g^2 (1 - alpha)^2 v m
          D likewise with r. k = 1 with an outer skip, else 0.
FFN.      An FFN with ReLU adds the energy f = (d var(W_1) / 2) (q var(W_2)). For inputs of cosine rho, its outputs have
          the cosine
              kappa(rho) = (sqrt(1 - rho^2) + rho (pi - arccos rho)) / pi
Norm.     Post-norm divides by M + D after attention and after the FFN.
(21)      De-escalation multiplies M by (1 - tau)^2.

For alpha = 0, post-norm with skips, and V, U, f = 0, each block multiplies t_sim / t_div by (1 + g^2) (1 - tau)^2.
The limit of TSE's (16) and its critical tau are special cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PLACEMENTS = ("post", "pre", "post, no skip")


@dataclass(frozen=True)
class Point:
    """A setting of the prediction: where norms and skips are, alpha, alpha', tau of (21), and the gain g.

    ``placement`` is one of ``PLACEMENTS``.
    """

    placement: str = "post"
    alpha: float = 0.0
    alpha_prime: float = 0.0
    tau: float = 0.0
    gain: float = 1.0


def similarity_curve(point: Point, n: int, depth: int, s2: float, v: float, f: float) -> list[float]:
    """Predict t_sim after each block, from tokens that are independent and normal: M = 1/n, D = 1 - 1/n.

    Args:
        point: The setting.
        n: Number of tokens.
        depth: Number of blocks.
        s2: s^2, the variance of the scores at M + D = 1.
        v: Factor of the values.
        f: Energy that the FFN adds.
    """
    pre, keep = point.placement == "pre", 0.0 if point.placement == "post, no skip" else 1.0
    a, ap, g = point.alpha, point.alpha_prime, point.gain
    M, D = 1 / n, 1 - 1 / n
    U = V = 0.0
    curve = []
    for _ in range(depth):
        scale = 1 / (M + D) if pre else 1.0  # what attention sees is (M, D) times this
        x, y = scale * M, scale * D
        V = ap**2 * V + (1 - ap) ** 2 * s2 * y * y
        U = ap**2 * U + (1 - ap) ** 2 * s2 * x * y
        into_mean, remaining = y * math.expm1(U) / n, y * math.exp(U) * math.expm1(V) / n
        inner = (keep + g * a * math.sqrt(scale)) ** 2
        M = inner * M + (g * (1 - a)) ** 2 * v * (x + into_mean)
        D = inner * D + (g * (1 - a)) ** 2 * v * remaining
        if not pre:
            M, D = M / (M + D), D / (M + D)
        M, D = _ffn(M, D, n, f, keep)
        if not pre:
            M, D = M / (M + D), D / (M + D)
        M *= (1 - point.tau) ** 2  # (21)
        curve.append(M / (M + D))
    return curve


def _ffn(M: float, D: float, n: int, f: float, keep: float) -> tuple[float, float]:
    """Return (M, D) after the FFN: the skip, if any, plus ReLU's output at unit input energy."""
    rho = min(max((n * M / (M + D) - 1) / (n - 1), -1.0), 1.0)
    kappa = (math.sqrt(1 - rho * rho) + rho * (math.pi - math.acos(rho))) / math.pi
    shared = (1 + (n - 1) * kappa) / n
    return keep * M + f * shared, keep * D + f * (1 - shared)


def collapse_depth(curve: list[float], level: float) -> int:
    """Return the first block after which t_sim is above ``level``, or one more than there are blocks."""
    return next((block for block, value in enumerate(curve, start=1) if value > level), len(curve) + 1)


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / spread if spread else math.nan


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) + 1) / 2 for value in values]
