"""Attention formulas: stochastic in the way each promises, under masks too, with true gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics, ops
from leadline.nn import BlockConfig, HopfieldAttention, TransformerStack


def scores(n=5, seed=0, spread=1.0, symmetric=False, lead=(2, 3)):
    S = spread * torch.randn(*lead, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (S + S.mT) / 2 if symmetric else S


@given(st.sampled_from(list(ops.FORMULAS)), st.integers(1, 7), st.floats(0.01, 1.5), st.integers(0, 999), st.booleans())
def test_weights_are_stochastic_and_padding_is_out(formula, n, spread, seed, padded):
    S = scores(n, seed, spread, formula == "symmetric")
    mask = None
    if padded and n > 1:
        mask = torch.ones(2, 1, 1, n, dtype=torch.bool)
        mask[0, ..., -1] = False
    P = ops.attention_weights(S, mask, formula=formula)
    assert (P >= 0).all()
    real = torch.ones(2, 1, n, 1, dtype=torch.bool) if mask is None else mask.mT
    doubly = formula in ("sinkhorn", "symmetric")
    rows = real.to(P.dtype) if doubly else torch.ones(2, 1, n, 1, dtype=torch.float64)
    assert torch.allclose(P.sum(-1, keepdim=True), rows.expand(2, 3, n, 1), atol=1e-12)
    if doubly:
        assert torch.allclose(P.sum(-2), real[..., 0].to(P.dtype).expand(2, 3, n), atol=1e-12)
    if formula == "symmetric":
        assert torch.equal(P, P.mT)
    if mask is not None:
        assert (P[0, ..., -1] == 0).all()


def test_formulas_by_hand():
    S = torch.tensor([[[[1.0, 2, -1], [-1, -2, -3], [0, 0, 4]]]])
    assert torch.equal(ops.attention_weights(S), S.softmax(-1))
    relu = ops.attention_weights(S, formula="relu")
    assert torch.allclose(relu[0, 0], torch.tensor([[1 / 3, 2 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]]))
    sigmoid = S.sigmoid() / S.sigmoid().sum(-1, keepdim=True)
    assert torch.allclose(ops.attention_weights(S, formula="sigmoid"), sigmoid)
    # a 2 x 2 doubly stochastic matrix keeps the cross ratio of exp(S)
    P = ops.attention_weights(S[..., :2, :2].double(), formula="sinkhorn")[0, 0]
    ratio = torch.tensor(1.0 - 2 - (-1) + -2).double().exp()
    assert torch.isclose(P[0, 0] * P[1, 1] / (P[0, 1] * P[1, 0]), ratio)


def test_an_all_zero_row_attends_to_what_it_may_see():
    S = -torch.ones(1, 1, 3, 3)
    P = ops.attention_weights(S, causal=True, formula="relu")[0, 0]
    assert torch.allclose(P, torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]))


@pytest.mark.parametrize("formula", ["softmax", "relu", "sigmoid"])
def test_a_query_with_nothing_to_see_gets_no_weights(formula):
    mask = torch.tensor([False, True, True]).view(1, 1, 1, 3)
    S = torch.randn(1, 1, 3, 3, requires_grad=True)
    P = ops.attention_weights(S, mask, causal=True, formula=formula)
    assert (P[..., 0, :] == 0).all()
    P.square().sum().backward()
    assert S.grad.isfinite().all()


@pytest.mark.parametrize("formula", list(ops.FORMULAS))
def test_gradients(formula):
    S = scores(4, 1, 1.0, lead=(1, 2)).requires_grad_()
    mask = torch.tensor([True, True, True, False]).view(1, 1, 1, 4)

    def weights(S):
        return ops.attention_weights((S + S.mT) / 2 if formula == "symmetric" else S, mask, formula=formula)

    assert torch.autograd.gradcheck(weights, (S,), atol=1e-6)


def test_symmetric_attention_has_delta_equal_to_lambda_2():
    P = ops.attention_weights(scores(9, symmetric=True), formula="symmetric")
    assert torch.allclose(metrics.delta(P), metrics.second_eigenvalue(P), atol=1e-9)  # corollary 2.7
    X = torch.randn(2, 9, 4, dtype=torch.float64)
    assert metrics.omega(X, P).max() < 1e-12
    assert torch.allclose(metrics.mixing_gains(X, P)[0], torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("formula", list(ops.FORMULAS))
def test_in_a_stack_by_hand(formula):
    config = BlockConfig(depth=1, dim=6, heads=2, ffn=0, norm="none", skip=False, formula=formula)
    stack = TransformerStack(config).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    attention = stack[0].attention
    q, k, v = attention.project(x)
    assert (k is q) == (formula == "symmetric")
    P = ops.attention_weights(q @ k.mT / 3**0.5, formula=formula)
    assert torch.allclose(stack(x), attention.proj((P @ v).transpose(1, 2).flatten(2)), atol=1e-12)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: ops.attention_weights(scores(), formula="softmin"), "did you mean 'softmax'?"),
        (lambda: ops.attention_weights(scores(), causal=True, formula="sinkhorn"), "no causal mask"),
        (lambda: ops.attention_weights(scores()[..., :2, :], formula="symmetric"), "as many queries as keys"),
        (lambda: ops.attention_weights(scores(5, 0, 300.0), formula="sinkhorn"), "Sinkhorn scaling is off by"),
        (lambda: HopfieldAttention(6, 2, causal=True, formula="sinkhorn"), "no causal form"),
        (lambda: HopfieldAttention(6, 2, kv_heads=1, formula="symmetric"), "kv_heads must be heads"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(LeadlineError) as error:
        call()
    assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("formula", ["sinkhorn", "symmetric"])
def test_scaling_that_does_not_settle_says_so(formula, monkeypatch):
    monkeypatch.setattr("leadline.ops.formulas._SINKHORN_STEPS", 2)
    with pytest.raises(LeadlineError, match=r"Sinkhorn scaling is off by .* after 2 steps"):
        ops.attention_weights(scores(symmetric=True), formula=formula)
