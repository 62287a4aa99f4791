"""Bounds on the residual of attention layers and networks (HOP, appendix D): what holds, and what only is printed."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics import mixed_norm, norm_1, norm_inf, residual
from leadline.theory import AttentionLayer, largest_leaf, layer_bound, network_bound
from leadline.theory.bounds import HOP_RANGE

F64 = torch.float64
SEEDS = st.integers(0, 100_000)
SCALES = st.sampled_from([1e-3, 0.1, 1.0, 3.0, 30.0])
STRENGTHS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999])


def make_layer(seed: int, heads: int, d: int, scale: float, **options: Any) -> AttentionLayer:
    """Random heads, each with its own size and its own row and column scales, so that the 1- and inf-norms differ."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)  # noqa: E731
    w_qk, w_vo = (scale * randn(heads, d, d) * (randn(heads, 1, d) + randn(heads, d, 1)).exp() for _ in range(2))
    return AttentionLayer(w_qk, w_vo, head_dim=3, b_qk=randn(heads, d), bias=randn(d), **options)


def make_tokens(seed: int, n: int, d: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    X = torch.randn(n, d, generator=generator, dtype=F64) * torch.randn(n, 1, generator=generator, dtype=F64).exp()
    return scale * X + torch.randn(d, generator=generator, dtype=F64)


def make_state(seed: int, heads: int, n: int, scale: float) -> Tensor:
    """Scores with a large common row, as attention has, or sparse ones."""
    generator = torch.Generator().manual_seed(seed + 2)
    A = torch.randn(heads, n, n, generator=generator, dtype=F64)
    if seed % 2:
        A[:, 1:] = 0
    else:
        A = A + 3 * torch.randn(heads, 1, n, generator=generator, dtype=F64)
    return scale * A


def size(X: Tensor) -> float:
    return float(mixed_norm(residual(X)))


def assert_below(layer: AttentionLayer, X: Tensor, state: Tensor | None, log_bound: Tensor) -> None:
    """The residual is within the bound, up to the rounding of what the layer adds up."""
    rounding = 1e-14 * float(mixed_norm(X) * (1 + mixed_norm(layer.w_vo).sum()) + mixed_norm(layer.bias.expand_as(X)))
    assert size(layer(X, state)[0]) <= float(log_bound.exp()) * (1 + 1e-9) + rounding


def literal_bound(layer: AttentionLayer, X: Tensor, A: Tensor | None) -> float:
    """The repaired D.2 in plain numbers, written once more from its statement; A is taken as it is."""
    R = residual(X)
    u, H = float(mixed_norm(R)), len(layer.w_qk)
    keep = float(layer.alpha_prime) if A is not None or layer.start == "zero" else 0.0
    k1 = kinf = 0.0
    for h in range(H):
        carried = torch.zeros(len(X), len(X), dtype=F64) if A is None else A[h]
        E = (1 - keep) * R @ layer.w_qk[h] @ R.T / math.sqrt(layer.head_dim) + keep * carried
        d = float((E.max(1).values - E.min(1).values).max())
        t = (1 - keep) / math.sqrt(layer.head_dim) * float(norm_1(layer.w_qk[h])) * u**2 + keep * float(norm_1(carried))
        k1 += 2 * math.expm1(d) / d * t * float(norm_1(layer.w_vo[h]))
        kinf += 2 * t * float(norm_inf(layer.w_vo[h]))
    a = layer.alpha
    return u * math.sqrt((a + (1 - a) * k1) * (a + (1 - a) * kinf))


# What is to be relied on


@given(SEEDS, st.integers(1, 3), st.integers(2, 8), st.integers(1, 5), SCALES, SCALES, SCALES, STRENGTHS, STRENGTHS)
@settings(max_examples=300, deadline=None)
def test_repaired_layer_bound_holds(
    seed: int, heads: int, n: int, d: int, weights: float, tokens: float, scores: float, alpha: float, keep: float
) -> None:
    layer = make_layer(seed, heads, d, weights, alpha=alpha, alpha_prime=keep)
    X = make_tokens(seed, n, d, tokens)
    for state in (None, make_state(seed, heads, n, scores)):
        assert_below(layer, X, state, layer_bound(layer, X, state))


@given(SEEDS, st.integers(1, 3), st.integers(2, 7), st.integers(1, 4), SCALES, SCALES, STRENGTHS, STRENGTHS)
@settings(max_examples=150, deadline=None)
def test_composed_bound_holds(
    seed: int, heads: int, n: int, d: int, weights: float, tokens: float, alpha: float, keep: float
) -> None:
    layers = [make_layer(seed + 7 * i, heads, d, weights, alpha=alpha, alpha_prime=keep) for i in range(4)]
    records = network_bound(layers, make_tokens(seed, n, d, tokens))
    assert [record.layer for record in records] == [1, 2, 3, 4]
    assert all(record.holds for record in records)


def test_composed_bound_is_compared_with_something() -> None:
    """The test above is not one of rounding noise alone."""
    layers = [make_layer(i, 2, 3, 0.3, alpha=0.0, alpha_prime=0.5) for i in range(4)]
    assert all(record.above_noise for record in network_bound(layers, make_tokens(0, 6, 3, 1.0)))


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("start", ["zero", "scores"])
@pytest.mark.parametrize("heads", [1, 3])
def test_repaired_bound_is_its_statement(heads: int, start: str, alpha: float) -> None:
    layer = make_layer(3, heads, 4, 0.5, alpha=alpha, alpha_prime=0.4, start=start)
    X = make_tokens(3, 5, 4, 0.4)
    sparse = make_state(3, heads, 5, 0.5)
    common = make_state(4, heads, 5, 0.5)
    centred = residual(residual(common).mT).mT
    assert (norm_1(centred) < norm_1(common)).all()
    assert float(layer_bound(layer, X)) == pytest.approx(math.log(literal_bound(layer, X, None)))
    assert float(layer_bound(layer, X, sparse)) == pytest.approx(math.log(literal_bound(layer, X, sparse)))
    assert float(layer_bound(layer, X, common)) == pytest.approx(math.log(literal_bound(layer, X, centred)))


def test_shifts_of_the_state_change_neither_layer_nor_bound() -> None:
    """s 1^T drops out of the softmax and 1 r^T is no part of E; centring a sparse state would enlarge it."""
    layer, X = make_layer(4, 2, 3, 0.5, alpha_prime=0.5), make_tokens(4, 6, 3, 1.0)
    state = residual(residual(make_state(4, 2, 6, 1.0)).mT).mT
    rows, columns = torch.linspace(-5, 9, 6, dtype=F64)[:, None], torch.linspace(3, -40, 6, dtype=F64)
    torch.testing.assert_close(layer(X, state + rows)[0], layer(X, state)[0])
    torch.testing.assert_close(layer_bound(layer, X, state + rows + columns), layer_bound(layer, X, state))

    sparse = torch.zeros(2, 6, 6, dtype=F64)
    sparse[:, 0, 0] = 1
    assert norm_1(residual(residual(sparse).mT).mT)[0] > 1.3 * norm_1(sparse)[0]


def test_biases_do_not_enter() -> None:
    layer, X = make_layer(5, 2, 3, 0.5, alpha_prime=0.5), make_tokens(5, 6, 3, 1.0)
    plain = dataclasses.replace(layer, b_qk=None, bias=None)
    state = make_state(5, 2, 6, 1.0)
    assert layer_bound(layer, X, state) == layer_bound(plain, X, state)
    without_output_bias = dataclasses.replace(layer, bias=None)
    torch.testing.assert_close(residual(layer(X, state)[0]), residual(without_output_bias(X, state)[0]))
    assert not torch.allclose(residual(layer(X, state)[0]), residual(plain(X, state)[0]))


@given(SEEDS, st.integers(2, 8), st.integers(1, 5), SCALES, SCALES, STRENGTHS)
@settings(max_examples=150, deadline=None)
def test_lemma_d1_holds_under_its_assumption(
    seed: int, n: int, d: int, weights: float, scores: float, keep: float
) -> None:
    """One head, alpha = 0, an unscaled state (d_k = 1), rows of E scaled to the range that HOP assumes."""
    layer = dataclasses.replace(make_layer(seed, 1, d, weights, alpha_prime=keep), head_dim=1)
    X, state = make_tokens(seed, n, d, 1.0), make_state(seed, 1, n, scores)
    E = (1 - keep) * residual(X) @ layer.w_qk[0] @ residual(X).T + keep * state[0]
    shrink = HOP_RANGE / float((E.amax(-1) - E.amin(-1)).max())
    layer, state = dataclasses.replace(layer, w_qk=shrink * layer.w_qk), shrink * state
    assert_below(layer, X, state, layer_bound(layer, X, state, form="printed"))


def test_assumption_of_hop_is_reported() -> None:
    assert math.exp(HOP_RANGE) == pytest.approx(1 + 2 * HOP_RANGE)
    X = torch.tensor([[1.0], [-1.0]], dtype=F64)
    for weight, holds in ((0.62, True), (0.63, False)):  # range 2 w
        layer = AttentionLayer(torch.full((1, 1, 1), weight, dtype=F64), torch.ones(1, 1, 1, dtype=F64), head_dim=1)
        (record,) = network_bound([layer], X)
        assert float(record.hop_range) == pytest.approx(2 * weight)
        assert bool(record.hop_assumption) is holds

    layers = [make_layer(seed, 2, 3, 0.1, alpha_prime=0.5) for seed in (6, 7)]
    layers[0] = dataclasses.replace(layers[0], b_qk=torch.full((2, 3), 5.0, dtype=F64))  # a large 1 r^T in the state
    X = make_tokens(6, 5, 3, 1.0)
    Y, state = layers[0](X)
    assert state is not None
    R = residual(Y)
    E = 0.5 * R @ layers[1].w_qk @ R.T / math.sqrt(3) + 0.5 * state  # the state as it is
    torch.testing.assert_close(network_bound(layers, X)[1].hop_range, (E.amax(-1) - E.amin(-1)).max())


def test_bounds_are_per_sample() -> None:
    layers = [make_layer(i, 2, 3, 0.5, alpha=0.2, alpha_prime=0.5) for i in range(3)]
    X = torch.stack([make_tokens(seed, 5, 3, 10.0**-seed) for seed in range(3)])
    together = network_bound(layers, X)
    for i in range(3):
        for one, all_ in zip(network_bound(layers, X[i]), together, strict=True):
            for field in ("log_bound", "log_residual", "hop_range", "above_noise", "log_slack"):
                torch.testing.assert_close(getattr(all_, field)[i], getattr(one, field))


def test_logarithms_do_not_overflow() -> None:
    layers = [make_layer(i, 2, 3, 30.0, alpha=0.1, alpha_prime=0.5) for i in range(40)]
    layers = [dataclasses.replace(layer, w_vo=layer.w_vo / 300) for layer in layers]
    records = network_bound(layers, make_tokens(0, 6, 3, 3.0))
    assert all(record.log_bound.isfinite() for record in records)
    assert records[-1].log_bound > 1e15
    assert max(record.hop_range for record in records) > 800  # c(d) = e^d / d is no float
    plain = [dataclasses.replace(layer, alpha=0.0) for layer in layers]
    printed = network_bound(plain, make_tokens(0, 6, 3, 3.0), form="printed")
    assert all(record.log_bound.isfinite() for record in printed)


def test_rounding_noise_is_not_compared() -> None:
    """Nearly equal tokens: the bound falls with the cube, the residual no further than rounding."""
    layers = [make_layer(i, 1, 3, 0.1) for i in range(6)]
    records = network_bound(layers, make_tokens(0, 6, 3, 1e-3))
    noise = [bool(~record.above_noise) for record in records]
    assert noise[0] is False
    assert noise[-1] is True
    assert noise == sorted(noise)  # noise that is amplified later is still noise
    assert any(record.log_residual > record.log_bound for record in records)  # a comparison would call it a failure
    assert records[-1].log_slack.isnan()
    assert all(record.holds for record in records)


def test_noise_stays_noise() -> None:
    """The first layer removes the mean beside which the residual was noise; after that it only looks like more."""
    X = torch.tensor([[1.0, 1e-15], [1.0, -2e-15], [1.0, 0.0]], dtype=F64)
    w_vo = torch.tensor([[[-1.0, 0.0], [0.0, 0.0]]], dtype=F64)
    layer = AttentionLayer(torch.zeros(1, 2, 2, dtype=F64), w_vo, head_dim=1, alpha=0.5)
    assert not any(record.above_noise for record in network_bound([layer, layer], X))
    assert network_bound([layer], layer(X)[0])[0].above_noise


def test_a_large_bias_drowns_the_residual() -> None:
    layer, X = make_layer(1, 1, 3, 1.0), make_tokens(1, 5, 3, 1e-4)
    (plain,), (drowned,) = (
        network_bound([dataclasses.replace(layer, bias=factor * layer.bias)], X) for factor in (1, 1e6)
    )
    assert plain.above_noise
    assert not drowned.above_noise
    assert drowned.log_residual > plain.log_residual + 0.1  # what is left of it is rounding


def test_equal_tokens_have_bound_zero() -> None:
    layers = [make_layer(i, 2, 3, 1.0, alpha=0.5, alpha_prime=0.5) for i in range(2)]
    for record in network_bound(layers, torch.ones(4, 3, dtype=F64)):
        assert record.log_bound == -torch.inf
        assert not record.above_noise


# What only is printed


def test_equation_6_is_false() -> None:
    A, B = torch.ones(5, 1), torch.ones(1, 1)
    assert norm_1(A @ B) == 5
    assert norm_inf(A) * norm_1(B) == 1


def test_mixed_norm_has_no_triangle_inequality() -> None:
    A = torch.zeros(9, 9)
    A[:, 0] = 1
    assert mixed_norm(A) == mixed_norm(A.T) == 3
    assert mixed_norm(A + A.T) == pytest.approx(10)


def two_tokens_that_count(n: int, **options: Any) -> tuple[AttentionLayer, Tensor, Tensor]:
    """All attention goes to two tokens, by the bias of the queries alone; one row of carried scores tilts it by .2."""
    X = torch.zeros(n, 2, dtype=F64)
    X[0, 0], X[1, 0] = 1, -1  # the residual: u = sqrt(2)
    X[:2, 1] = 1e-6  # by which the keys of these two are found
    options = {"w_vo": torch.tensor([[[1.0], [0.0]]], dtype=F64), "head_dim": 64, "alpha_prime": 0.5, **options}
    heads = len(options["w_vo"])
    b_qk = torch.tensor([0, 1e9], dtype=F64).expand(heads, 2)
    layer = AttentionLayer(torch.zeros(heads, 2, 2, dtype=F64), b_qk=b_qk, **options)
    state = torch.zeros(heads, n, n, dtype=F64)
    state[:, 0, 0], state[:, 0, 1] = 0.4, -0.4
    return layer, X, state


def test_printed_d1_is_false_for_scaled_scores() -> None:
    layer, X, state = two_tokens_that_count(197)
    actual = size(layer(X, state)[0])
    assert actual == pytest.approx(0.278, abs=5e-4)
    assert float(layer_bound(layer, X, state, form="printed").exp()) == pytest.approx(0.141, abs=5e-4)
    assert actual < float(layer_bound(layer, X, state).exp()) < 3 * actual


def test_printed_d2_is_false() -> None:
    """Two heads, W_1 = e1 e1^T and W_2 = e1 1^T / sqrt(d): both of size 1, their sum of size d^(1/4)."""
    d = 16384
    w_vo = torch.zeros(2, 2, d, dtype=F64)
    w_vo[0, 0, 0] = 1
    w_vo[1, 0] = d**-0.5
    layer, X, state = two_tokens_that_count(64, w_vo=w_vo, head_dim=1)  # d_k = 1: scaled or not is the same
    actual = size(layer(X, state)[0])
    assert actual == pytest.approx(3.13, abs=5e-3)
    assert float(layer_bound(layer, X, state, form="printed").exp()) == pytest.approx(2.26, abs=5e-3)
    assert actual < float(layer_bound(layer, X, state).exp())


def test_printed_forms_fail_even_without_a_state() -> None:
    """The same two heads over two tokens and plain attention, if only wide enough."""
    d = 2**18
    w_vo = torch.zeros(2, 1, d, dtype=F64)
    w_vo[0, 0, 0] = 1
    w_vo[1, 0] = d**-0.5
    layer = AttentionLayer(torch.full((2, 1, 1), 0.01, dtype=F64), w_vo, head_dim=1)
    X = torch.tensor([[1.0], [-1.0]], dtype=F64)
    printed, repaired = (network_bound([layer], X, form=form)[0] for form in ("printed", "repaired"))
    assert not printed.holds
    assert float(printed.log_slack.exp()) == pytest.approx(16 / d**0.25, rel=0.01)
    assert repaired.holds


def tilted(E: Tensor, r: Tensor, R: Tensor) -> Tensor:
    return residual((E + r).softmax(-1) @ R)


@pytest.mark.parametrize("n", [64, 256])
def test_equations_31_and_33_lose_a_factor_sqrt_n(n: int) -> None:
    """With the measured D in it, (33) is false: every row is tilted, and each counts in the 1-norm."""
    R = torch.zeros(n, 1, dtype=F64)
    R[0], R[1] = 1, -1
    r = torch.full((n,), -50.0, dtype=F64)
    r[:2] = 0
    E = torch.zeros(n, n, dtype=F64)
    E[:, 0] = torch.tensor([0.01, -0.01], dtype=F64).repeat(n // 2)
    largest = float((E.amax(-1) - E.amin(-1)).max())  # ||D 1||_inf
    printed = 2 * largest * float(mixed_norm(R))  # (33), W_V = 1
    assert float(mixed_norm(tilted(E, r, R))) / printed == pytest.approx(math.sqrt(n / 32), rel=0.01)
    assert float(norm_1(tilted(E, r, R))) > 2 * largest * float(norm_1(R))  # (31)
    assert float(norm_inf(tilted(E, r, R))) < 2 * largest * float(norm_inf(R))  # (32) is sound


def test_c_of_d_is_needed_in_the_1_norm() -> None:
    """Half of the tokens attend to themselves as well: without c(d) the bound on ||res Y||_1 would be false."""
    n, d = 800, 6.0
    E = torch.zeros(n + 1, n + 1, dtype=F64)
    E[: n // 2, : n // 2] = d * torch.eye(n // 2, dtype=F64)
    r = torch.zeros(n + 1, dtype=F64)
    r[-1] = math.log(n)  # the last token has p = 1/2
    R = torch.full((n + 1, 1), -1.0 / n, dtype=F64)
    R[-1] = 1
    actual = float(norm_1(tilted(E, r, R)))
    without = 2 * float(norm_1(E)) * float(norm_1(R))
    assert without < actual < math.expm1(d) / d * without


def test_theorem_d3_needs_8_where_it_prints_4() -> None:
    """The sum of two terms is up to twice the larger: at L = 1, (42) claims less than the lemma it rests on."""
    layer, X, state = two_tokens_that_count(20)
    layer = dataclasses.replace(layer, w_qk=torch.full((1, 2, 2), 0.1, dtype=F64), b_qk=None)
    log_u = torch.tensor(0.0, dtype=F64)
    lemma = layer_bound(layer, X, state, log_u=log_u, form="printed")  # (38)
    cubic = layer_bound(layer, X, torch.zeros_like(state), log_u=log_u, form="printed")
    linear = (lemma.exp() - cubic.exp()).log()
    assert largest_leaf(cubic, linear, log_u, 1, form="printed") < lemma - 0.1
    assert largest_leaf(cubic + math.log(2), linear + math.log(2), log_u, 1, form="printed") >= lemma


def test_theorem_d3_prints_the_wrong_leaf() -> None:
    arguments = (math.log(1.0), math.log(0.5), math.log(0.8), 2)
    assert float(largest_leaf(*arguments).exp()) == pytest.approx(0.256)
    assert float(largest_leaf(*arguments, form="printed").exp()) == pytest.approx(0.2)


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_largest_leaf_is_the_recursion(log_a: float, log_b: float, log_u: float, depth: int) -> None:
    u = log_u
    for _ in range(depth):
        u = max(log_a + 3 * u, log_b + u)
    exact, printed = (float(largest_leaf(log_a, log_b, log_u, depth, form=form)) for form in ("repaired", "printed"))
    assert exact == pytest.approx(u, rel=1e-9, abs=1e-9)
    assert printed <= exact + 1e-9
    if log_b >= 0:
        assert printed == exact


def test_leaf_without_a_state_is_the_cubic_one() -> None:
    """C_2 = 0: the layers only cube, and 0^0 is 1."""
    for form in ("printed", "repaired"):
        assert float(largest_leaf(0.5, -math.inf, 0.1, 3, form=form)) == pytest.approx(13 * 0.5 + 27 * 0.1)
        assert float(largest_leaf(-math.inf, 0.5, 0.1, 3, form=form)) == pytest.approx(3 * 0.5 + 0.1)


def test_printed_network_bound_is_42() -> None:
    """The largest C_1 and C_2 of the layers so far; C_2 = 0 at the first."""
    layers = [make_layer(i, 2, 3, scale, alpha_prime=0.5) for i, scale in enumerate((0.3, 0.6, 0.02))]
    X = make_tokens(0, 5, 3, 0.01)
    log_u, state, records = math.log(size(X)), None, network_bound(layers, X, form="printed")
    a, b, Y = [], [0.0], X
    for layer in layers:
        front = 4 * 2 * 0.5 / math.sqrt(3)
        a.append(front * max(float(mixed_norm(layer.w_vo[h]) * norm_1(layer.w_qk[h])) for h in range(2)))
        if state is not None:
            b.append(front * max(float(mixed_norm(layer.w_vo[h]) * norm_1(state[h])) for h in range(2)))
        Y, state = layer(Y, state)
    assert a[1] == max(a)
    assert b[1] == max(b)
    assert float(records[0].log_bound) == pytest.approx(math.log(a[0]) + 3 * log_u)
    leaf = largest_leaf(math.log(max(a)), math.log(max(b)), log_u, 3, form="printed")
    assert float(records[2].log_bound) == pytest.approx(float(leaf))


# Bad input


def test_bad_input() -> None:
    layer, X = make_layer(0, 2, 3, 1.0, alpha=0.5), make_tokens(0, 5, 3, 1.0)
    with pytest.raises(LeadlineError, match="unknown form 'proven'; allowed: printed, repaired"):
        layer_bound(layer, X, form="proven")
    with pytest.raises(LeadlineError, match="unknown form"):
        network_bound([layer], X, form="print")
    with pytest.raises(LeadlineError, match=r"alpha is 0\.5; the printed forms are for alpha = 0 only"):
        layer_bound(layer, X, form="printed")
    with pytest.raises(LeadlineError, match=r"X has shape \(5, 2\); this layer takes \(\.\.\., tokens, 3\)"):
        layer_bound(layer, X[:, :2])
    with pytest.raises(LeadlineError, match="depth is 601"):
        largest_leaf(0.0, 0.0, 0.0, 601)
    with pytest.raises(LeadlineError, match="both must be"):
        AttentionLayer(torch.ones(2, 3, 3), torch.ones(1, 3, 3), head_dim=1)
    with pytest.raises(LeadlineError, match=r"state has shape \(1, 5, 5\); with this X it must be \(2, 5, 5\)"):
        layer_bound(layer, X, torch.zeros(1, 5, 5))
    with pytest.raises(LeadlineError, match=r"state has shape"):
        layer(X, torch.zeros(2, 4, 4))
    with pytest.raises(LeadlineError, match=r"alpha_prime is 1\.0; it must be a number in \[0, 1\)"):
        dataclasses.replace(layer, alpha_prime=1.0)
    with pytest.raises(LeadlineError, match=r"alpha_prime is tensor.*, or 2 of them"):
        dataclasses.replace(layer, alpha_prime=torch.zeros(3))
    with pytest.raises(LeadlineError, match="unknown start"):
        dataclasses.replace(layer, start="one")
    with pytest.raises(LeadlineError, match="NaN"):
        network_bound([layer], X * float("nan"))
