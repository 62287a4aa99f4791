import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics
from leadline.nn import DeEscalation, LayerCache


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.floats(0.01, 1), st.integers(1, 6), st.integers(0, 999))
def test_full_form_is_the_projector(tau, n, seed):
    x = draw(2, n, 3, seed=seed)
    matrix = torch.eye(n, dtype=torch.float64) - tau / n  # I - tau Pi (21)
    assert torch.allclose(DeEscalation(tau)(x), matrix @ x, atol=1e-12)


@given(st.floats(0.01, 1), st.integers(1, 6), st.integers(0, 999), st.booleans())
def test_causal_form_is_the_mean_of_the_real_past(tau, n, seed, padded):
    x = draw(2, n, 3, seed=seed)
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) > 0.4 if padded else None
    y = DeEscalation(tau, causal=True)(x, mask)
    for b in range(2):
        for t in range(n):
            past = [x[b, s] for s in range(t) if mask is None or mask[b, s]]
            mean = torch.stack(past).mean(0) if past else torch.zeros(3, dtype=torch.float64)
            assert torch.allclose(y[b, t], x[b, t] - tau * mean, atol=1e-12)


def test_complete_removal_leaves_no_mean():
    assert metrics.token_similarity(DeEscalation(1.0)(draw(3, 20, 8))).max() < 1e-30


def test_padding_stays_out_of_the_mean():
    x, mask = draw(2, 6, 3), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    y = DeEscalation(0.7)(x, mask)
    assert torch.allclose(y[1, :4], DeEscalation(0.7)(x[1:, :4])[0], atol=1e-12)
    x[1, 4:] = 1e9
    assert torch.equal(DeEscalation(0.7)(x, mask)[mask], y[mask])


@pytest.mark.parametrize("chunks", [(6,), (1,) * 6, (3, 1, 2)])
def test_a_cache_continues_the_sums(chunks):
    x, mask = draw(2, 6, 3), torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    module, cache, out, seen = DeEscalation(0.7, causal=True), LayerCache(6), [], 0
    for part in x.split(chunks, dim=1):
        seen += part.shape[1]
        out.append(module(part, mask[:, :seen], cache))
    assert torch.allclose(torch.cat(out, 1), module(x, mask), atol=1e-14)


def test_learnable_tau_and_half_types():
    module = DeEscalation(1.0, learnable=True)
    x = draw(2, 4, 3).float()
    module(x).sum().backward()
    assert torch.allclose(module.tau.parameter.grad, -(4 * x.mean(1)).sum())
    x = (1000 + torch.rand(1, 5000, 1)).bfloat16()
    assert torch.allclose(DeEscalation(causal=True)(x)[0, -1].float(), torch.zeros(1), atol=8)  # sums in float32


@pytest.mark.parametrize("tau", [0.0, -0.1, 1.1, float("nan")])
def test_tau_outside_its_interval(tau):
    with pytest.raises(LeadlineError, match=r"tau is .*; it must lie in \(0, 1\]"):
        DeEscalation(tau)
