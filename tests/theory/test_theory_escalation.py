"""Expected escalation rates (TSE, section 2.2), against Monte Carlo and against each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline import metrics, theory
from leadline.errors import LeadlineError

SEEDS = st.integers(0, 10_000)


def make(seed: int, n: int = 6, d: int = 4, heads: int = 0, sharpness: float = 2.0) -> tuple[Tensor, Tensor]:
    """Tokens with a mean, and a random attention matrix; float64."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    X = X + torch.randn(d, generator=generator, dtype=torch.float64)
    shape = (heads, n, n) if heads else (n, n)
    P = (sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1)
    return X, P


def sinkhorn(P: Tensor) -> Tensor:
    for _ in range(500):
        P = P / P.sum(-2, keepdim=True)
        P = P / P.sum(-1, keepdim=True)
    return P


def draws(X: Tensor, P: Tensor, gain: float, d_sigma2: float, count: int, seed: int = 0) -> Tensor:
    """``count`` samples of Y = X + gain [P_1 X W_1 ... P_h X W_h]."""
    generator = torch.Generator().manual_seed(seed)
    d = X.shape[-1]
    W = torch.randn(count, d, d, generator=generator, dtype=X.dtype) * math.sqrt(d_sigma2 / d)
    blocks = W.chunk(P.shape[0] if P.ndim == 3 else 1, dim=-1)  # d x d/h each
    mixed = P @ X if P.ndim == 3 else (P @ X)[None]
    return X + gain * torch.cat([m @ block for m, block in zip(mixed, blocks, strict=True)], dim=-1)


def assert_mean(samples: Tensor, expected: Tensor | float) -> None:
    """The sample mean lies within 4 standard errors, and these are small enough to say something."""
    error = samples.std() / math.sqrt(len(samples))
    assert error < 0.01 * abs(float(expected))
    assert abs(samples.mean() - expected) < 4 * error


@pytest.mark.parametrize(("heads", "gain", "d_sigma2"), [(0, 1.0, 1.0), (2, 1.0, 1.0), (4, 0.6, 2.0)])
def test_energy_ratios_have_the_expected_means(heads: int, gain: float, d_sigma2: float) -> None:
    X, P = make(1, n=7, d=8, heads=heads)
    xi = metrics.energy_ratios(X, draws(X, P, gain, d_sigma2, 20_000))
    for samples, expected in zip(xi, theory.expected_energy_ratios(X, P, gain, d_sigma2), strict=True):  # (9), (29)
        assert_mean(samples, expected)


@pytest.mark.parametrize(("heads", "gain", "d_sigma2"), [(0, 1.0, 1.0), (2, 1.0, 1.0), (4, 0.6, 2.0)])
def test_expected_rate_is_the_ratio_of_expectations(heads: int, gain: float, d_sigma2: float) -> None:
    """(13) and (18) without E[eta] are t_div(X) E||Y||^2 / E||Pi2 Y||^2: no O(1/d) is left in that comparison."""
    X, P = make(2, n=7, d=8, heads=heads)
    Y = draws(X, P, gain, d_sigma2, 20_000)
    whole, spread = Y.square().sum((-2, -1)), metrics.residual(Y).square().sum((-2, -1))
    rate = theory.expected_rate(X, P, gain, d_sigma2)
    # zero in expectation when the rate is right
    gap = (metrics.token_diversity(X) * whole - rate * spread) / spread.mean()
    assert_mean(gap + rate, rate)


def test_rate_over_draws_differs_by_the_mean_of_eta() -> None:
    """(13), (18) are exact with E[eta] in them: r + eta t_sim is the same for every draw."""
    X, P = make(3, n=7, d=8, heads=2)
    Y = draws(X, P, 1.0, 1.0, 200)
    expected = theory.expected_rate(X, P)
    r, eta = metrics.escalation_rate(X, Y), metrics.eta(X, Y, P)
    assert r.std() > 0.01
    torch.testing.assert_close(r + eta * metrics.token_similarity(X), expected.expand(200))


@pytest.mark.parametrize(("d", "mean"), [(8, 1.2725), (64, 1.2965)])
def test_lower_bound_is_asymptotic_in_d(d: int, mean: float) -> None:
    """Symmetric P, and a token mean along the same direction as the rest: the bound is 1.3, E[r] near 1.3 - .224/d."""
    P = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)  # lambda_2 = delta = .5
    X = torch.zeros(2, d, dtype=torch.float64)
    X[0, 0] = 2  # t_sim = .5
    for rate in (theory.rate_lower_bound, theory.expected_rate, theory.rate_estimate):
        torch.testing.assert_close(rate(X, P), torch.tensor(1.3, dtype=torch.float64))
    row = torch.randn(50_000, 1, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64) / d**0.5
    r = metrics.escalation_rate(X, X + P @ X[:, :1] * row)  # only the first row of W counts
    assert_mean(r, mean)
    assert r.mean() < 1.3 - 0.15 / d


@given(SEEDS, st.sampled_from([0, 1, 3]), st.floats(0.1, 3), st.floats(0.0, 6))
@settings(max_examples=60, deadline=None)
def test_lower_bound_is_below_the_expected_rate(seed: int, heads: int, gain: float, sharpness: float) -> None:
    X, P = make(seed, heads=heads, sharpness=sharpness)
    assert theory.rate_lower_bound(X, P, gain) <= theory.expected_rate(X, P, gain) + 1e-9
    if theory.premise_holds(X, P):
        assert theory.rate_lower_bound(X, P, gain) > 1


@given(SEEDS, st.floats(0.1, 3))
@settings(max_examples=30, deadline=None)
def test_expected_rate_is_the_printed_expression(seed: int, gain: float) -> None:
    X, P = make(seed, heads=3)
    mu1, mu2 = (mu.square().mean() for mu in metrics.mixing_gains(X, P))
    factor = gain**2 * 1.5
    printed = 1 + factor / (1 + factor * mu2) * (mu1 - mu2) * metrics.token_similarity(X)  # (18)
    torch.testing.assert_close(theory.expected_rate(X, P, gain, d_sigma2=1.5), printed)


@given(SEEDS, st.floats(0.1, 3))
@settings(max_examples=30, deadline=None)
def test_corollary_2_7(seed: int, gain: float) -> None:
    X, P = make(seed)
    P = sinkhorn(P)
    torch.testing.assert_close(metrics.omega(X, P), torch.zeros((), dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(metrics.mixing_gains(X, P)[0], torch.ones((), dtype=torch.float64))
    factor, spread, shared = gain**2, metrics.delta(P).square(), metrics.token_similarity(X)
    expected = 1 + factor * (1 - spread) / (1 + factor * spread) * shared
    torch.testing.assert_close(theory.rate_lower_bound(X, P, gain), expected, atol=1e-8, rtol=0)
    S = sinkhorn(P @ P.mT)  # symmetric: delta = |lambda_2|
    torch.testing.assert_close(theory.rate_lower_bound(X, S, gain), theory.rate_estimate(X, S, gain))


def test_heads_are_averaged_before_the_rate_is_formed() -> None:
    X, P = make(13, n=7, heads=3)
    P[0], P[1] = torch.eye(7, dtype=torch.float64), 1 / 7
    shared, gain2 = metrics.token_similarity(X), 0.8**2
    kept = sum((1 - metrics.omega(X, P[k])) ** 2 for k in range(3)) / 3
    spread = sum(metrics.delta(P[k]) ** 2 for k in range(3)) / 3
    squared = sum(metrics.second_eigenvalue(P[k]) ** 2 for k in range(3)) / 3
    bound = 1 + gain2 / (1 + gain2 * spread) * (kept - spread) * shared
    torch.testing.assert_close(theory.rate_lower_bound(X, P, 0.8), bound)
    estimate = 1 + gain2 * (1 - squared) / (1 + gain2 * squared) * shared
    torch.testing.assert_close(theory.rate_estimate(X, P, 0.8), estimate)


def test_estimate_misleads_where_delta_is_large() -> None:
    """All weight on two columns: lambda_2 = 0 promises the full rate 1 + t_sim; delta = 2, and diversity even grows."""
    P = torch.zeros(8, 8, dtype=torch.float64)
    P[:4, 0] = P[4:, 1] = 1
    X = torch.ones(8, 3, dtype=torch.float64)
    X[0, 0], X[1, 0] = 2, 0  # the two tokens that all others turn into are the only ones that differ
    shared = metrics.token_similarity(X)
    assert float(metrics.delta(P)) == pytest.approx(2)
    torch.testing.assert_close(theory.rate_estimate(X, P), 1 + shared)
    torch.testing.assert_close(theory.expected_rate(X, P), 1 - 0.6 * shared)
    torch.testing.assert_close(theory.rate_lower_bound(X, P), 1 - 0.6 * shared)
    assert not theory.premise_holds(X, P)


def test_premise_is_that_of_the_worst_head() -> None:
    X = make(4, n=8)[0].expand(2, 8, 4)
    flat = torch.full((8, 8), 1 / 8, dtype=torch.float64)
    sharp = torch.eye(8, dtype=torch.float64)
    P = torch.stack((torch.stack((flat, flat)), torch.stack((flat, sharp))))  # (2, heads, 8, 8)
    assert theory.premise_holds(X, P).tolist() == [True, False]
    assert theory.premise_holds(X, P[:, 0]).tolist() == [True, True]


@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0])
def test_local_rate(gain: float) -> None:
    """Remark 2.8: near collapse, with softmax attention, all three tend to 1 + gain^2."""
    X, _ = make(5, n=12, d=6)
    X = X.mean(0) + 1e-3 * (X - X.mean(0))
    P = (X @ X.mT).softmax(-1)
    for rate in (theory.expected_rate, theory.rate_lower_bound, theory.rate_estimate):
        assert float(rate(X, P, gain)) == pytest.approx(1 + gain**2, rel=2e-3)
    X = X.mean(0) + 1e-3 * (X - X.mean(0))
    assert float(theory.expected_rate(X, (X @ X.mT).softmax(-1), gain)) == pytest.approx(1 + gain**2, rel=1e-6)


def test_pre_norm_grows_by_what_attention_adds() -> None:
    """(20): E||Y||^2 = ||X||^2 + ||P(X^) X^||^2, the latter by the gains mu_i of X^."""
    X, _ = make(6, n=7, d=8)
    normed = torch.nn.functional.layer_norm(5 * X, (8,))
    P = (normed @ normed.mT / 8**0.5).softmax(-1)
    mu1, mu2 = metrics.mixing_gains(normed, P)
    energy = normed.square().sum()
    shared = energy * metrics.token_similarity(normed)
    expected = X.square().sum() + mu1**2 * shared + mu2**2 * (energy - shared)
    added = draws(normed, P, 1.0, 1.0, 20_000) - normed
    assert_mean((X + added).square().sum((-2, -1)), expected)


def test_tokens_without_a_mean() -> None:
    """After a complete de-escalation mu_1 and omega are 0/0; the rate is not."""
    X, P = make(7, n=7, d=8)
    X = metrics.residual(X)
    assert metrics.mixing_gains(X, P)[0].isnan()
    Y = draws(X, P, 1.0, 1.0, 20_000)
    whole, spread = Y.square().sum((-2, -1)), metrics.residual(Y).square().sum((-2, -1))
    rate = theory.expected_rate(X, P)
    assert rate > 1.01
    assert_mean((whole - rate * spread) / spread.mean() + rate, rate)
    assert theory.rate_lower_bound(X, P) == 1
    assert not theory.premise_holds(X, P)


def test_equal_tokens_have_no_rate() -> None:
    X, P = make(8)
    assert theory.expected_rate(X.mean(0).expand_as(X), P).isnan()


@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_scale_of_the_tokens_does_not_matter(scale: float) -> None:
    X, P = make(9, heads=2)
    for rate in (theory.expected_rate, theory.rate_estimate, theory.rate_lower_bound):
        torch.testing.assert_close(rate(scale * X, P), rate(X, P))


def test_padding_stays_out_and_samples_stay_apart() -> None:
    n = 5
    mask = torch.tensor([[True] * n + [False] * 2, [True] * (n + 2)])
    batch, attention = zip(*(make(seed, n=n + 2, heads=2) for seed in (10, 11)), strict=True)
    X, P = torch.stack(batch), torch.stack(attention)
    P = P * mask[:, None, None, :]
    P = P / P.sum(-1, keepdim=True)
    for rate in (theory.expected_rate, theory.rate_lower_bound, theory.rate_estimate):
        both = rate(X, P, 0.7, mask=mask)
        torch.testing.assert_close(both[0], rate(X[0, :n], P[0, :, :n, :n], 0.7))
        torch.testing.assert_close(both[1], rate(X[1], P[1], 0.7))
    assert theory.premise_holds(X, P, mask).shape == (2,)


@pytest.mark.parametrize("gain", [0.3, 1.0, 2.0])
def test_critical_tau_balances_attention(gain: float) -> None:
    assert (1 - theory.critical_tau(gain)) ** 2 * (1 + gain**2) == pytest.approx(1)
    assert theory.critical_tau() == pytest.approx(0.2929, abs=1e-4)


@pytest.mark.parametrize(("tau", "diversity"), [(0.1, 0.001), (0.25, 0.1), (0.35, 0.95), (0.5, 0.95)])
def test_tau_above_the_critical_one_keeps_diversity(tau: float, diversity: float) -> None:
    """60 steps of attention with fresh weights, then (21): diversity goes one way or the other."""
    X, _ = make(12, n=16, d=256)
    generator = torch.Generator().manual_seed(0)
    X = metrics.residual(X) + 0.25 * X.mean(0)
    for _ in range(60):
        W = torch.randn(256, 256, generator=generator, dtype=torch.float64) / 16
        X = X + torch.full((16, 16), 1 / 16, dtype=torch.float64) @ X @ W
        X = X - tau * X.mean(0)
        X = X / X.norm()
    above = tau > theory.critical_tau()
    assert (metrics.token_diversity(X) > diversity) if above else (metrics.token_diversity(X) < diversity)


def test_bad_input() -> None:
    X, P = make(0)
    for function in (theory.expected_rate, theory.rate_lower_bound, theory.rate_estimate):
        with pytest.raises(LeadlineError, match=r"gain is -1\.0; it must be a finite number"):
            function(X, P, -1.0)
    with pytest.raises(LeadlineError, match="gain is nan"):
        theory.critical_tau(float("nan"))
    with pytest.raises(LeadlineError, match="d_sigma2 is inf"):
        theory.expected_rate(X, P, 1.0, float("inf"))
    with pytest.raises(LeadlineError, match="P must be"):
        theory.expected_rate(X, P[:3, :3])
    with pytest.raises(LeadlineError, match="P must be"):
        theory.premise_holds(X, P[:3, :3])
    with pytest.raises(LeadlineError, match="NaN"):
        theory.rate_estimate(X * float("nan"), P)
