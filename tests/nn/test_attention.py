"""HopfieldAttention and its strengths."""

import pytest
import torch
from torch import nn

from leadline import LeadlineError, ops
from leadline.nn import HopfieldAttention, Strength


def run(attention, x, layers=1, **kwargs):
    """The same layer several times, its state carried."""
    state, out = None, None
    for _ in range(layers):
        out, state = attention(x, state, **kwargs)
    return out, state


def test_formula():
    """y = alpha x + (1 - alpha) W_O softmax(h) V, h = alpha' h + (1 - alpha') Q K^T / sqrt(d_k), by hand."""
    attention = HopfieldAttention(6, 2, alpha=0.3, alpha_prime=0.6).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    q, k, v = (t.view(2, 4, 2, 3).transpose(1, 2) for t in attention.qkv(x).chunk(3, -1))
    h = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    for _ in range(3):
        h = 0.6 * h + 0.4 * q @ k.mT / 3**0.5
    expected = 0.3 * x + 0.7 * attention.proj((h.softmax(-1) @ v).transpose(1, 2).reshape(2, 4, 6))
    y, state = run(attention, x, 3)
    assert torch.allclose(y, expected, atol=1e-12)
    assert torch.allclose(state[0], h, atol=1e-12)


def test_strength_zero_is_torchs_multihead_attention():
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = HopfieldAttention(12, 3, alpha=0.0, alpha_prime=0.0).double()
    ours.qkv.weight.data, ours.qkv.bias.data = theirs.in_proj_weight.data, theirs.in_proj_bias.data
    ours.proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    y, state = ours(x, mask=mask)
    want = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
    assert torch.allclose(y[mask], want[mask], atol=1e-12)
    assert state is None


def test_strength_zero_equals_the_reference_path_to_the_last_bit(monkeypatch):
    """alpha = alpha' = 0 by the module, its kernel replaced by the reference, is softmax(Q K^T / sqrt(d)) V exactly."""
    attention = HopfieldAttention(12, 3, alpha=0.0, alpha_prime=0.0)
    x = torch.randn(2, 5, 12)
    q, k, v = attention.project(x)
    standard = attention.proj(((4**-0.5 * (q @ k.mT)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def reference(*args, **kwargs):
        return ops.hopfield_attention(*args, alpha_prime=0.0, **kwargs)[0]

    monkeypatch.setattr("leadline.ops.packed.standard_attention", reference)
    assert torch.equal(attention(x)[0], standard)


def test_grouped_queries_repeat_key_value_heads():
    grouped = HopfieldAttention(12, 4, kv_heads=2).double()
    full = HopfieldAttention(12, 4).double()
    q, k, v = grouped.qkv.weight.data.split((12, 6, 6))
    full.qkv.weight.data = torch.cat((q, *(w.view(2, 3, 12).repeat_interleave(2, 0).view(12, 12) for w in (k, v))))
    q, k, v = grouped.qkv.bias.data.split((12, 6, 6))
    full.qkv.bias.data = torch.cat((q, *(b.view(2, 3).repeat_interleave(2, 0).view(12) for b in (k, v))))
    full.proj.load_state_dict(grouped.proj.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert torch.allclose(run(grouped, x, 3)[0], run(full, x, 3)[0], atol=1e-12)


def test_head_width_of_its_own():
    attention = HopfieldAttention(10, 3, head_dim=4)
    assert attention.qkv.out_features == 36
    assert attention(torch.randn(2, 5, 10))[0].shape == (2, 5, 10)


@pytest.mark.parametrize("kind", ["layer", "head"])
def test_learnable_strengths_get_the_right_gradients(kind):
    attention = HopfieldAttention(6, 2, 0.3, 0.6, learnable_alpha=kind, learnable_alpha_prime=kind).double()
    fixed = HopfieldAttention(6, 2, 0.3, 0.6).double()
    fixed.load_state_dict({k: v for k, v in attention.state_dict().items() if "parameter" not in k})
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    y = run(attention, x, 3)[0]
    assert torch.allclose(y, run(fixed, x, 3)[0], atol=1e-7)  # the strengths were made in float32
    y.square().sum().backward()
    for strength in (attention.alpha, attention.alpha_prime):
        parameter = strength.parameter
        assert parameter.shape == (() if kind == "layer" else (2,))
        for i in range(parameter.numel()):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter.view(-1)[i] += step
                    values.append(run(attention, x, 3)[0].square().sum())
                    parameter.view(-1)[i] -= step
            numeric = (values[0] - values[1]) / 2e-5
            assert torch.allclose(parameter.grad.view(-1)[i], numeric, rtol=1e-5)


def test_alpha_per_head_weighs_the_heads_channels():
    attention = HopfieldAttention(6, 2, 0.5, 0.0, learnable_alpha="head")
    attention.alpha.parameter.data = torch.tensor([0.25, 0.75])
    x = torch.randn(1, 3, 6)
    plain = HopfieldAttention(6, 2, 0.0, 0.0)
    plain.load_state_dict({k: v for k, v in attention.state_dict().items() if "parameter" not in k})
    attended = plain(x)[0]
    y = attention(x)[0]
    assert torch.allclose(y[..., :3], 0.25 * x[..., :3] + 0.75 * attended[..., :3], atol=1e-6)
    assert torch.allclose(y[..., 3:], 0.75 * x[..., 3:] + 0.25 * attended[..., 3:], atol=1e-6)


def test_learned_strengths_stay_in_their_interval_and_can_come_back():
    for interval, low, high in (("[0, 1)", 0.0, 1.0), ("(0, 1]", 0.0, 1.0)):
        strength = Strength("s", 0.5, interval=interval, learnable="layer")
        for pushed in (-3.0, 5.0):
            strength.parameter.data.fill_(pushed)
            value = strength()
            assert low <= value <= high
            assert value < 1 if interval == "[0, 1)" else value > 0
            (gradient,) = torch.autograd.grad(value, strength.parameter)
            assert gradient == 1
    assert Strength("s", 1.0, interval="(0, 1]", learnable="layer")() == 1
    assert Strength("s", 0.0, learnable="layer")() == 0
    assert not Strength("s", 0.0, learnable="layer").off
    assert "learnable" in repr(Strength("s", 0.5, learnable="head", heads=3))


def test_dropout_acts_in_training_alone():
    attention = HopfieldAttention(6, 2, dropout=0.5)
    x = torch.randn(2, 4, 6)
    assert not torch.equal(attention(x)[0], attention(x)[0])
    attention.eval()
    assert torch.equal(attention(x)[0], attention(x)[0])


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (lambda: HopfieldAttention(10, 3), "heads must divide dim"),
        (lambda: HopfieldAttention(10, 0), "heads must divide dim"),
        (lambda: HopfieldAttention(12, 4, kv_heads=3), "kv_heads must divide heads"),
        (lambda: HopfieldAttention(12, 4, alpha=1.0), "alpha is 1.0; it must lie in [0, 1)"),
        (lambda: HopfieldAttention(12, 4, alpha=-0.5), "alpha is -0.5; it must lie in [0, 1)"),
        (lambda: HopfieldAttention(12, 4, alpha="half"), "alpha is half; it must lie in [0, 1)"),
        (lambda: HopfieldAttention(12, 4, alpha_prime=float("nan")), "alpha_prime is nan"),
        (lambda: HopfieldAttention(12, 4, scheme="sideways"), "unknown scheme 'sideways'"),
        (lambda: HopfieldAttention(12, 4, start="one"), "unknown start 'one'"),
        (lambda: HopfieldAttention(12, 4, learnable_alpha="token"), "unknown learnable alpha 'token'"),
        (lambda: HopfieldAttention(10, 3, head_dim=4, learnable_alpha="head"), "an alpha per head"),
        (lambda: HopfieldAttention(12, 4)(torch.randn(2, 5, 11)), "(batch, tokens, 12)"),
        (lambda: HopfieldAttention(12, 4)(torch.randn(2, 0, 12)), "none empty"),
        (lambda: HopfieldAttention(12, 4)(torch.randn(0, 3, 12)), "none empty"),
        (lambda: HopfieldAttention(12, 4)(torch.randn(2, 5, 12), mask=torch.ones(2, 4) > 0), "it must be (2, 5)"),
        (lambda: HopfieldAttention(12, 4)(torch.randn(2, 5, 12), (torch.zeros(2, 4, 6, 6),)), "state has shapes"),
    ],
)
def test_bad_input_is_one_clear_line(build, part):
    with pytest.raises(LeadlineError) as error:
        build()
    assert part in str(error.value)
    assert "\n" not in str(error.value)
