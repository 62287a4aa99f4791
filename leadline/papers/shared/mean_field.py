"""The depth at which tokens collapse, predicted from the setting alone.

Per coordinate, a token matrix has the energy M of the token mean and D of the rest; t_sim = M / (M + D). With n tokens,
weights W_q, W_k, W_V, W_O, W_1, W_2 that are independent with mean 0, and widths large enough for averages to hold, one
block acts on (M, D) as follows.

Scores.   q_i . k_j / sqrt(d_k) has variance s^2 (M + D)^2, s^2 = d^2 var(W_q) var(W_k). Of it, s^2 D^2 differs from row
          to row (query and key both from the rest) and s^2 M D is the same in every row (query from the mean). Scores
          of different layers are uncorrelated, so what is carried adds up in squares:
              V = alpha'^2 V + (1 - alpha')^2 s^2 D^2,       U = alpha'^2 U + (1 - alpha')^2 s^2 M D
Weights.  exp of a normal score is log-normal. Attention keeps the mean, brings some of the rest into it, and keeps a
          little of the rest:
              m = M + D (e^U - 1) / n,       r = D e^U (e^V - 1) / n
Values.   times v = (d var(W_V)) (d var(W_O)).
Skips.    with c = 1 in post-norm and 1 / sqrt(M + D) in pre-norm, where attention and FFN see the normed stream,
              M <- (k + g alpha c)^2 M + g^2 (1 - alpha)^2 v m,  D likewise with r;  k = 1 with an outer skip, else 0
FFN.      of ReLU adds the energy f = (d var(W_1) / 2) (q var(W_2)); its outputs have the cosine
              kappa(rho) = (sqrt(1 - rho^2) + rho (pi - arccos rho)) / pi         for inputs of cosine rho
Norm.     post-norm divides by M + D after attention and after the FFN.
(21)      multiplies M by (1 - tau)^2.

For alpha = 0, post-norm with skips, and V, U, f = 0 this is t_sim / t_div -> (1 + g^2) (1 - tau)^2 t_sim / t_div;
the limit of TSE's (16) and its critical tau are special cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PLACEMENTS = ("post", "pre", "post, no skip")


@dataclass(frozen=True)
class Point:
    placement: str = "post"
    alpha: float = 0.0
    alpha_prime: float = 0.0
    tau: float = 0.0
    gain: float = 1.0


def similarity_curve(point: Point, n: int, depth: int, s2: float, v: float, f: float) -> list[float]:
    """Predicted t_sim after each block, from tokens that are independent and normal: M = 1/n, D = 1 - 1/n."""
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
        brought, kept = y * math.expm1(U) / n, y * math.exp(U) * math.expm1(V) / n
        inner = (keep + g * a * math.sqrt(scale)) ** 2
        M = inner * M + (g * (1 - a)) ** 2 * v * (x + brought)
        D = inner * D + (g * (1 - a)) ** 2 * v * kept
        if not pre:
            M, D = M / (M + D), D / (M + D)
        M, D = _ffn(M, D, n, f, keep)
        if not pre:
            M, D = M / (M + D), D / (M + D)
        M *= (1 - point.tau) ** 2  # (21)
        curve.append(M / (M + D))
    return curve


def _ffn(M: float, D: float, n: int, f: float, keep: float) -> tuple[float, float]:
    """The skip, if any, plus ReLU's own output at unit input energy."""
    rho = min(max((n * M / (M + D) - 1) / (n - 1), -1.0), 1.0)
    kappa = (math.sqrt(1 - rho * rho) + rho * (math.pi - math.acos(rho))) / math.pi
    shared = (1 + (n - 1) * kappa) / n
    return keep * M + f * shared, keep * D + f * (1 - shared)


def collapse_depth(curve: list[float], level: float) -> int:
    """The first block after which t_sim is above ``level``; one more than there are blocks if none is."""
    return next((block for block, value in enumerate(curve, start=1) if value > level), len(curve) + 1)


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing the mean of theirs."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / spread if spread else math.nan


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) + 1) / 2 for value in values]
