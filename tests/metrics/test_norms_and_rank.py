import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import metrics


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


def test_entropy_runs_from_zero_to_log_n():
    uniform, one_hot = torch.full((2, 5, 8), 1 / 8), torch.eye(8)
    assert torch.allclose(metrics.attention_entropy(uniform), torch.tensor(math.log(8)))
    assert metrics.attention_entropy(one_hot).tolist() == [0] * 8
    P = torch.randn(2, 3, 8, 8).softmax(-1)
    assert torch.allclose(metrics.attention_entropy(P), torch.distributions.Categorical(probs=P).entropy(), atol=1e-6)


def test_entropy_of_padded_queries_is_nan():
    mask = torch.tensor([[True, True, False]])
    entropy = metrics.attention_entropy(torch.full((1, 2, 3, 3), 1 / 3), mask)
    assert entropy.isnan().tolist() == [[[False, False, True]] * 2]
