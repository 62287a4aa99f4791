"""Token similarity and escalation, against literal formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics

shapes = st.tuples(st.integers(2, 9), st.integers(1, 7), st.integers(0, 10_000))


def draw(n, d, seed, *lead):
    return torch.randn(*lead, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stochastic(n, seed, *lead):
    return (2 * draw(n, n, seed, *lead)).softmax(-1)


def projectors(n):
    pi1 = torch.full((n, n), 1 / n, dtype=torch.float64)
    return pi1, torch.eye(n, dtype=torch.float64) - pi1


@given(shapes)
def test_similarity_and_diversity_follow_their_definition(shape):
    n, d, seed = shape
    X = draw(n, d, seed, 3)
    pi1, pi2 = projectors(n)
    whole = X.square().sum((-2, -1))
    sim, div = metrics.token_similarity(X), metrics.token_diversity(X)
    assert torch.allclose(sim, (pi1 @ X).square().sum((-2, -1)) / whole, atol=1e-12)
    assert torch.allclose(div, (pi2 @ X).square().sum((-2, -1)) / whole, atol=1e-12)
    assert torch.allclose(sim + div, torch.ones_like(sim), atol=1e-14)
    assert ((sim >= 0) & (sim <= 1)).all()


@given(shapes, st.floats(-30, 30))
def test_similarity_does_not_depend_on_scale_or_order(shape, exponent):
    n, d, seed = shape
    X = draw(n, d, seed).float()
    expected = metrics.token_similarity(X)
    assert torch.allclose(metrics.token_similarity(X * 10**exponent), expected, rtol=1e-5)
    assert torch.allclose(metrics.token_similarity(X.flip(-2)), expected, rtol=1e-5)
    assert metrics.token_cosine(X * 10**exponent).isfinite()


def test_diversity_keeps_three_digits_near_collapse():
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        X = torch.randn(1, 64, generator=g) + 1e-6 * torch.randn(8, 200, 64, generator=g)
        exact = (X.double() - X.double().mean(-2, keepdim=True)).square().sum((-2, -1)) / X.double().square().sum(
            (-2, -1)
        )
        assert torch.allclose(metrics.token_diversity(X).double(), exact, rtol=5e-4)


def test_equal_tokens_are_similar_and_zero_counts_as_equal():
    X = torch.stack((torch.ones(4, 3), torch.zeros(4, 3)))
    assert metrics.token_similarity(X).tolist() == [1, 1]
    assert metrics.token_diversity(X).tolist() == [0, 0]


@given(shapes)
def test_cosine_is_the_mean_over_pairs(shape):
    n, d, seed = shape
    X = draw(n, d, seed)
    pairs = [F.cosine_similarity(X[i], X[j], dim=0) for i in range(n) for j in range(i)]
    assert torch.allclose(metrics.token_cosine(X), torch.stack(pairs).mean(), atol=1e-12)


def test_cosine_of_a_zero_row_and_of_a_single_token():
    X = torch.tensor([[1.0, 0], [0, 0], [2, 0]])
    pairs = [F.cosine_similarity(X[i], X[j], dim=0) for i in range(3) for j in range(i)]
    assert metrics.token_cosine(X) == torch.stack(pairs).mean()
    assert metrics.token_cosine(torch.randn(5, 1, 4)).tolist() == [1] * 5


@given(shapes)
def test_similarity_from_cosine_for_equal_norms(shape):
    n, d, seed = shape
    X = F.normalize(draw(n, d, seed), dim=-1)
    assert torch.allclose(metrics.token_similarity(X), (1 + (n - 1) * metrics.token_cosine(X)) / n, atol=1e-12)


@given(shapes)
def test_rate_is_one_plus_what_the_energy_ratios_say(shape):
    n, d, seed = shape
    X, Y = draw(n, d, seed), draw(n, d, seed + 1)
    xi1, xi2 = metrics.energy_ratios(X, Y)
    pi1, pi2 = projectors(n)
    assert torch.allclose(xi1, (pi1 @ Y).square().sum() / (pi1 @ X).square().sum(), rtol=1e-9)
    assert torch.allclose(xi2, (pi2 @ Y).square().sum() / (pi2 @ X).square().sum(), rtol=1e-9)
    rate = metrics.escalation_rate(X, Y)
    assert torch.allclose(rate, 1 + (xi1 / xi2 - 1) * metrics.token_similarity(X), rtol=1e-9)  # (6)


@given(shapes)
def test_mixing_gains_omega_and_their_bounds(shape):
    n, d, seed = shape
    X, P = draw(n, d, seed, 2), stochastic(n, seed, 2)
    pi1, pi2 = projectors(n)
    mu1, mu2 = metrics.mixing_gains(X, P)
    norm = torch.linalg.matrix_norm
    assert torch.allclose(mu1, norm(pi1 @ P @ X) / norm(pi1 @ X), rtol=1e-9)
    assert torch.allclose(mu2, norm(pi2 @ P @ X) / norm(pi2 @ X), rtol=1e-9)
    e = torch.full((1, n), n**-0.5, dtype=torch.float64)
    omega, delta = metrics.omega(X, P), metrics.delta(P)
    assert torch.allclose(omega, norm(e @ P @ pi2 @ X) / norm(e @ X), rtol=1e-9)
    assert (mu1**2 >= (1 - omega) ** 2 - 1e-9).all()  # (11)
    assert (mu2 <= delta + 1e-9).all()


def test_a_head_axis_gives_a_value_per_head_and_expectations_average_over_heads():
    X, P = draw(6, 5, 0, 3), stochastic(6, 1, 3, 4)  # as many samples as could be mistaken for heads
    mu1, mu2 = metrics.mixing_gains(X, P)
    assert mu1.shape == mu2.shape == metrics.omega(X, P).shape == metrics.delta(P).shape == (3, 4)
    for b in range(3):
        for h in range(4):
            assert torch.allclose(mu1[b, h], metrics.mixing_gains(X[b], P[b, h])[0])
            assert torch.allclose(metrics.omega(X, P)[b, h], metrics.omega(X[b], P[b, h]))
    e1, e2 = metrics.expected_energy_ratios(X, P, gain=0.7, d_sigma2=2.0)
    assert torch.allclose(e1, 1 + 0.7**2 * 2 * mu1.square().mean(-1))  # (29)
    assert torch.allclose(e2, 1 + 0.7**2 * 2 * mu2.square().mean(-1))
    assert torch.allclose(metrics.gamma(X, P, 0.7, 2.0), e2**2 / (e1 + 2 * e2))  # (24)
    Y = draw(6, 5, 9, 3)
    xi1, xi2 = metrics.energy_ratios(X, Y)
    assert torch.allclose(metrics.eta(X, Y, P, 0.7, 2.0), e1 / e2 - xi1 / xi2)  # (14)


@given(shapes, st.integers(-140, 120), st.integers(-140, 120))
def test_energy_ratios_in_all_of_float32(shape, first, second):
    n, d, seed = shape
    X, Y = ((draw(n, d, s).clamp(-3, 3) * 2.0**e).float() for s, e in ((seed, first), (seed + 1, second)))
    for ratio, pi in zip(metrics.energy_ratios(X, Y), projectors(n), strict=True):
        part, whole = (pi @ X.double()).square().sum(), X.double().square().sum()
        if part < 1e-6 * whole:  # hardly more than rounding
            continue
        expected = ((pi @ Y.double()).square().sum() / part).item()
        noise = 1e-10 * (Y.double().square().sum() / part).item()
        if expected > 3.4e38:
            assert ratio == torch.inf
        else:
            assert ratio.item() == pytest.approx(expected, rel=1e-3, abs=max(noise, 1e-44))


def test_energy_ratios_whose_scale_alone_is_out_of_range():
    X, Y = torch.ones(8, 4), torch.zeros(8, 4)
    Y[0] = 1e-3  # Pi1 Y is an eighth of it
    first, _ = metrics.energy_ratios(X, Y * 3e22)
    assert first.item() == pytest.approx((3e19 / 8) ** 2, rel=1e-4)
    X[0] = 2
    assert [xi.item() for xi in metrics.energy_ratios(X * 1e-44, torch.zeros(8, 4))] == [0, 0]
    balanced = torch.cat((torch.ones(4, 4), -torch.ones(4, 4)))
    assert metrics.energy_ratios(X * 1e-44, balanced * 2.0**126)[0] == 0


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e37])
def test_gains_do_not_depend_on_scale(scale):
    X, P = torch.randint(-5, 6, (9, 4)).float(), torch.randn(9, 9).softmax(-1)
    scaled = (X.double() * scale).float()
    for gain, expected in zip(
        metrics.mixing_gains(scaled, P), metrics.mixing_gains(scaled.double(), P.double()), strict=True
    ):
        assert gain.item() == pytest.approx(expected.item(), rel=1e-5)


def test_gamma_is_at_least_a_quarter_for_doubly_stochastic_attention():
    P = torch.eye(5, dtype=torch.float64).roll(1, 0) * 0.3 + 0.7 / 5
    assert metrics.gamma(draw(5, 4, 0), P) >= 0.25
    assert torch.allclose(metrics.mixing_gains(draw(5, 4, 0), P)[0], torch.ones((), dtype=torch.float64))
    assert metrics.omega(draw(5, 4, 0), P) < 1e-14


def test_ratios_without_a_mean_are_nan_not_noise():
    X = metrics.residual(torch.randn(50, 8))
    P = torch.randn(50, 50).softmax(-1)
    assert metrics.energy_ratios(X, torch.randn(50, 8))[0].isnan()
    assert metrics.energy_ratios(X, torch.randn(50, 8))[1].isfinite()
    assert metrics.mixing_gains(X, P)[0].isnan()
    assert metrics.omega(X, P).isnan()


PADDED = [
    lambda X, Y, P, m: metrics.token_similarity(X, m),
    lambda X, Y, P, m: metrics.token_diversity(X, m),
    lambda X, Y, P, m: metrics.token_cosine(X, m),
    lambda X, Y, P, m: metrics.escalation_rate(X, Y, m),
    lambda X, Y, P, m: metrics.energy_ratios(X, Y, m)[0],
    lambda X, Y, P, m: metrics.energy_ratios(X, Y, m)[1],
    lambda X, Y, P, m: metrics.mixing_gains(X, P, m)[0],
    lambda X, Y, P, m: metrics.mixing_gains(X, P, m)[1],
    lambda X, Y, P, m: metrics.omega(X, P, m),
    lambda X, Y, P, m: metrics.eta(X, Y, P, mask=m),
    lambda X, Y, P, m: metrics.gamma(X, P, mask=m),
    lambda X, Y, P, m: metrics.delta(P, m),
    lambda X, Y, P, m: metrics.delta(P, m, method="iterative", tolerance=1e-9),
    lambda X, Y, P, m: metrics.second_eigenvalue(P, m),
    lambda X, Y, P, m: metrics.second_eigenvalue(P, m, method="iterative", tolerance=1e-9),
    lambda X, Y, P, m: metrics.normalized_residual(X, m),
    lambda X, Y, P, m: metrics.effective_rank(X, m),
    lambda X, Y, P, m: metrics.mixed_norm(metrics.residual(X, m)),
    lambda X, Y, P, m: metrics.attention_entropy(P, m).nansum(-1),
]


@pytest.mark.parametrize("metric", PADDED)
@pytest.mark.parametrize("heads", [(), (3,)])
def test_padding_stays_out(metric, heads):
    """A padded sample gives what the cut sample gives, whatever stands in the padding."""
    n, real = 7, 4
    X, Y = draw(n, 5, 0, 2), draw(n, 5, 1, 2)
    mask = torch.zeros(2, n, dtype=torch.bool)
    mask[0, :real] = mask[1, -real:] = True
    P = draw(n, n, 2, 2, *heads)
    keys = mask[:, None, None, :] if heads else mask[:, None, :]
    P = P.masked_fill(~keys, -torch.inf).softmax(-1)
    value = metric(X, Y, P, mask)
    for b, part in ((0, slice(0, real)), (1, slice(n - real, n))):
        cut = metric(X[b, part], Y[b, part], P[b, ..., part, part], None)
        assert torch.allclose(value[b], cut, rtol=1e-6), (value[b], cut)
    X[~mask], Y[~mask] = 1e6, -1e6
    assert torch.equal(metric(X, Y, P, mask), value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_accumulate_in_float32(dtype):
    X, P = torch.randn(3, 600, 16).to(dtype), torch.randn(3, 600, 600).softmax(-1).to(dtype)
    pairs = [
        (metrics.token_similarity(X), metrics.token_similarity(X.float())),
        (metrics.token_cosine(X), metrics.token_cosine(X.float())),
        (metrics.effective_rank(X), metrics.effective_rank(X.float())),
        (metrics.attention_entropy(P), metrics.attention_entropy(P.float())),
        (metrics.omega(X, P), metrics.omega(X.float(), P.float())),
        (metrics.delta(P), metrics.delta(P.float())),
    ]
    for half, full in pairs:
        assert half.dtype == torch.float32
        assert torch.equal(half, full)


@pytest.mark.parametrize(
    "metric",
    [
        metrics.token_similarity,
        metrics.token_diversity,
        metrics.token_cosine,
        metrics.effective_rank,
        lambda X: metrics.escalation_rate(X, X.sin()),
        lambda X: metrics.energy_ratios(X, X.sin()),
        lambda X: metrics.mixing_gains(X, (X @ X.mT).softmax(-1)),
        lambda X: metrics.omega(X, (X @ X.mT).softmax(-1)),
        lambda X: metrics.delta((X @ X.mT).softmax(-1)),
        lambda X: metrics.attention_entropy((X @ X.mT).softmax(-1)),
        lambda X: metrics.normalized_residual(X),
    ],
)
def test_gradients_equal_finite_differences(metric):
    assert torch.autograd.gradcheck(metric, (draw(5, 3, 3, 2).requires_grad_(),))


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: metrics.token_similarity(torch.full((3, 2), torch.nan)), "NaN"),
        (lambda: metrics.token_cosine(torch.tensor([[torch.inf, 1], [0, 1]])), "infinite"),
        (lambda: metrics.token_diversity(torch.empty(2, 0, 4)), "no empty axis"),
        (lambda: metrics.token_diversity(torch.ones(4)), "no empty axis"),
        (lambda: metrics.token_similarity(torch.ones(3, 2, dtype=torch.long)), "floating point"),
        (lambda: metrics.token_similarity([[1.0]]), "floating point"),
        (lambda: metrics.token_similarity(torch.ones(3, 2), torch.ones(3)), "boolean"),
        (lambda: metrics.token_similarity(torch.ones(3, 2), torch.ones(4, dtype=torch.bool)), "broadcast"),
        (lambda: metrics.token_similarity(torch.ones(3, 2), torch.zeros(3, dtype=torch.bool)), "without a real token"),
        (lambda: metrics.omega(torch.ones(3, 2), torch.eye(4)), "P has shape"),
        (lambda: metrics.delta(torch.ones(3, 4)), "square"),
        (lambda: metrics.delta(torch.eye(3), method="magic"), "unknown method 'magic'"),
        (lambda: metrics.spectral_radius(torch.eye(3), tolerance=0), "positive"),
        (lambda: metrics.attention_entropy(-torch.eye(3)), "negative"),
        (lambda: metrics.energy_ratios(torch.ones(3, 2), torch.ones(3, 2).double()), "X is torch.float32 and Y torch"),
        (lambda: metrics.escalation_rate(torch.ones(3, 2).double(), torch.ones(3, 2)), "convert one to the dtype"),
        (lambda: metrics.mixing_gains(torch.ones(3, 2).double(), torch.eye(3)), "X is torch.float64 and P torch"),
        (lambda: metrics.omega(torch.ones(3, 2), torch.eye(3).double()), "X is torch.float32 and P torch.float64"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(LeadlineError) as error:
        call()
    assert part in str(error.value)
    assert "\n" not in str(error.value)
