"""Bounds on the residual of an attention-only network (HOP, appendix D), as printed and as repaired.

res(X) = X - 1 mean(X)^T; sizes are ||.||_{1,inf} = sqrt(||.||_1 ||.||_inf); a layer is an ``AttentionLayer``.
Bounds are logarithms. At the initialisation of a ViT-Tiny they hold but say nothing: after one, two and three layers
they are about 1e8, 1e27 and 1e81, and soon exceed the largest float.

The **printed** form is for comparison: Lemmas D.1 (one head), D.2 (H heads) and Theorem D.3 (L layers) to the letter.
It does not always hold. D.1 takes the carried scores to be unscaled. D.2 adds up heads as if ||.||_{1,inf} had a
triangle inequality. D.3 prints 4 where its proof needs 8, and takes b^(3^m (L-m)) for the largest leaf also when b < 1.

The **repaired** form holds. Let R = res(X), A = h_{l-1} and, per head,

    E = (1 - alpha') R W_QK R^T / sqrt(d_k) + alpha' A                                                     (22, 23)

The scores are h_l = E + 1 r^T + s 1^T (19); r contains the query bias, and s 1^T cancels in the softmax. So row i of
P = softmax(h_l) is p = softmax(r) with weights exp(E_i), and res(Y) = res((P - 1 p^T) R W_VO) if alpha = 0; the bias
b cancels. For d the range of a row of E, and c(d) = (e^d - 1) / d,

    |P_ij - p_j| <= c(d) p_j sum_k p_k |E_ij - E_ik|,  hence  ||P - 1 p^T||_1   <= c(d) / 2 ||E||_1
    sum_j |P_ij - p_j| <= d / 2 <= max_j |E_ij|,       hence  ||P - 1 p^T||_inf <= ||E||_1

The first: P_ij / p_j = e^E_ij / Z with Z = sum_k p_k e^E_ik. If that is above 1, use Z >= exp(sum_k p_k E_ik); if not,
Z >= e^E_ij; either way with e^x - 1 <= c(d) x for x in [0, d]. In the sum over i, p_j (1 - p_j) <= 1/4.
The second: along softmax(r + s E_i), s from 0 to 1, the weights change by at most d / 2, their mean deviation of E_i.
res at most doubles both norms. Sum the heads in each norm by itself, with u = ||R||_{1,inf} (k_1 does not need the 2):

    t_h = (1 - alpha') ||W_QK,h||_1 u^2 / sqrt(d_k) + alpha' ||A_h||_1                              >= ||E_h||_1
    k_1 = 2 sum_h c(d_h) t_h ||W_VO,h||_1,     k_inf = 2 sum_h t_h ||W_VO,h||_inf
    ||res(Y)||_{1,inf} <= u sqrt((alpha + (1 - alpha) k_1) (alpha + (1 - alpha) k_inf))

A and d are measured on the given input, so the bound is a posteriori. HOP's assumption d <= 1.256 is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice
from leadline.metrics import mixed_norm, norm_1, norm_inf, residual
from leadline.metrics._tokens import accumulate
from leadline.theory.layers import AttentionLayer, attention_layers

FORMS = ("printed", "repaired")
HOP_RANGE = 1.2564312086261697  # the root of e^x = 1 + 2x: HOP assumes that ranges stay below it (25)
NOISE = 64  # a residual below this many rounding errors is noise
DEEPEST = 600  # 3^depth must be a float


@dataclass(frozen=True)
class LayerBound:
    """The bound on the residual after a layer and its measured value; tensors (...), an entry per sample.

    Attributes:
        layer: Number of the layer, from 1.
        log_bound: Logarithm of the bound.
        log_residual: Logarithm of ||res(Y)||_{1,inf}, measured.
        hop_range: The largest |E_ij - E_ik| in this layer, with A as it is carried.
        above_noise: Whether this residual, and each before it, is more than rounding error.
    """

    layer: int
    log_bound: Tensor
    log_residual: Tensor
    hop_range: Tensor
    above_noise: Tensor

    @property
    def log_slack(self) -> Tensor:
        """Logarithm of bound / residual, NaN where the residual is noise."""
        return torch.where(self.above_noise, self.log_bound - self.log_residual, torch.nan)

    @property
    def holds(self) -> Tensor:
        """False where the residual exceeds the bound by more than rounding error; with alpha the two can be equal."""
        return ~(self.log_slack < -1 / NOISE)

    @property
    def hop_assumption(self) -> Tensor:
        """Return whether |E_ij - E_ik| <= 1.256 in this layer. HOP assumes it for (25); the repaired bound does not."""
        return self.hop_range <= HOP_RANGE


def layer_bound(
    layer: AttentionLayer,
    X: Tensor,
    state: Tensor | None = None,
    *,
    log_u: Tensor | None = None,
    form: str = "repaired",
) -> Tensor:
    """Bound ||res(Y)||_{1,inf} for Y = layer(X, state): Lemma D.1 for one head, D.2 for several.

    Args:
        layer: The layer.
        X: Tokens (..., n, d).
        state: Scaled scores (..., H, n, n) that the layer before carries on; None at the first layer.
        log_u: Logarithm of ||res(X)||_{1,inf}, or of a bound on it, (...); measured if None.
        form: "repaired" or "printed"; see the docstring of this module.

    Returns:
        The logarithm of the bound (...), in float64.
    """
    check_choice("form", form, FORMS)
    X = _tokens(X)
    layer.check(X, state)
    log_u = mixed_norm(residual(X)).log() if log_u is None else log_u
    if form == "repaired":
        return _repaired(layer, X, state, log_u)
    log_a, log_b = _printed_coefficients(layer, state)
    return torch.logaddexp(log_a + 3 * log_u, log_b + log_u)  # (13), (38)


@torch.no_grad()
def network_bound(
    model: nn.Module | Sequence[AttentionLayer], inputs: Tensor, *, form: str = "repaired"
) -> list[LayerBound]:
    """Bound the residual after each layer of an attention-only network, and measure it.

    Only the residual of the first layer's input is taken from the data; its later sizes u are themselves bounds.
    Everything is computed in float64, whatever the model's dtype, and without dropout.

    Args:
        model: A model from ``create_model("attention_only", ...)``, or its layers.
        inputs: Inputs of the model, or tokens (..., n, d) for layers.
        form: "repaired" composes the layer bound. "printed" is (42), with the largest C_1 and C_2 of the layers so far.

    Returns:
        One ``LayerBound`` per layer.

    Raises:
        LeadlineError: The model is more than attention, or a layer does not fit its input.
    """
    check_choice("form", form, FORMS)
    if isinstance(model, nn.Module):
        layers, X = attention_layers(model), _tokens(cast(Any, model).embed(inputs)[0])
    else:
        layers, X = list(model), _tokens(inputs)
    first = log_u = mixed_norm(residual(X)).log()
    log_a = log_b = torch.full_like(first, -torch.inf)
    above_noise = torch.ones_like(first, dtype=torch.bool)
    state, records = None, []
    for depth, layer in enumerate(layers, start=1):
        layer.check(X, state)
        if form == "repaired":
            log_u = _repaired(layer, X, state, log_u)
        else:
            a, b = _printed_coefficients(layer, state)
            log_a, log_b = torch.maximum(log_a, a), torch.maximum(log_b, b)
            log_u = largest_leaf(log_a, log_b, first, depth, form="printed")
        hop_range = _row_range(layer, X, state).amax(-1)
        noise = NOISE * _rounding(layer, X)
        X, state = layer(X, state)
        size = mixed_norm(residual(X))
        above_noise = above_noise & (size > noise)
        records.append(LayerBound(depth, log_u, size.log(), hop_range, above_noise))
    return records


def largest_leaf(
    log_a: Tensor | float, log_b: Tensor | float, log_u: Tensor | float, depth: int, *, form: str = "repaired"
) -> Tensor:
    """Compute u after ``depth`` steps u -> max(a u^3, b u) with constant a and b, as in Theorem D.3.

    m cubic steps give a the exponent (3^m - 1)/2 and u the exponent 3^m; a linear step gives b the exponent 3^j if j
    cubic steps follow it. So the linear steps come first when b >= 1, and last when b < 1. (42) prints the first case
    for both.

    Args:
        log_a: Logarithm of a.
        log_b: Logarithm of b.
        log_u: Logarithm of the first u.
        depth: Number of steps.
        form: "repaired", or "printed" for (42).

    Returns:
        The logarithm of the last u, in float64, in the common shape of the arguments.
    """
    check_choice("form", form, FORMS)
    if not 0 <= depth <= DEEPEST:
        raise LeadlineError(f"depth is {depth}; it must lie between 0 and {DEEPEST}")
    log_a, log_b, log_u = (torch.as_tensor(x, dtype=torch.float64) for x in (log_a, log_b, log_u))
    leaves = []
    for m in range(depth + 1):
        power = 3.0**m
        leaf = power * log_u
        if m > 0:
            leaf = leaf + (power - 1) / 2 * log_a
        if m < depth:
            linear = power * log_b if form == "printed" else torch.maximum(log_b, power * log_b)
            leaf = leaf + (depth - m) * linear
        leaves.append(leaf)
    return torch.stack(torch.broadcast_tensors(*leaves)).amax(0)


def _tokens(X: Tensor) -> Tensor:
    """Check tokens and return them in float64."""
    return accumulate(X).double()


def _rounding(layer: AttentionLayer, X: Tensor) -> Tensor:
    """Estimate the rounding error of layer(X) from the sizes of the terms it adds up."""
    parts = mixed_norm(X) * (layer.alpha + (1 - layer.alpha) * mixed_norm(layer.w_vo.double()).sum())
    if layer.bias is not None:
        parts = parts + (1 - layer.alpha) * mixed_norm(layer.bias.double().expand(X.shape[-2], -1))
    return torch.finfo(X.dtype).eps * parts


def _printed_coefficients(layer: AttentionLayer, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logarithms of 4H (1-alpha') C_1 / sqrt(d_k) and of 4H alpha' C_2 / sqrt(d_k) (38).

    The second is (...), or -inf without a state. The carried scores are divided by sqrt(d_k) although ours already
    are, as HOP has it in (15).
    """
    if layer.alpha:
        raise LeadlineError(f"alpha is {layer.alpha}; the printed forms are for alpha = 0 only: use form='repaired'")
    new, old = layer.weights(state)
    front = math.log(4 * len(layer.w_vo) / math.sqrt(layer.head_dim)) + mixed_norm(layer.w_vo.double()).log()  # (H,)
    log_a = (front + new.log() + norm_1(layer.w_qk.double()).log()).amax(-1)
    log_b = front + old.log() if state is None else front + old.log() + norm_1(state.double()).log()
    return log_a, log_b.amax(-1)


def _repaired(layer: AttentionLayer, X: Tensor, state: Tensor | None, log_u: Tensor) -> Tensor:
    """Return the logarithm of u sqrt((alpha + (1 - alpha) k_1) (alpha + (1 - alpha) k_inf)), the repaired bound."""
    carried = _centred(state)
    new, old = layer.weights(carried)
    own = new.log() + norm_1(layer.w_qk.double()).log() - math.log(layer.head_dim) / 2
    log_t = own + 2 * log_u[..., None]  # (..., H)
    if carried is not None:
        log_t = torch.logaddexp(log_t, old.log() + norm_1(carried).log())
    w_vo = layer.w_vo.double()
    log_k1 = math.log(2) + torch.logsumexp(_log_c(_row_range(layer, X, carried)) + log_t + norm_1(w_vo).log(), -1)
    log_kinf = math.log(2) + torch.logsumexp(log_t + norm_inf(w_vo).log(), -1)
    if layer.alpha:
        skip, rest = (log_u.new_tensor(math.log(weight)) for weight in (layer.alpha, 1 - layer.alpha))
        log_k1, log_kinf = (torch.logaddexp(skip, rest + log_k) for log_k in (log_k1, log_kinf))
    return log_u + (log_k1 + log_kinf) / 2


def _centred(state: Tensor | None) -> Tensor | None:
    """Subtract from A (..., H, n, n) its row and column means, where that makes ||A||_1 smaller.

    They are of the forms s 1^T and 1 r^T, which are not part of E. (A sparse A grows by centring.)
    """
    if state is None:
        return None
    state = state.double()
    centred = residual(residual(state).mT).mT
    return torch.where((norm_1(centred) < norm_1(state))[..., None, None], centred, state)


def _row_range(layer: AttentionLayer, X: Tensor, carried: Tensor | None) -> Tensor:
    """Return the largest range d of a row of E, per head: (..., H)."""
    R = residual(X).unsqueeze(-3)
    E = layer.carry(R @ layer.w_qk.double() @ R.mT / math.sqrt(layer.head_dim), carried)  # (22, 23)
    return (E.amax(-1) - E.amin(-1)).amax(-1)


def _log_c(d: Tensor) -> Tensor:
    """Return log((e^d - 1) / d) without overflow; 0 at d = 0."""
    safe = torch.where(d > 0, d, 1)
    return torch.where(d > 0, safe + (-torch.expm1(-safe)).log() - safe.log(), 0)
