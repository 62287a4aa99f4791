"""Attention layers as the papers write them, in row vectors, and their conversion from our models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice
from leadline.metrics._tokens import accumulate
from leadline.nn import HopfieldAttention, TransformerStack

# The values of the model's options for which the bounds hold.
ATTENTION_ALONE = {
    "norm": "none",
    "ffn": 0,
    "skip": False,
    "gain": 1.0,
    "causal": False,
    "scheme": "forward-backward",
    "formula": "softmax",
    "de_escalation": 0.0,
}


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of H heads, the weights of each head multiplied out.

    ::

        h_l = alpha' h_{l-1} + (1 - alpha') (X W_QK + 1 b_QK^T) X^T / sqrt(d_k)        per head (HOP 15-18)
        Y   = alpha X + (1 - alpha) (sum over the heads of softmax(h_l) X W_VO + 1 b^T)          (HOP 39)

    Args:
        w_qk: W_Q W_K^T, (H, d, d).
        w_vo: W_V W_O, (H, d, d'); d' = d wherever another layer follows.
        head_dim: d_k.
        alpha: Weight of the layer's input in its output.
        alpha_prime: Weight of the carried scores, a number or (H,); with the number 0 nothing is carried on either.
        start: Weight of the layer's own scores when none are carried: 1 - alpha' ("zero") or 1 ("scores").
        b_qk: W_K b_Q, (H, d); the bias of the keys cancels in the softmax.
        bias: b, (d'). P 1 = 1, so the biases of values and output add the same to every token.

    Raises:
        LeadlineError: The shapes do not fit, or a strength lies outside [0, 1).
    """

    w_qk: Tensor
    w_vo: Tensor
    head_dim: int
    alpha: float = 0.0
    alpha_prime: float | Tensor = 0.0
    start: str = "zero"
    b_qk: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_choice("start", self.start, ("zero", "scores"))
        qk, vo = tuple(self.w_qk.shape), tuple(self.w_vo.shape)
        if len(qk) != 3 or len(vo) != 3 or qk[1] != qk[2] or vo[:2] != qk[:2]:
            raise LeadlineError(f"w_qk has shape {qk} and w_vo {vo}; both must be (heads, width, width)")
        for name, shapes in (("alpha", [()]), ("alpha_prime", [(), qk[:1]])):
            value = torch.as_tensor(getattr(self, name))
            if value.shape not in shapes or not ((value >= 0) & (value < 1)).all():
                per_head = f", or {qk[0]} of them" if len(shapes) > 1 else ""
                raise LeadlineError(f"{name} is {getattr(self, name)}; it must be a number in [0, 1){per_head}")

    def __call__(self, X: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Apply the layer in float64: X (..., n, d), h_{l-1} (..., H, n, n) or None -> Y (..., n, d'), h_l or None."""
        self.check(X, state)
        X = accumulate(X).double().unsqueeze(-3)  # (..., 1, n, d)
        query = X @ self.w_qk.double()
        if self.b_qk is not None:
            query = query + self.b_qk.double().unsqueeze(-2)
        hidden = self.carry(query @ X.mT / math.sqrt(self.head_dim), state)
        Y = (hidden.softmax(-1) @ X @ self.w_vo.double()).sum(-3)
        if self.bias is not None:
            Y = Y + self.bias.double()
        if self.alpha:
            Y = self.alpha * X.squeeze(-3) + (1 - self.alpha) * Y
        carries = isinstance(self.alpha_prime, Tensor) or self.alpha_prime > 0
        return Y, hidden if carries else None

    def check(self, X: Tensor, state: Tensor | None) -> None:
        """Check that X and the carried scores fit this layer and each other."""
        heads, width = self.w_qk.shape[:2]
        if X.shape[-1] != width:
            raise LeadlineError(f"X has shape {tuple(X.shape)}; this layer takes (..., tokens, {width})")
        fits = (*X.shape[:-2], heads, X.shape[-2], X.shape[-2])
        if state is not None and state.shape != fits:
            raise LeadlineError(f"state has shape {tuple(state.shape)}; with this X it must be {fits}")

    def carry(self, scores: Tensor, state: Tensor | None) -> Tensor:
        """Compute h_l from the layer's own scores and h_{l-1}, both (..., H, n, n) (HOP 15)."""
        new, old = (weight[:, None, None] for weight in self.weights(state))
        return new * scores if state is None else new * scores + old * state

    def weights(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights of the layer's own scores and of the carried ones, (H,) each."""
        old = torch.as_tensor(self.alpha_prime, dtype=torch.float64, device=self.w_qk.device).expand(len(self.w_qk))
        if state is not None:
            return 1 - old, old
        return (1 - old if self.start == "zero" else torch.ones_like(old)), torch.zeros_like(old)


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Convert an attention-only model of ours to layers.

    Raises:
        LeadlineError: The model is not one of ours or is more than attention.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, TransformerStack):
        raise LeadlineError(
            f"the model is a {type(model).__name__}; the bounds hold for attention-only models: "
            "build one with create_model('attention_only', ...)"
        )
    if getattr(model.config, "positions", None) == "rotary":
        raise LeadlineError("positions is 'rotary'; the bounds hold for scores X W_QK X^T: choose other positions")
    layers = []
    for block in blocks.layers():
        for option, allowed in ATTENTION_ALONE.items():
            given = getattr(block.config, option)
            if given != allowed:
                raise LeadlineError(
                    f"{option} is {given!r}; the bounds hold for attention alone: give {option}={allowed!r}"
                )
        layers.append(_convert(block.attention))
    return layers


def _convert(attention: HopfieldAttention) -> AttentionLayer:
    """Convert one layer. Row vectors: x W is torch's ``x @ linear.weight.T``, so every weight is transposed here."""
    heads, groups, width = attention.heads, attention.kv_heads, attention.head_dim
    alpha = torch.as_tensor(attention.alpha(), dtype=torch.float64)
    if alpha.numel() > 1:
        raise LeadlineError(f"alpha has {alpha.numel()} values, one per head; the bounds hold for one alpha per layer")
    linear, proj = attention.qkv, attention.proj
    bias = torch.zeros_like(linear.weight[:, 0]) if linear.bias is None else linear.bias
    maps = torch.cat((linear.weight, bias[:, None]), dim=1).double().unflatten(0, (-1, width))  # (.., d_k, d + 1)
    q, k, v = maps.split((heads, groups, groups))
    k, v = (part.repeat_interleave(heads // groups, dim=0) for part in (k, v))
    w_o = proj.weight.double().T.unflatten(0, (heads, width))  # (H, d_k, d)
    w_k, w_v = k[..., :-1], v[..., :-1]
    out = (v[..., -1:].mT @ w_o).sum((0, 1))  # P 1 = 1, so b_V reaches W_O unchanged
    return AttentionLayer(
        w_qk=q[..., :-1].mT @ w_k,  # (17)
        w_vo=w_v.mT @ w_o,
        head_dim=width,
        alpha=float(alpha),
        alpha_prime=attention.alpha_prime(),
        start=attention.start,
        b_qk=(w_k.mT @ q[..., -1:]).squeeze(-1),  # (18)
        bias=out if proj.bias is None else out + proj.bias.double(),
    )
