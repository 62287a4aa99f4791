import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline import LeadlineError, metrics


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_what_a_key_gets_by_hand(m, n, seed):
    P = (3 * torch.randn(2, 3, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)
    received, weight = metrics.attention_received(P), metrics.sink_weight(P)
    for b in range(2):
        for h in range(3):
            by_hand = [sum(P[b, h, i, j].item() for i in range(m)) / m for j in range(n)]
            assert received[b, h].tolist() == pytest.approx(by_hand)
            assert weight[b, h].item() == pytest.approx(max(by_hand))
    share = metrics.sink_share(P, threshold=0.5)
    assert share.tolist() == pytest.approx([sum(w > 0.5 for w in row) / 3 for row in weight.tolist()])


def test_planted_sinks():
    scores = torch.zeros(1, 4, 64, 64)
    scores[:, 1, :, 0] = 6  # all queries of head 1 look at key 0, of head 3 at key 9
    scores[:, 3, :, 9] = 6
    P = scores.softmax(-1)
    assert metrics.attention_received(P)[0, 3].argmax() == 9
    assert metrics.sink_share(P) == 0.5
    assert metrics.sink_share(P, threshold=0.9) == 0
    causal = torch.zeros(1, 1, 64, 64).masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf)
    harmonic = sum(1 / i for i in range(1, 65))
    assert metrics.sink_weight(causal.softmax(-1)).item() == pytest.approx(harmonic / 64, rel=1e-5)
    assert metrics.sink_share(causal.softmax(-1)) == 0


def test_padded_queries_stay_out():
    P = torch.randn(2, 3, 7, 7).softmax(-1)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    P = P.masked_fill(~mask[:, None, :, None], 0)
    P[1, :, 4:, 2] = 1
    value = metrics.sink_weight(P, mask)
    assert torch.allclose(value[1], metrics.sink_weight(P[1, :, :4]))
    assert torch.allclose(value[0], metrics.sink_weight(P[0]))


def test_half_types_and_single_tokens():
    P = torch.randn(2, 3, 600, 600).softmax(-1).bfloat16()
    assert torch.equal(metrics.sink_weight(P), metrics.sink_weight(P.float()))
    assert metrics.sink_weight(torch.ones(2, 1, 1)).tolist() == [1, 1]
    assert metrics.sink_share(torch.ones(2, 1, 1)) == 1


def test_bad_input_is_one_clear_line():
    for call, part in (
        (lambda: metrics.sink_share(torch.eye(3)), "heads, queries, keys"),
        (lambda: metrics.sink_weight(torch.eye(3) * torch.nan), "P has NaN"),
        (lambda: metrics.attention_received(torch.ones(2, 0, 3)), "no empty axis"),
    ):
        with pytest.raises(LeadlineError, match=part):
            call()
