"""The tied adaptive softmax against torch's own and against one dense softmax after the other."""

import pytest
import torch

import leadline as ll
from leadline.nn.adaptive_softmax import AdaptiveSoftmax

V, D = 23, 6


def make(cutoffs):
    softmax, weight = AdaptiveSoftmax(D, V, cutoffs).double(), torch.randn(V, D, dtype=torch.float64)
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.normal_()
    return softmax, weight


@pytest.mark.parametrize("cutoffs", [(5,), (4, 9, 20), (1, 22)])
def test_agrees_with_torch_where_torch_can_say_the_same(cutoffs):
    softmax, weight = make(cutoffs)
    softmax.bias.data[cutoffs[0] :] = 0  # torch has no bias in the tails
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, list(cutoffs), div_value=1.0, head_bias=True).double()
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat((weight[: cutoffs[0]], softmax.cluster_weight)))
        theirs.head.bias.copy_(torch.cat((softmax.bias[: cutoffs[0]], softmax.cluster_bias)))
        for (narrow, wide), start, end in zip(theirs.tail, cutoffs, (*cutoffs[1:], V), strict=True):
            narrow.weight.copy_(torch.eye(D))
            wide.weight.copy_(weight[start:end])
    x, targets = torch.randn(40, D, dtype=torch.float64), torch.randint(V, (40,))
    assert torch.allclose(softmax.log_probs(x, weight), theirs.log_prob(x), atol=1e-12)
    want = theirs(x, targets)
    assert torch.allclose(softmax.nll(x, targets, weight), -want.output, atol=1e-12)
    assert torch.allclose(softmax.nll(x, targets, weight).mean(), want.loss, atol=1e-12)


@pytest.mark.parametrize("cutoffs", [(), (5,), (4, 9, 20), (30,)])
def test_is_the_composed_distribution_with_biases_everywhere(cutoffs):
    softmax, weight = make(cutoffs)
    x = torch.randn(2, 3, D, dtype=torch.float64)
    logits = x @ weight.T + softmax.bias
    ends = [*(c for c in cutoffs if c < V), V]
    want = torch.zeros(2, 3, V, dtype=torch.float64)
    for row in range(2):
        for at in range(3):
            scores = [logits[row, at, w].exp() for w in range(ends[0])]
            clusters = [
                (x[row, at] @ softmax.cluster_weight[c] + softmax.cluster_bias[c]).exp() for c in range(len(ends) - 1)
            ]
            whole = sum(scores) + sum(clusters)
            for w in range(V):
                c = sum(w >= end for end in ends)
                if c == 0:
                    want[row, at, w] = scores[w] / whole
                else:
                    inside = logits[row, at, ends[c - 1] : ends[c]].exp()
                    want[row, at, w] = clusters[c - 1] / whole * inside[w - ends[c - 1]] / inside.sum()
    assert torch.allclose(want.sum(-1), torch.ones(2, 3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(softmax.log_probs(x, weight).exp(), want, atol=1e-12)
    targets = torch.randint(V, (2, 3))
    picked = -want.log().gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(softmax.nll(x, targets, weight), picked, atol=1e-12)


def test_gradients_are_those_of_the_dense_form_and_reach_the_tied_weights():
    softmax, weight = make((4, 9))
    x, targets = torch.randn(30, D, dtype=torch.float64), torch.randint(V, (30,))
    leaves = [x.requires_grad_(), weight.requires_grad_(), *softmax.parameters()]
    dense = -softmax.log_probs(x, weight).gather(-1, targets[:, None]).mean()
    for ours, want in zip(
        torch.autograd.grad(softmax.nll(x, targets, weight).mean(), leaves),
        torch.autograd.grad(dense, leaves),
        strict=True,
    ):
        assert torch.allclose(ours, want, atol=1e-12)


def test_a_cluster_that_no_target_is_in_costs_nothing_and_harms_nothing():
    softmax, weight = make((4, 9))
    x, targets = torch.randn(5, D, dtype=torch.float64), torch.arange(5) % 4
    want = -softmax.log_probs(x, weight).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(softmax.nll(x, targets, weight), want, atol=1e-12)


def test_half_precision_keeps_its_probabilities_in_float32():
    softmax, weight = make((4, 9))
    x = torch.randn(5, D)
    low = softmax.bfloat16().log_probs(x.bfloat16(), weight.bfloat16())
    assert low.dtype == torch.float32
    assert torch.allclose(low.exp().sum(-1), torch.ones(5), atol=1e-5)


@pytest.mark.parametrize("cutoffs", [(9, 4), (4, 4), (0, 4)])
def test_cutoffs_must_grow(cutoffs):
    with pytest.raises(ll.LeadlineError, match="must be above 0 and grow"):
        AdaptiveSoftmax(D, V, cutoffs)


def test_targets_must_fit():
    softmax, weight = make((4,))
    for wrong, line in ((torch.tensor([0, -100]), "lie between -100 and 0"), (torch.zeros(2), "must be integers")):
        with pytest.raises(ll.LeadlineError, match=line):
            softmax.nll(torch.randn(2, D, dtype=torch.float64), wrong, weight)
    with pytest.raises(ll.LeadlineError, match=r"targets have shape \(3,\); they must be \(2,\)"):
        softmax.nll(torch.randn(2, D, dtype=torch.float64), torch.zeros(3, dtype=torch.long), weight)
