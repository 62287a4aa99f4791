"""TSE's blocks against torch's own encoder layer, and the draws against what the paper prints."""

import math

import pytest
import torch
from torch import nn

from leadline.metrics import token_diversity
from leadline.papers.shared.algorithm1 import (
    Sizes,
    Weights,
    attention,
    de_escalate,
    draw_tokens,
    draw_weights,
    post_norm,
    pre_norm,
)

SIZES = Sizes(n=6, d=16, heads=4, ffn=24)


def encoder_layer(weights: Weights, norm_first: bool) -> nn.TransformerEncoderLayer:
    """torch's block with the same weights, the output projection the identity, biases 0."""
    layer = nn.TransformerEncoderLayer(
        SIZES.d, SIZES.heads, SIZES.ffn, dropout=0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in (layer.self_attn.in_proj_bias, layer.self_attn.out_proj.bias):
            parameter.zero_()
        layer.self_attn.in_proj_weight.copy_(torch.cat((weights.q, weights.k, weights.w), dim=1).T)
        layer.self_attn.out_proj.weight.copy_(torch.eye(SIZES.d))
        for linear, weight in ((layer.linear1, weights.w1), (layer.linear2, weights.w2)):
            linear.weight.copy_(weight.T)
            linear.bias.zero_()
    return layer


@pytest.mark.parametrize(("block", "norm_first"), [(post_norm, False), (pre_norm, True)])
def test_block_is_torchs(block, norm_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    X = draw_tokens(SIZES, 3, generator).double()
    weights = Weights(*(weight.double() for weight in draw_weights(SIZES, (), generator)))
    torch.testing.assert_close(block(X, weights, SIZES.heads).y4, encoder_layer(weights, norm_first)(X))


@pytest.mark.parametrize("block", [post_norm, pre_norm])
def test_trials_do_not_mix(block) -> None:
    """Weights per trial, all at once, give what each trial gives alone."""
    generator = torch.Generator().manual_seed(2)
    X, weights = draw_tokens(SIZES, 3, generator), draw_weights(SIZES, (3,), generator)
    together = block(X, weights, SIZES.heads, gain=0.5)
    for i in range(3):
        alone = block(X[i], Weights(*(weight[i] for weight in weights)), SIZES.heads, gain=0.5)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[i], b)


def test_draws_are_as_printed() -> None:
    sizes = Sizes(n=4, d=256, heads=4, ffn=512)
    weights = draw_weights(sizes, (), torch.Generator().manual_seed(3))
    for weight, rows in ((weights.q, 256), (weights.k, 256), (weights.w1, 256), (weights.w2, 512)):
        assert weight.abs().max() <= 1 / math.sqrt(rows)
        assert weight.var().item() == pytest.approx(1 / (3 * rows), rel=0.03)
    assert weights.w.var().item() == pytest.approx(1 / 256, rel=0.03)


@pytest.mark.parametrize("formula", ["softmax", "relu", "sigmoid", "sinkhorn", "symmetric"])
def test_attention_is_row_stochastic(formula: str) -> None:
    generator = torch.Generator().manual_seed(4)
    P = attention(draw_tokens(SIZES, 2, generator), draw_weights(SIZES, (2,), generator), SIZES.heads, formula)
    assert P.shape == (2, 4, 6, 6)
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 4, 6))
    if formula == "symmetric":
        torch.testing.assert_close(P, P.mT)


def test_de_escalation_is_21() -> None:
    X = torch.randn(2, 5, 3, dtype=torch.float64)
    Pi = torch.full((5, 5), 1 / 5, dtype=torch.float64)
    torch.testing.assert_close(de_escalate(X, 0.3), X - 0.3 * Pi @ X)
    assert token_diversity(de_escalate(X, 1.0)).min().item() == pytest.approx(1)
