"""Block influence, angular distance, divergence of outputs and cosine across samples, against literal loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics

shapes = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 10_000))
exponents = st.integers(-125, 120)


def draw(n, d, seed, *lead):
    return torch.randn(*lead, n, d, generator=torch.Generator().manual_seed(seed))


def cosines(X, Y):
    """Cosine of each pair of rows in float64."""
    return [
        sum(a * b for a, b in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y))
        for x, y in zip(X.double().tolist(), Y.double().tolist(), strict=True)
    ]


@given(shapes)
def test_influence_and_angle_follow_their_definitions(shape):
    n, d, seed = shape
    X, Y = draw(n, d, seed), draw(n, d, seed + 1)
    values = [min(1, max(-1, c)) for c in cosines(X, Y)]
    assert metrics.block_influence(X, Y).item() == pytest.approx(1 - sum(values) / n, abs=1e-6)
    angles = sum(math.acos(c) for c in values) / n / math.pi
    assert metrics.angular_distance(X, Y).item() == pytest.approx(angles, abs=1e-6 if d > 1 else 1e-3)


@given(shapes, exponents, exponents)
def test_lengths_do_not_count(shape, first, second):
    n, d, seed = shape
    X, Y = draw(n, d, seed), draw(n, d, seed + 1)
    for metric in (metrics.block_influence, metrics.angular_distance):
        expected = metric(X, Y)
        assert torch.allclose(metric(X * 2.0**first, Y * 2.0**second), expected, atol=1e-6)
        assert metric(X, X * 2.0**second) < 1e-6
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(metric(X[order], Y[order]), expected, atol=1e-6)


def test_a_block_that_does_nothing_has_influence_exactly_zero():
    X = draw(50, 33, 0, 4)
    X[:, 3] = 0
    X[0, 1] = 1e-42
    assert metrics.block_influence(X, X).tolist() == [0] * 4
    assert metrics.angular_distance(X, X).tolist() == [0] * 4
    assert torch.allclose(metrics.block_influence(X, -X), torch.tensor(2 * 49 / 50), atol=1e-6)
    assert torch.allclose(metrics.angular_distance(X, -X), torch.tensor(49 / 50), atol=1e-6)


def test_small_changes_keep_their_digits():
    X = draw(40, 64, 0)
    Y = X + 1e-5 * draw(40, 64, 1)
    x, y = X.double(), Y.double()
    across = (y - x * (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)).norm(dim=-1)
    angle = torch.atan2(across, (x * y).sum(-1) / x.norm(dim=-1))
    assert metrics.angular_distance(X, Y).item() == pytest.approx(angle.mean().item() / math.pi, rel=5e-3)
    expected = 2 * (angle / 2).sin().square().mean().item()
    assert metrics.block_influence(X, Y).item() == pytest.approx(expected, rel=1e-2)


def test_a_zero_row_has_cosine_zero_with_another():
    X, Y = torch.zeros(1, 3), torch.ones(1, 3)
    for x, y in ((X, Y), (Y, X)):
        assert metrics.block_influence(x, y) == 1
        assert metrics.angular_distance(x, y) == 0.5
    assert metrics.block_influence(X, X) == metrics.angular_distance(X, X) == 0


@given(st.integers(1, 5), st.integers(2, 30), st.integers(0, 10_000))
def test_divergence_follows_its_definition(n, vocabulary, seed):
    A, B = 3 * draw(n, vocabulary, seed, 2), 3 * draw(n, vocabulary, seed + 1, 2)
    p, q = A.double().softmax(-1), B.double().softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean(-1)
    assert torch.allclose(metrics.kl_divergence(A, B).double(), expected, atol=1e-5)
    assert torch.allclose(metrics.kl_divergence(A + 7, B - 3), metrics.kl_divergence(A, B), atol=1e-5)
    assert metrics.kl_divergence(A, A).tolist() == [0, 0]


def test_divergence_of_words_that_are_ruled_out():
    lowest = torch.finfo(torch.float32).min
    A = torch.tensor([[0.0, 0.0, lowest]])
    B = torch.tensor([[0.0, math.log(3), lowest]])
    assert metrics.kl_divergence(A, B).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert metrics.kl_divergence(1e38 * B[:, :2], A[:, :2]).item() == pytest.approx(math.log(2))


@given(st.integers(2, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000), exponents)
def test_cosine_across_samples_is_the_mean_over_pairs(samples, n, d, seed, exponent):
    X = draw(n, d, seed, samples)
    mask = torch.rand(samples, n, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 0] = True
    for real in (torch.ones_like(mask), mask):
        pairs = [
            F.cosine_similarity(X[a, i].double(), X[b, j].double(), dim=0)
            for a in range(samples)
            for b in range(a)
            for i in range(n)
            for j in range(n)
            if real[a, i] and real[b, j]
        ]
        cosine = metrics.sample_cosine(X * 2.0**exponent, real)
        assert cosine.item() == pytest.approx(torch.stack(pairs).mean().item(), abs=2e-5)
    assert torch.equal(metrics.sample_cosine(X), metrics.sample_cosine(X, torch.ones_like(mask)))


def test_a_common_direction_shows_across_samples_and_a_context_does_not():
    common = draw(64, 48, 0, 4) + 2 * draw(1, 48, 1)
    assert abs(metrics.sample_cosine(common) - metrics.token_cosine(common).mean()) < 0.02
    own = draw(64, 48, 0, 4) + 2 * draw(1, 48, 1, 4)
    assert metrics.token_cosine(own).min() > 0.7 > 0.2 > metrics.sample_cosine(own).abs()


def test_cosine_across_samples_at_its_edges():
    assert metrics.sample_cosine(draw(5, 3, 0, 1)).isnan()  # one sample has no other
    assert metrics.sample_cosine(draw(5, 3, 0, 2, 4)).shape == (2,)
    X = torch.zeros(2, 1, 3)
    assert metrics.sample_cosine(X) == 0
    X[:] = torch.tensor([1e-42, 0, 0])
    assert metrics.sample_cosine(X) == 1


TWO = [metrics.block_influence, metrics.angular_distance, metrics.kl_divergence]


@pytest.mark.parametrize("metric", TWO)
def test_padding_stays_out(metric):
    X, Y = draw(7, 5, 0, 2), draw(7, 5, 1, 2)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, :4] = mask[1, -3:] = True
    value = metric(X, Y, mask)
    assert torch.allclose(value, torch.stack((metric(X[0, :4], Y[0, :4]), metric(X[1, -3:], Y[1, -3:]))), rtol=1e-6)
    X[~mask], Y[~mask] = 1e6, -1e6
    assert torch.equal(metric(X, Y, mask), value)


@pytest.mark.parametrize("metric", TWO)
def test_half_types_accumulate_in_float32(metric):
    X, Y = draw(30, 16, 0, 2).bfloat16(), draw(30, 16, 1, 2).half()
    assert metric(X, Y).dtype == torch.float32
    assert torch.equal(metric(X, Y), metric(X.float(), Y.float()))
    assert metrics.sample_cosine(X).dtype == torch.float32


def test_gradients_equal_finite_differences():
    X, Y = draw(4, 3, 0, 2).double().requires_grad_(), draw(4, 3, 1, 2).double().requires_grad_()
    for metric in TWO:
        assert torch.autograd.gradcheck(metric, (X, Y))
    assert torch.autograd.gradcheck(metrics.sample_cosine, (X,))
    zero = torch.zeros(2, 3, requires_grad=True)
    for metric in (metrics.block_influence, metrics.angular_distance):
        (gradient,) = torch.autograd.grad(metric(zero, zero.detach()), zero)
        assert gradient.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("metric", TWO)
def test_bad_input_is_one_clear_line(metric):
    X = torch.ones(3, 2)
    calls = [
        ((X, X * torch.nan), "NaN"),
        ((X, X[:2]), "they must be the same"),
        ((X, X.double()), "convert one to the dtype of the other"),
        ((X[:0], X[:0]), "no empty axis"),
        ((X, X.long()), "floating point"),
        ((X, X, torch.ones(3)), "boolean"),
    ]
    for arguments, part in calls:
        with pytest.raises(LeadlineError) as error:
            metric(*arguments)
        assert part in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(LeadlineError, match="samples, tokens, width"):
        metrics.sample_cosine(X)
