import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_norms_by_hand(n, d, seed):
    A = torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    columns, rows = A.abs().sum(-2).amax(-1), A.abs().sum(-1).amax(-1)
    assert torch.allclose(metrics.norm_1(A), columns)
    assert torch.allclose(metrics.norm_inf(A), rows)
    assert torch.allclose(metrics.mixed_norm(A), (columns * rows).sqrt())
    centred = A - A.mean(-2, keepdim=True)
    assert torch.allclose(metrics.residual(A), centred, atol=1e-14)
    expected = metrics.mixed_norm(centred) / metrics.mixed_norm(A)
    assert torch.allclose(metrics.normalized_residual(A), expected, atol=1e-14)


def test_mixed_norm_has_no_triangle_inequality():
    row, column = torch.zeros(9, 9), torch.zeros(9, 9)
    row[0], column[:, 0] = 1, 1
    assert metrics.mixed_norm(row + column) > metrics.mixed_norm(row) + metrics.mixed_norm(column)


def test_zero_has_no_residual():
    assert metrics.normalized_residual(torch.zeros(3, 4)) == 0


def test_effective_rank_counts_equal_directions():
    assert math.isclose(metrics.effective_rank(torch.eye(6)[:, :4]).item(), 4, rel_tol=1e-6)
    assert math.isclose(metrics.effective_rank(torch.ones(7, 3)).item(), 1, rel_tol=1e-3)
    assert metrics.effective_rank(torch.zeros(7, 3)) == 0
    assert metrics.effective_rank(torch.randn(5, 40, 8)).le(8).all()


EXPONENTS = [-145, -130, -70, 0, 70, 125]  # of 2: float32 from subnormal to 1e38


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("padded", [False, True])
def test_all_of_float32_is_measured_right(exponent, padded):
    X = (torch.randn(3, 12, 8).clamp(-3, 3).double() * 2.0**exponent).float()
    mask = None
    if padded:
        mask = torch.arange(12) < torch.tensor([[12], [7], [3]])
        X[~mask] = 3e38
    for metric in (metrics.effective_rank, metrics.normalized_residual):
        assert torch.allclose(metric(X, mask).double(), metric(X.double(), mask), rtol=1e-4)
    tiny = 2.0**-149  # what subnormal numbers are rounded to
    assert torch.allclose(metrics.residual(X, mask).double(), metrics.residual(X.double(), mask), atol=tiny, rtol=1e-4)


def test_entropy_runs_from_zero_to_log_n():
    uniform, one_hot = torch.full((2, 5, 8), 1 / 8), torch.eye(8)
    assert torch.allclose(metrics.attention_entropy(uniform), torch.tensor(math.log(8)))
    assert metrics.attention_entropy(one_hot).tolist() == [0] * 8
    P = torch.randn(2, 3, 8, 8).softmax(-1)
    assert torch.allclose(metrics.attention_entropy(P), torch.distributions.Categorical(probs=P).entropy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [3, 100, 2000])
def test_entropy_takes_rounded_weights(dtype, n):
    P = (3 * torch.randn(50, n)).softmax(-1).to(dtype)
    assert (P.float().sum(-1) != 1).any()
    assert torch.equal(metrics.attention_entropy(P), metrics.attention_entropy(P.float()))
    flushed = torch.full((2, 3), 1 / 3).to(dtype)  # all rounded the same way
    assert torch.allclose(metrics.attention_entropy(flushed), torch.tensor(math.log(3)), atol=5e-3)


def test_entropy_of_a_query_with_nothing_to_see_is_zero():
    P = torch.full((2, 3, 4), 1 / 4)
    P[0, 1] = 0
    assert metrics.attention_entropy(P)[0, 1] == 0
    assert metrics.attention_entropy(torch.zeros(2, 3, 4)).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize(
    ("scale", "dtype", "given"),
    [(2, torch.float32, "2"), (0.9, torch.float32, "0.9"), (0.99, torch.float64, "0.99"), (0.9375, torch.bfloat16, "")],
)
def test_entropy_refuses_rows_that_do_not_sum_to_one(scale, dtype, given):
    P = torch.full((2, 3, 4), 1 / 4, dtype=dtype)
    P[1, 2] *= scale
    with pytest.raises(LeadlineError, match=f"P has a row that sums to {given}.*; give attention weights") as error:
        metrics.attention_entropy(P)
    assert "\n" not in str(error.value)
    real = torch.tensor([[True] * 3, [True, True, False]])
    assert metrics.attention_entropy(P, real).isnan().sum() == 1  # a padded query may have any row


def test_entropy_of_padded_queries_is_nan():
    mask = torch.tensor([[True, True, False]])
    entropy = metrics.attention_entropy(torch.full((1, 2, 3, 3), 1 / 3), mask)
    assert entropy.isnan().tolist() == [[[False, False, True]] * 2]
