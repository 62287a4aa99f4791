"""What counts as the attention of a block, and the reasons where none does."""

import math

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.metrics import attention_entropy
from leadline.probing.attention_capture import AttentionCapture


def capture(function, tokens):
    """The weights captured where one attention is wanted, and the reasons for what was not."""
    received, reasons = [], []
    with AttentionCapture(
        lambda: None if received else tokens, received.append, lambda reason, attention: reasons.append(reason)
    ):
        function()
    weights = [
        torch.cat([attention.weights(i, 0, attention.heads) for i in range(attention.batch)]) for attention in received
    ]
    return weights, reasons


def test_weights_changed_after_their_softmax_are_those_of_the_product():
    scores, other, v = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 4)
    mixed = 0.5 * scores.softmax(-1) + 0.5 * other.softmax(-1)

    def gated():
        P = scores.softmax(-1)
        return (0.5 * P + 0.5 * other.softmax(-1)) @ v

    weights, _ = capture(gated, 6)
    torch.testing.assert_close(weights[-1], mixed)
    weights, _ = capture(lambda: nn.functional.dropout(scores.softmax(-1), 0.5, training=False) @ v, 6)
    assert len(weights) == 1
    weights, _ = capture(lambda: (scores.softmax(-1) @ v, torch.randn(2, 3, 6, 6) @ v), 6)  # another product
    assert len(weights) == 1


def test_samples_and_heads_in_one_axis():
    P = torch.randn(6, 5, 5).softmax(-1)  # 3 samples of 2 heads
    received = []
    with AttentionCapture(lambda: 5, received.append):
        torch.softmax(P.log(), -1)
    split = received[0].split(3)
    assert (split.batch, split.heads) == (3, 2)
    for sample in range(3):
        for head in range(2):
            torch.testing.assert_close(split.weights(sample, head, head + 1), P[2 * sample + head][None, None])
    assert received[0].split(4) is received[0]


def test_reasons():
    q, k = torch.randn(2, 2, 6, 4), torch.randn(2, 2, 3, 4)
    attention = nn.functional.scaled_dot_product_attention
    assert capture(lambda: attention(q, k, k), 6) == (
        [],
        ["its attention is of 6 queries to 3 keys, and it has 6 tokens"],
    )
    weights, reasons = capture(lambda: torch.randn(2, 2, 6, 7).softmax(-1), 6)
    assert (weights, reasons) == ([], ["a sink takes part in its softmax beside the tokens"])
    assert capture(lambda: torch.randn(12, 8).softmax(-1), 6) == ([], [])  # a router of experts


class Channels(nn.Module):
    """Attention between channels, with as many channels as tokens."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).transpose(1, 2).chunk(3, 1)  # each (B, d, n)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


class XCA(Channels):
    """The same under the name it has in XCiT."""


class Net(nn.Module):
    """Tokens through three blocks around an attention."""

    def __init__(self, make):
        super().__init__()

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.attn = nn.LayerNorm(8), make()

            def forward(self, x):
                return x + self.attn(self.norm(x))

        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_attention_between_channels_is_not_attention_between_tokens():
    report = ll.probe(Net(XCA).eval(), torch.randn(2, 8, 8), trials=False)
    assert report.measured.attention_seen == 0
    assert set(report.measured.attention_unseen.values()) == {
        "its attention is between channels (XCA), not between tokens"
    }
    assert "The entropy of attention was not measured" in report.verdict.text


class Few(nn.Module):
    """Attention within windows of 3 tokens, or of all tokens to the mean of each 3."""

    def __init__(self, windows):
        super().__init__()
        self.qkv, self.windows, self.P = nn.Linear(8, 24), windows, None

    def forward(self, x):
        x = x.unflatten(1, (-1, 3)).flatten(0, 1) if self.windows else x
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # each (B or B windows, H, n, 4)
        if not self.windows:
            k, v = (y.unflatten(2, (-1, 3)).mean(3) for y in (k, v))
        self.P = (q @ k.mT / 2).softmax(-1).detach()
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return y.unflatten(0, (3, -1)).flatten(1, 2) if self.windows else y


@pytest.mark.parametrize("windows", [True, False])
def test_entropy_within_windows_and_to_fewer_keys(windows):
    model = Net(lambda: Few(windows)).eval()
    report = ll.probe(model, torch.randn(3, 12, 8), trials=False)
    assert report.measured.attention_seen == 3
    for layer, block in zip(report.layers[1:], model.blocks, strict=True):
        want = attention_entropy(block.attn.P).mean((0, 2))
        torch.testing.assert_close(torch.tensor(layer.entropy), want, atol=1e-5, rtol=0)
        assert layer.entropy_uniform == pytest.approx(math.log(block.attn.P.shape[-1]))
        assert layer.delta is None
        assert report.measured.attention_unseen[layer.name].endswith("only its entropy is measured")


def test_the_first_of_two_attentions_counts():
    class Twice(Few):  # one window of 3 tokens alone, then windows over all
        def forward(self, x):
            part = super().forward(x[:, :3])
            return torch.cat([part, x[:, 3:]], 1) + super().forward(x)

    report = ll.probe(Net(lambda: Twice(True)).eval(), torch.randn(3, 12, 8), trials=False)
    assert report.measured.attention_seen == 0
    assert set(report.measured.attention_unseen.values()) == {
        "its attention is of 3 queries to 3 keys, and it has 12 tokens"
    }


class Flat(nn.Module):
    """Attention with samples and heads in one axis, as fairseq's models have it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.P = nn.Linear(8, 24), None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).flatten(1, 2)  # each (B H, n, 4)
        self.P = torch.softmax(torch.bmm(q, k.mT), -1)
        return torch.bmm(self.P, v).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def test_entropies_of_flat_attention():
    model = Net(Flat).eval()
    report = ll.probe(model, torch.randn(3, 5, 8), trials=False)
    for layer, block in zip(report.layers[1:], model.blocks, strict=True):
        want = attention_entropy(block.attn.P.detach().unflatten(0, (3, 2))).mean((0, 2))
        torch.testing.assert_close(torch.tensor(layer.entropy), want, atol=1e-5, rtol=0)
