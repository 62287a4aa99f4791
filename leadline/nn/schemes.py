"""Schemes that discretise the Hopfield dynamics of one layer (HOP, appendix F).

    tau_v dx/dt = softmax(h) V - x      (45)        tau_h dh/dt = q K^T - h      (46)

A scheme is named VISIBLE-HIDDEN by how it takes the two derivatives. alpha and alpha' are the weights of the old
value: alpha = 1 - rho for forward, 1 / (1 + rho) for backward. Central steps take rho = 1 - alpha and begin with
one forward step. A(h, z) is the attention of the layer, with scores h and values of z, through W_O.

visible  forward   x' = alpha x + (1 - alpha) A(h, x)
         backward  x' = alpha x + (1 - alpha) A(h', x'), implicit: linear in x' unless h' depends on x' as well
         central   x' = x_before + 2 rho (A(h, x) - x)
hidden   forward   h' = alpha' h + (1 - alpha') S(x): scores lag a layer, the first layer attends to all alike,
                   and the last layer's queries and keys get no gradient (unless the visible step is backward)
         backward  h = alpha' h_before + (1 - alpha') S(x), with S(x') when the visible step is backward
         central   h' = h_before + 2 rho (S(x) - h): lags as forward does

``central_as_printed`` has the sign of HOP (60), (61): + x and + h in place of - x and - h. It does not discretise
the equations: as the step shrinks it converges to dx/dt = softmax(h) V + x. Both central forms have a root of
modulus rho + sqrt(1 + rho^2) > 1, so one component of the solution grows with depth.

"forward-backward" is the scheme of the paper, and the only one that is standard attention at alpha = alpha' = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.ops.formulas import attention_weights
from leadline.ops.hopfield.reference import attend, carry, expand_heads, scaled_scores
from leadline.ops.positions import rotate

if TYPE_CHECKING:
    from leadline.nn.attention import HopfieldAttention

KINDS = ("forward", "backward", "central", "central_as_printed")
SCHEMES = tuple(f"{visible}-{hidden}" for visible in KINDS for hidden in KINDS)
DENSE_UNKNOWNS = 2048  # tokens x width up to which a linear step is solved as one dense system


def step(
    layer: HopfieldAttention,
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    mask: Tensor | None,
    rope: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Apply one layer by ``layer.scheme``; the arguments are those of ``HopfieldAttention.forward``.

    Returns:
        x' (B, N, d), and the state for the next layer: the hidden state it needs (two of them when the hidden step is
        central), then x if the visible step is central.
    """
    visible, hidden = layer.scheme.split("-")
    keep = layer.alpha_prime()
    keys = None if mask is None else mask[:, None, None, :]

    def scores(z: Tensor) -> Tensor:
        q, k, _ = layer.project(z)
        return scaled_scores(q, k) if rope is None else scaled_scores(rotate(q, rope), rotate(k, rope))

    def weights(h: Tensor) -> Tensor:
        return attention_weights(h, keys, layer.causal, layer.formula)

    def attended(P: Tensor, z: Tensor) -> Tensor:
        dropout = layer.dropout if layer.training else 0.0
        return layer.proj(attend(P, layer.project(z)[2], dropout).transpose(1, 2).flatten(2))

    S = scores(x)
    hiddens, before = _unpack(state, S.shape, x.shape, visible, hidden)
    old = hiddens[0] if hiddens else None
    now, new, carried = _hidden_step(hidden, S, hiddens, keep, layer.start)
    if visible == "backward" and hidden == "backward":

        def both(y: Tensor, x: Tensor, old: Tensor | None) -> Tensor:
            return layer.mix(x, attended(weights(carry(old, scores(y), keep, layer.start)), y))  # (58), (59)

        y = _implicit(both, x, old, layer.tolerance, layer.max_steps, mask)
        carried = (carry(old, scores(y), keep, layer.start),)
    elif visible == "backward":
        y = _linear(layer, x, weights(new), attended, mask)  # (56)
    elif visible == "forward" or before is None:
        y = layer.mix(x, attended(weights(now), x))  # (50)
    else:
        A = attended(weights(now), x)
        y = before + 2 * (1 - layer.channel_alpha()) * (A + x if visible == "central_as_printed" else A - x)  # (60)
    return y, carried if visible in ("forward", "backward") else (*carried, x)


def _hidden_step(
    kind: str, S: Tensor, hiddens: tuple[Tensor, ...], keep: float | Tensor, start: str
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Take the hidden step, all (B, H, N, N): the state in force in this layer, the new one, and those to carry on."""
    old = hiddens[0] if hiddens else None
    if kind == "backward":
        new = carry(old, S, keep, start)
        return new, new, (new,)
    now = torch.zeros_like(S) if old is None else old
    if kind == "forward" or old is None:
        new = carry(old, S, keep, start)
    else:
        rho = 1 - (keep.view(-1, 1, 1) if isinstance(keep, Tensor) else keep)
        new = hiddens[1] + 2 * rho * (S + now if kind == "central_as_printed" else S - now)  # (61)
    return now, new, (new,) if kind == "forward" else (new, now)


def _unpack(
    state: tuple[Tensor, ...] | None, scores: torch.Size, tokens: torch.Size, visible: str, hidden: str
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Split a state into the hidden states and the x before; nothing at the first layer."""
    if state is None:
        return (), None
    central = [kind.startswith("central") for kind in (visible, hidden)]
    expected = [tuple(scores)] * (1 + central[1]) + [tuple(tokens)] * central[0]
    given = [tuple(part.shape) for part in state]
    if given != expected:
        raise LeadlineError(f"state has shapes {given}; the scheme {visible}-{hidden} carries {expected} here")
    return state[: 1 + central[1]], state[-1] if central[0] else None


def _linear(
    layer: HopfieldAttention,
    x: Tensor,
    P: Tensor,
    attended: Callable[[Tensor, Tensor], Tensor],
    mask: Tensor | None,
) -> Tensor:
    """Solve y = alpha x + (1 - alpha) A(P, y) for y (B, N, d), linear in y.

    While N d is small this solves one dense system, which always works. Beyond, it iterates, which works while
    (1 - alpha) times the spectral radius of y -> sum_h P_h y W_h is below 1.
    """
    B, N, d = x.shape
    if N * d > DENSE_UNKNOWNS:
        return _implicit(lambda y, x, P: layer.mix(x, attended(P, y)), x, P, layer.tolerance, layer.max_steps, mask)
    constant = layer.mix(x, attended(P, torch.zeros_like(x)))  # alpha x, and the contribution of the biases
    values = layer.qkv.weight[-layer.kv_heads * layer.head_dim :].view(1, layer.kv_heads, layer.head_dim, d)
    W_V = expand_heads(values, layer.heads)[0].mT  # (H, d, D)
    W_O = layer.proj.weight.view(d, layer.heads, layer.head_dim).permute(1, 2, 0)  # (H, D, d)
    # A(P, y)_ia = sum_hjc P_hij y_jc (W_V W_O)_hca
    linear = torch.einsum("bhij,hca->biajc", P.to(x.dtype), W_V @ W_O)
    rest = 1 - layer.channel_alpha()
    rest = rest.view(1, 1, d, 1, 1) if isinstance(rest, Tensor) and rest.ndim else rest
    system = torch.eye(N * d, dtype=x.dtype, device=x.device) - (rest * linear).reshape(B, N * d, N * d)
    return torch.linalg.solve(system, constant.reshape(B, N * d)).view(B, N, d)


def _implicit(
    function: Callable[..., Tensor],
    x: Tensor,
    given: Tensor | None,
    tolerance: float | None,
    max_steps: int,
    mask: Tensor | None,
) -> Tensor:
    """Solve y = function(y, x, given) for y, with the gradients of the solution (implicit function theorem).

    The backward pass solves u = g + J^T u, J the Jacobian of the function at y, by the same iteration. The steps of
    the iteration are not stored.
    """
    if tolerance is None:
        tolerance = (50 if x.dtype in (torch.float32, torch.float64) else 4) * torch.finfo(x.dtype).eps

    def iterate(f: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        return fixed_point(f, start, tolerance, max_steps, mask)

    with torch.no_grad():
        solution = iterate(lambda y: function(y, x, given), x)
    if not torch.is_grad_enabled():
        return solution
    y = function(solution, x, given)
    if y.requires_grad:
        at = solution.detach().requires_grad_()
        there = function(at, x.detach(), None if given is None else given.detach())

        def adjoint(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # y has no gradient
                return None

            def pull(u: Tensor) -> Tensor:
                return gradient + torch.autograd.grad(there, at, u, retain_graph=True)[0]

            return iterate(pull, gradient)

        y.register_hook(adjoint)
    return y


def fixed_point(
    function: Callable[[Tensor], Tensor], start: Tensor, tolerance: float, max_steps: int, mask: Tensor | None = None
) -> Tensor:
    """Iterate y <- function(y) until a step changes a sample by no more than ``tolerance`` of itself.

    A sample that has converged is left unchanged, so that the result does not depend on the rest of the batch.

    Args:
        function: Maps (B, N, d) to (B, N, d).
        start: First y, (B, N, d).
        tolerance: Relative tolerance.
        max_steps: Limit of steps.
        mask: Boolean (B, N), True = a real token; padding does not count.

    Returns:
        The fixed point (B, N, d).

    Raises:
        LeadlineError: The iteration did not converge; the message estimates the spectral radius.
    """
    y, moving = start, torch.ones(len(start), dtype=torch.bool, device=start.device)
    ratio = change = torch.full((len(start),), torch.nan, device=start.device)

    def size(z: Tensor) -> Tensor:
        z = z if mask is None else z * mask.unsqueeze(-1)
        return torch.linalg.vector_norm(z.flatten(1).float() if z.dtype != torch.float64 else z.flatten(1), dim=1)

    for _ in range(max_steps):
        new = function(y)
        last, change = change, size(new - y)
        ratio = change / last
        y = torch.where(moving[:, None, None], new, y)
        moving = moving & ~(change <= tolerance * size(new))
        if not moving.any():
            return y
        if not change[moving].isfinite().all():
            break
    radius = ratio[moving][ratio[moving].isfinite()]
    estimate = f"{radius.max().item():.3g}" if radius.numel() else "beyond measure"
    raise LeadlineError(
        f"the implicit step did not converge within {max_steps} steps: the spectral radius of its map is about "
        f"{estimate} and must be below 1; raise alpha, shrink the weights, or take an explicit scheme"
    )
