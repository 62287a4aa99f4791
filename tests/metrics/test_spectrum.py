"""delta and lambda_2: the iterative path against torch's decompositions, and matrices known on paper."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import metrics


def attention(n, spread, seed, *lead):
    g = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*lead, n, n, generator=g, dtype=torch.float64)).softmax(-1)


@given(st.integers(2, 40), st.floats(0.1, 6), st.integers(0, 10_000))
def test_iterative_equals_exact(n, spread, seed):
    P = attention(n, spread, seed, 2)
    moduli = torch.linalg.eigvals(P).abs().sort(descending=True).values[..., 1]
    singular = torch.linalg.svdvals(P - P.mean(-2, keepdim=True))[..., 0]
    assert torch.allclose(metrics.second_eigenvalue(P, method="exact"), moduli, rtol=1e-6)
    assert torch.allclose(metrics.second_eigenvalue(P, method="iterative"), moduli, rtol=1e-3)
    assert torch.allclose(metrics.delta(P, method="exact"), singular, rtol=1e-9)
    assert torch.allclose(metrics.delta(P, method="iterative"), singular, rtol=1e-3)


def test_a_large_batch_takes_the_iterative_path_by_itself(monkeypatch):
    P = attention(1024, 1.0, 0, 2).float()
    exact = torch.linalg.eigvals(P[0].double()).abs().sort(descending=True).values[1]
    singular = torch.linalg.svdvals((P - P.mean(-2, keepdim=True)).double())[:, 0]

    def refuse(*_):
        raise AssertionError("a full decomposition was used")

    monkeypatch.setattr(torch.linalg, "eigvals", refuse)
    monkeypatch.setattr(torch.linalg, "matrix_norm", _no_two_norm(torch.linalg.matrix_norm, refuse))
    assert torch.allclose(metrics.second_eigenvalue(P)[0].double(), exact, rtol=1e-3)
    assert torch.allclose(metrics.delta(P).double(), singular, rtol=1e-4)


def _no_two_norm(matrix_norm, refuse):
    return lambda A, ord="fro", **kw: refuse() if ord == 2 else matrix_norm(A, ord=ord, **kw)


def test_complex_pairs():
    """A lazy walk around a circle: eigenvalues .9 exp(2 pi i k / n) but for the first."""
    n = 150
    P = 0.9 * torch.eye(n).roll(1, 1) + 0.1 / n
    for method in ("exact", "iterative"):
        assert torch.allclose(metrics.second_eigenvalue(P, method=method), torch.tensor(0.9), rtol=1e-4)
        assert torch.allclose(metrics.delta(P, method=method), torch.tensor(0.9), rtol=1e-4)


def test_two_column_attention_has_delta_two_and_no_second_eigenvalue():
    P = torch.zeros(8, 8)
    P[:4, 0] = P[4:, 1] = 1
    for method in ("exact", "iterative"):
        assert torch.allclose(metrics.delta(P, method=method), torch.tensor(2.0), rtol=1e-4)
        assert metrics.second_eigenvalue(P, method=method) < 1e-3  # a double eigenvalue: rounding shows as its root


def test_a_nilpotent_part_is_not_taken_for_an_eigenvalue():
    A = torch.diag(torch.ones(199, dtype=torch.float64), 1)  # ||A^k|| stays near 14 until k = 200, where it is 0
    assert metrics.spectral_radius(A) == 0
    A[0, 0] = 0.5
    assert torch.allclose(metrics.spectral_radius(A), torch.tensor(0.5, dtype=torch.float64), rtol=1e-3)


def test_causal_attention_reads_its_diagonal():
    scores = torch.randn(3, 2, 12, 12, dtype=torch.float64).masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    P = scores.softmax(-1)
    expected = P.diagonal(dim1=-2, dim2=-1).sort(descending=True).values[..., 1]
    assert torch.equal(metrics.second_eigenvalue(P), expected)
    assert torch.allclose(expected, torch.linalg.eigvals(P).abs().sort(descending=True).values[..., 1])
    uniform = torch.ones(300, 300).tril() / torch.arange(1, 301)[:, None]
    assert metrics.second_eigenvalue(uniform) == 0.5


def test_uniform_attention_and_a_single_token():
    assert metrics.delta(torch.full((200, 200), 1 / 200)) < 1e-6
    assert metrics.second_eigenvalue(torch.full((200, 200), 1 / 200)) < 1e-6
    assert metrics.second_eigenvalue(torch.ones(4, 1, 1)).tolist() == [0] * 4
    assert metrics.spectral_radius(torch.zeros(3, 3)) == 0


@pytest.mark.parametrize("metric", [metrics.delta, metrics.second_eigenvalue])
def test_iterative_gradient_is_the_exact_one(metric):
    P = attention(12, 2.0, 5, 2)
    P = 0.5 * (P + P.mT) if metric is metrics.second_eigenvalue else P  # real and simple
    grads = []
    for kwargs in ({"method": "exact"}, {"method": "iterative", "tolerance": 1e-13}):
        leaf = P.clone().requires_grad_()
        metric(leaf, **kwargs).sum().backward()
        grads.append(leaf.grad)
    assert torch.allclose(*grads, atol=1e-6)
