"""Massive tokens and channels and the robust similarity, against literal loops in float64."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics

seeds = st.integers(0, 10_000)
exponents = st.integers(-149, 100)  # 2^e: float32 from subnormal on


def draw(n, d, seed, *lead):
    return torch.randn(*lead, n, d, generator=torch.Generator().manual_seed(seed))


def literal_ratio(X):
    """Length over the median length, for one sample."""
    lengths = [sum(x * x for x in row) ** 0.5 for row in X.double().tolist()]
    median = statistics.median(lengths)
    return [length / median if median > 0 else (float("inf") if length else 1.0) for length in lengths]


def literal_tokens(X, before=None, factor=10.0):
    ratio = literal_ratio(X)
    n = len(ratio)
    long = [i for i in range(n) if ratio[i] > factor]
    if n < 8 or len(long) > max(1, 0.05 * n):
        return [False] * n
    earlier = [0.0] * n if before is None else literal_ratio(before)
    return [i in long and earlier[i] <= factor for i in range(n)]


def literal_channels(X, factor=100.0):
    rows = [row for row, massive in zip(X.double().tolist(), literal_tokens(X), strict=True) if not massive]
    energy = [sum(x * x for x in column) / len(rows) for column in zip(*rows, strict=True)]
    return [e > factor * statistics.median(energy) for e in energy]


def literal_cosine(X):
    rows = X.double()
    total, pairs = 0.0, 0
    for i in range(len(rows)):
        for j in range(i):
            total += torch.nn.functional.cosine_similarity(rows[i], rows[j], dim=0, eps=1e-300).item()
            pairs += 1
    return total / pairs


@st.composite
def samples(draw_, fewest=1, most=60):
    """Gaussian rows, some lengthened, some channels amplified, some rows zero."""
    n, d = draw_(st.integers(fewest, most)), draw_(st.integers(1, 20))
    X = draw(n, d, draw_(seeds))
    for _ in range(draw_(st.integers(0, 4))):
        X[draw_(st.integers(0, n - 1))] *= draw_(st.sampled_from([0.0, 5.0, 30.0, 1e4]))
    for _ in range(draw_(st.integers(0, 2))):
        X[:, draw_(st.integers(0, d - 1))] *= draw_(st.sampled_from([0.0, 6.0, 40.0]))
    return X


@given(samples(), samples())
def test_massive_tokens_follow_their_definition(X, other):
    assert torch.allclose(metrics.relative_length(X).double(), torch.tensor(literal_ratio(X)).double(), rtol=1e-5)
    assert metrics.massive_tokens(X).tolist() == literal_tokens(X)
    before = other.repeat(len(X), 1)[: len(X)]
    assert metrics.massive_tokens(X, before, 4.0).tolist() == literal_tokens(X, before, 4.0)


@given(samples(), st.sampled_from([100.0, 20.0]))
def test_massive_channels_follow_their_definition(X, factor):
    assert metrics.massive_channels(X, factor).tolist() == literal_channels(X, factor)


@given(samples(2, 30))
def test_robust_similarity_is_the_cosine_without_massive_channels(X):
    ordinary = X.clone()
    ordinary[:, torch.tensor(literal_channels(X))] = 0
    assert metrics.robust_similarity(X).item() == pytest.approx(literal_cosine(ordinary), abs=1e-5)


@given(samples(), seeds, exponents)
def test_neither_scale_nor_order_matters(X, seed, exponent):
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(metrics.massive_tokens(X[order]), metrics.massive_tokens(X)[order])
    assert torch.equal(metrics.massive_channels(X[order]), metrics.massive_channels(X))
    channels = torch.randperm(X.shape[1], generator=torch.Generator().manual_seed(seed))
    assert torch.equal(metrics.massive_channels(X[:, channels]), metrics.massive_channels(X)[channels])
    scaled = X * 2.0**exponent  # subnormal numbers are rounded, so what is expected is made from them
    assert scaled.isfinite().all()
    assert metrics.massive_tokens(scaled).tolist() == literal_tokens(scaled)
    assert metrics.massive_channels(scaled).tolist() == literal_channels(scaled)


def test_all_of_float32_in_one_sample():
    X = draw(40, 16, 0) * 1e-40
    X[3] = 3e38
    assert metrics.massive_tokens(X).nonzero().flatten().tolist() == [3]
    X = draw(40, 16, 1)
    X[:, 5] = 3e38
    X[:, 7] *= 1e-40
    assert metrics.massive_channels(X).nonzero().flatten().tolist() == [5]
    assert metrics.robust_similarity(X) == metrics.token_cosine(X.index_fill(1, torch.tensor([5]), 0))
    X = draw(40, 16, 2) * 1e38
    X[:, 4] = 0
    assert not metrics.massive_channels(X).any()
    assert metrics.massive_channels(torch.tensor([[1e-45, 0, 0]])).tolist() == [True, False, False]


def test_a_planted_sink_is_named_and_moves_no_robust_figure():
    X = draw(256, 64, 0, 4) + 0.5 * draw(1, 64, 1)
    plain = metrics.robust_similarity(X)
    sunk = X.clone()
    sunk[:, 0] *= 100  # now the longest, so that the median stays where it is
    sunk[:, 0] *= 179 / metrics.relative_length(sunk)[:, 0, None]
    assert metrics.token_similarity(sunk).max() < 0.05 < metrics.token_similarity(X).min()
    assert torch.equal(metrics.massive_tokens(sunk, X).nonzero()[:, 1], torch.zeros(4, dtype=torch.long))
    assert metrics.massive_tokens(sunk).sum() == 4
    assert metrics.relative_length(sunk).amax(-1).tolist() == pytest.approx([179] * 4, rel=1e-5)
    assert torch.allclose(metrics.robust_similarity(sunk), plain, atol=1e-6)
    spiked = X.clone()
    spiked[..., 11] += 20  # alone it makes the tokens alike
    spiked[:, 7] *= 50
    assert metrics.token_cosine(spiked).min() > 0.7
    assert metrics.massive_channels(spiked).nonzero()[:, 1].tolist() == [11] * 4
    without = X.index_fill(-1, torch.tensor([11]), 0)
    assert torch.allclose(metrics.robust_similarity(spiked), metrics.token_cosine(without), atol=1e-6)


@pytest.mark.parametrize(
    ("n", "long", "massive"),
    [(7, 1, 0), (8, 1, 1), (19, 1, 1), (20, 1, 1), (20, 2, 0), (40, 2, 2), (59, 2, 2), (59, 3, 0), (60, 3, 3)],
)
def test_at_least_eight_tokens_and_at_most_one_in_twenty(n, long, massive):
    X = torch.ones(n, 3)
    X[:long] = 11
    assert metrics.massive_tokens(X).sum() == massive
    padded = torch.cat((X, torch.full((25, 3), 1e4)))
    real = torch.arange(n + 25) < n
    assert metrics.massive_tokens(padded, mask=real).sum() == massive


def test_a_token_is_longer_than_ten_medians_not_as_long():
    X = torch.ones(10, 4)
    X[2] = 10
    assert not metrics.massive_tokens(X).any()
    X[2] = 10.00001
    assert metrics.massive_tokens(X).sum() == 1
    before = torch.ones(10, 1)
    before[2] = 10
    assert metrics.massive_tokens(X, before).sum() == 1
    before[2] = 10.00001
    assert metrics.massive_tokens(X, before).sum() == 0


@given(seeds, st.integers(8, 40), st.integers(16, 60))
def test_nothing_is_massive_at_gaussian_initialisation(seed, n, d):
    X = draw(n, d, seed, 3) + draw(1, d, seed + 1)
    mask = torch.arange(n) < torch.tensor([n, n - 1, 8])[:, None]
    for x, m in ((X, None), (X, mask), (X.bfloat16(), mask), (X * 1e-38, None), (X * 1e37, None)):
        assert not metrics.massive_tokens(x, mask=m).any()
        assert not metrics.massive_channels(x, mask=m).any()
        assert not metrics.massive_activations(x, m).any() or x.max() > 1e30
        assert torch.equal(metrics.robust_similarity(x, m), metrics.token_cosine(x, m))


@given(samples(8, 40), st.integers(1, 30), seeds)
def test_padding_stays_out(X, extra, seed):
    n = len(X)
    place = torch.randperm(n + extra, generator=torch.Generator().manual_seed(seed))[:n].sort().values
    padded = torch.full((n + extra, X.shape[1]), -1e30)
    padded[place] = X
    mask = torch.zeros(n + extra, dtype=torch.bool)
    mask[place] = True
    before = X.sin()
    around = torch.full_like(padded, 1e30).index_copy(0, place, before)
    tokens = metrics.massive_tokens(padded, around, mask=mask)
    assert torch.equal(tokens[place], metrics.massive_tokens(X, before))
    assert not tokens[~mask].any()
    assert torch.equal(metrics.relative_length(padded, mask)[place], metrics.relative_length(X))
    assert torch.equal(metrics.massive_channels(padded, mask=mask), metrics.massive_channels(X))
    scalars = metrics.massive_activations(padded, mask, 1.0, 10.0)
    assert torch.equal(scalars[place], metrics.massive_activations(X, None, 1.0, 10.0))
    assert not scalars[~mask].any()
    assert torch.allclose(metrics.robust_similarity(padded, mask), metrics.robust_similarity(X), atol=1e-6)


@given(samples(), st.sampled_from([(100.0, 1000.0), (2.0, 8.0)]))
def test_the_scalar_rule(X, limits):
    above, factor = limits
    X = X * 30
    numbers = X.abs().double().flatten().tolist()
    median = statistics.median_low(numbers)
    expected = [x > above and x >= factor * median for x in numbers]
    assert metrics.massive_activations(X, None, above, factor).flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_judged_in_float32(dtype):
    X = draw(64, 32, 0, 2).to(dtype)
    X[:, 5] *= 1000
    X[..., 9] += 60
    for metric in (metrics.massive_tokens, metrics.massive_channels, metrics.robust_similarity):
        assert torch.equal(metric(X), metric(X.float()))
    assert metrics.relative_length(X).dtype == metrics.robust_similarity(X).dtype == torch.float32
    assert metrics.massive_tokens(X).sum() == metrics.massive_channels(X).sum() == 2


def test_one_token_and_zeros():
    one = draw(1, 8, 0, 3)
    assert not metrics.massive_tokens(one).any()
    assert metrics.relative_length(one).tolist() == [[1]] * 3
    assert metrics.robust_similarity(one).tolist() == [1] * 3
    zero = torch.zeros(2, 9, 4)
    assert not metrics.massive_tokens(zero).any()
    assert not metrics.massive_channels(zero).any()
    assert metrics.relative_length(zero).tolist() == [[1] * 9] * 2
    assert metrics.robust_similarity(zero).tolist() == [0, 0]
    zero[:, 0] = 1e-45
    assert metrics.massive_tokens(zero).nonzero().tolist() == [[0, 0], [1, 0]]


def test_any_number_of_axes_in_front():
    X = draw(30, 12, 0, 2, 3)
    X[0, 1, 4] *= 99
    X[1, 2, :, 3] += 40
    for metric in (metrics.massive_tokens, metrics.massive_channels, metrics.robust_similarity):
        assert torch.equal(metric(X).flatten(0, 1), torch.stack([metric(x) for x in X.flatten(0, 1)]))


def test_gradients_of_the_robust_similarity_equal_finite_differences():
    X = draw(9, 6, 0, 2).double()
    X[0, :, 2] += 60
    assert metrics.massive_channels(X).sum() == 1
    assert torch.autograd.gradcheck(metrics.robust_similarity, (X.requires_grad_(),))


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda X: metrics.massive_tokens(X * torch.nan), "NaN"),
        (lambda X: metrics.massive_channels(X / 0), "infinite"),
        (lambda X: metrics.robust_similarity(X[:0]), "no empty axis"),
        (lambda X: metrics.massive_activations(X.long()), "floating point"),
        (lambda X: metrics.massive_tokens(X, factor=0), "factor is 0; it must be above 0"),
        (lambda X: metrics.massive_channels(X, factor=float("nan")), "factor is nan"),
        (lambda X: metrics.massive_tokens(X, X[:5]), "before has tokens (5,) and X (9,)"),
        (lambda X: metrics.massive_tokens(X, mask=torch.ones(9)), "boolean"),
        (lambda X: metrics.massive_tokens(X, mask=torch.zeros(9, dtype=torch.bool)), "without a real token"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(LeadlineError) as error:
        call(torch.ones(9, 2))
    assert part in str(error.value)
    assert "\n" not in str(error.value)
