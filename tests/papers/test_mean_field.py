"""The prediction against its closed form, against real blocks, and the rank correlation against scipy."""

import math
from itertools import pairwise

import pytest
import torch

from leadline.metrics import token_similarity
from leadline.nn import BlockConfig, TransformerBlock
from leadline.papers.ours import depth_map
from leadline.papers.shared.entry import Context
from leadline.papers.shared.mean_field import (
    PLACEMENTS,
    Point,
    _ffn,
    collapse_depth,
    rank_correlation,
    similarity_curve,
)
from leadline.theory import critical_tau


@pytest.mark.parametrize(("gain", "tau"), [(1.0, 0.0), (0.5, 0.1), (2.0, 0.4)])
def test_without_scores_and_ffn_it_is_the_local_rate(gain: float, tau: float) -> None:
    """t_sim / t_div is multiplied by (1 + gain^2)(1 - tau)^2 a block."""
    curve = similarity_curve(Point(gain=gain, tau=tau), n=50, depth=6, s2=0.0, v=1.0, f=0.0)
    odds = [1 / 49] + [t / (1 - t) for t in curve]
    for before, after in pairwise(odds):
        assert after / before == pytest.approx((1 + gain**2) * (1 - tau) ** 2)


def test_critical_tau_separates() -> None:
    below, above = (
        similarity_curve(Point(tau=critical_tau() + shift), n=50, depth=400, s2=0.0, v=1.0, f=0.0)[-1]
        for shift in (-0.02, 0.02)
    )
    assert below > 0.99
    assert above < 0.01


def test_carried_scores_only_shrink_the_spread() -> None:
    """Without a skip what is left of diversity after a block is the spread of the scores: (1 - alpha')^2 of it."""
    plain, carried = (
        similarity_curve(Point("post, no skip", alpha_prime=prime), n=64, depth=1, s2=0.01, v=1.0, f=1.0)[0]
        for prime in (0.0, 0.5)
    )
    assert carried > plain


def test_relu_kernel_is_what_relu_does() -> None:
    """A wide random ReLU layer on tokens of known similarity, no skip; W_2 only multiplies energies by q var(W_2)."""
    torch.manual_seed(0)
    n, d, q = 20, 400, 20_000
    X = torch.nn.functional.layer_norm(torch.randn(n, d) + 0.7 * torch.randn(1, d), (d,))
    t = token_similarity(X).item()
    hidden = (X @ (torch.empty(d, q).uniform_(-1, 1) / math.sqrt(d))).relu()
    M, D = _ffn(t, 1 - t, n, 1 / 18, keep=0.0)
    assert token_similarity(hidden).item() == pytest.approx(M / (M + D), rel=0.02)
    assert hidden.square().mean().item() / 3 == pytest.approx(M + D, rel=0.02)


SETTING = {**depth_map.ENTRY.setting, "depth": 40, "seeds": 2}


@pytest.mark.parametrize("point", [Point(gain=2.0), Point(alpha=0.3), Point("pre"), Point("post, no skip", alpha=0.6)])
def test_prediction_is_near_real_blocks(point: Point) -> None:
    context = Context(SETTING, 3, torch.device("cpu"))
    with torch.no_grad():
        measured = depth_map.measure(context, point)
    assert measured <= 40
    assert depth_map.predict(point, SETTING) == pytest.approx(measured, abs=max(1, 0.15 * measured))


def test_stack_has_the_weights_that_the_prediction_is_about() -> None:
    torch.manual_seed(0)
    blocks = depth_map.stack(Point(), {**SETTING, "depth": 1}, torch.device("cpu"))
    block = next(blocks.layers())
    assert isinstance(block, TransformerBlock)
    d = SETTING["d"]
    q, k, v = block.attention.qkv.weight.chunk(3)
    for part in (q, k):
        assert (d * part.var()).item() == pytest.approx(1 / 3, rel=0.03)
    for part in (v, block.attention.proj.weight):
        assert (d * part.var()).item() == pytest.approx(1, rel=0.05)
    assert (d * block.mlp.fc1.weight.var() * 4 * d * block.mlp.fc2.weight.var() / 2).item() == pytest.approx(
        1 / 18, rel=0.05
    )


def test_points_are_enough_and_on_the_maps() -> None:
    points = set(depth_map.points())
    assert len(points) >= 30
    assert {point.placement for point in points} == set(PLACEMENTS)
    for point in points:
        for name, (low, high) in depth_map.RANGES.items():
            assert low <= getattr(point, name) <= high
        BlockConfig(attention="hopfield", alpha=point.alpha, alpha_prime=point.alpha_prime, gain=point.gain)


def test_collapse_depth() -> None:
    assert collapse_depth([0.1, 0.5, 0.95, 0.99], 0.9) == 3
    assert collapse_depth([0.1, 0.2], 0.9) == 3


def test_rank_correlation_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randint(0, 6, (30,), generator=generator).double()
        y = x + torch.randint(0, 6, (30,), generator=generator)
        expected = stats.spearmanr(x.numpy(), y.numpy()).statistic
        assert rank_correlation(x.tolist(), y.tolist()) == pytest.approx(expected)
