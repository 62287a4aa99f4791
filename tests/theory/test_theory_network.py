"""Bounds for our attention-only models: how they are read, what they give, what is refused."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from leadline.errors import LeadlineError
from leadline.metrics import mixed_norm, residual
from leadline.models import create_model
from leadline.models.base import Model
from leadline.theory import attention_layers, network_bound

SMALL = {"dim": 12, "heads": 4, "depth": 4, "image_size": 16, "patch_size": 4, "num_classes": 0}


def small_model(seed: int = 0, **options: Any) -> Model:
    """Random everything, biases included, so that nothing can be read wrongly unnoticed."""
    torch.manual_seed(seed)
    model = create_model("attention_only", **{**SMALL, **options})
    for name, parameter in model.named_parameters():
        if "alpha" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def pixels(seed: int = 0, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "hopfield"},
        {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.7, "start": "scores"},
        {"attention": "hopfield", "alpha": 0.3, "alpha_prime": 0.0},
        {"attention": "hopfield", "kv_heads": 2, "head_dim": 5, "positions": "sinusoidal"},
        {"attention": "hopfield", "learnable_alpha": "layer", "learnable_alpha_prime": "head"},
        {"attention": "hopfield", "qkv_bias": False, "bias": False, "pool": "max"},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "standard",
)
@torch.no_grad()
def test_layers_compute_what_the_model_computes(options: dict[str, Any]) -> None:
    model = small_model(**options)
    for block in model.blocks:
        if block.attention.alpha_prime.parameter is not None:
            block.attention.alpha_prime.parameter.uniform_(0.1, 0.9)
    model = model.double()
    X, rope = model.embed(pixels().double())
    expected, state = model.blocks(X, rope=rope), None
    for layer in attention_layers(model):
        X, state = layer(X, state)
    torch.testing.assert_close(X, expected)
    records = network_bound(model, pixels().double())
    torch.testing.assert_close(records[-1].log_residual, mixed_norm(residual(expected)).log())
    assert all(record.holds.all() for record in records)
    assert records[0].above_noise.all()


def test_layer_without_carried_scores_hands_none_on() -> None:
    """alpha' = 0 in one layer only: the next starts anew, in the model and here."""
    model = small_model(attention="hopfield").double()
    model.blocks[1].attention.alpha_prime.value = 0.0
    X, _ = model.embed(pixels().double())
    expected, state = model.blocks(X), None
    for layer in attention_layers(model):
        X, state = layer(X, state)
    torch.testing.assert_close(X, expected)


def test_a_float32_model_is_measured_in_float64() -> None:
    model = small_model(depth=2)
    for block in model.blocks:
        block.attention.qkv.weight.data.mul_(0.1)
    records = network_bound(model, pixels())
    assert (records[1].log_residual < records[0].log_residual - 16).all()  # 1e-7: no float32 could tell
    assert records[1].above_noise.all()
    assert all(record.log_bound.dtype == torch.float64 and not record.log_bound.requires_grad for record in records)
    assert records[0].log_bound.shape == (3,)


def test_at_initialisation_the_bound_is_vacuous() -> None:
    """ViT-Tiny widths: true, and far above anything measured; it grows with the cube where the residual collapses."""
    torch.manual_seed(0)
    model = create_model("attention_only", depth=3)
    records = network_bound(model, torch.randn(1, 3, 224, 224))
    assert records[0].log_bound > 15
    assert records[1].log_bound > 50
    assert records[1].log_residual < -10
    assert (records[1].log_slack > 60).all()


def test_printed_form() -> None:
    model = small_model(attention="hopfield", alpha=0.0)
    printed, repaired = (network_bound(model, pixels(), form=form) for form in ("printed", "repaired"))
    for one, other in zip(printed, repaired, strict=True):
        assert (one.log_bound != other.log_bound).all()
        torch.testing.assert_close(one.log_residual, other.log_residual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "pre"}, r"norm is 'pre'; the bounds hold for attention alone: give norm='none'"),
        ({"norm": "post"}, "norm is 'post'"),
        ({"ffn": 24}, "ffn is 24; .* give ffn=0"),
        ({"skip": True}, "skip is True; .* give skip=False"),
        ({"gain": 2.0}, r"gain is 2\.0"),
        ({"de_escalation": 0.5}, r"de_escalation is 0\.5"),
        ({"formula": "sigmoid"}, "formula is 'sigmoid'"),
        ({"positions": "rotary", "head_dim": 4}, "positions is 'rotary'"),
        ({"attention": "hopfield", "learnable_alpha": "head"}, "alpha has 4 values, one per head"),
    ],
)
def test_what_the_bounds_do_not_cover_is_refused(options: dict[str, Any], message: str) -> None:
    model = create_model("attention_only", **{**SMALL, **options})
    with pytest.raises(LeadlineError, match=message):
        network_bound(model, pixels())


def test_another_scheme_is_refused() -> None:
    model = small_model(attention="hopfield")
    model.blocks[2].config = dataclasses.replace(model.blocks[2].config, scheme="forward-forward")
    with pytest.raises(LeadlineError, match=r"scheme is 'forward-forward'; .* give scheme='forward-backward'"):
        network_bound(model, pixels())


def test_a_causal_model_is_refused() -> None:
    model = create_model("gpt2_small", dim=8, heads=2, depth=1, norm="none", ffn=0, skip=False, vocab_size=10)
    with pytest.raises(LeadlineError, match="causal is True"):
        network_bound(model, torch.zeros(1, 3, dtype=torch.long))


def test_a_model_of_others_is_refused() -> None:
    with pytest.raises(LeadlineError, match=r"the model is a Linear; .*create_model\('attention_only'"):
        network_bound(nn.Linear(2, 2), pixels())


def test_printed_form_needs_alpha_0() -> None:
    with pytest.raises(LeadlineError, match=r"alpha is 0\.5"):
        network_bound(small_model(attention="hopfield"), pixels(), form="printed")
