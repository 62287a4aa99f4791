"""Attention over few tokens against torch's own in float64: on the GPU, or by Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from test_fused import DEVICE, GPU, TOLERANCE

from leadline.errors import LeadlineError
from leadline.nn import HopfieldAttention
from leadline.ops import packed_attention
from leadline.ops.backends import use_backend

HALVES = [dtype for dtype in TOLERANCE if dtype != torch.float32]
SHAPES = [(1, 1, 1, 16), (2, 17, 2, 24), (1, 64, 3, 16), (1, 70, 1, 16)]  # B, N, H, D
if GPU:
    SHAPES += [(3, 49, 5, 41), (128, 64, 8, 24), (64, 64, 3, 64), (2, 64, 2, 128), (5, 65, 6, 64), (2, 128, 2, 128)]


def draw(B, N, H, D, dtype=torch.float16, spread=1.0):
    g = torch.Generator().manual_seed(0)
    qkv, d_out = torch.randn(B, N, 3, H, D, generator=g), torch.randn(B, N, H, D, generator=g)
    qkv[:, :, :2] *= spread
    return qkv.to(DEVICE, dtype).requires_grad_(), d_out.to(DEVICE, dtype)


def exact(qkv, d_out, causal):
    """torch's own attention in float64, and its gradient."""
    wide = qkv.detach().double().requires_grad_()
    q, k, v = wide.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    return out, torch.autograd.grad(out, wide, d_out.double())[0]


def close(ours, theirs, tolerance):
    return (ours.double() - theirs).norm() <= tolerance * max(theirs.norm().item(), 1e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradient(shape, causal, dtype):
    qkv, d_out = draw(*shape, dtype)
    out = packed_attention(qkv, causal=causal, backend="fused")
    (gradient,) = torch.autograd.grad(out, qkv, d_out)
    expected, wanted = exact(qkv, d_out, causal)
    assert close(out, expected, TOLERANCE[dtype])
    assert close(gradient, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_scores_of_any_size_have_a_gradient(dtype):
    qkv, d_out = draw(2, 20, 2, 16, dtype, spread=60.0)
    out = packed_attention(qkv, backend="fused")
    (gradient,) = torch.autograd.grad(out, qkv, d_out)
    assert out.isfinite().all()
    assert gradient.isfinite().all()
    assert close(out, exact(qkv, d_out, False)[0], TOLERANCE[dtype])


def test_what_the_kernels_do_not_take_is_torchs_own():
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool, device=DEVICE)
    mask[:, ..., 15:] = False
    for shape, dtype, options in (
        ((2, 129, 2, 16), torch.float16, {}),
        ((2, 20, 2, 160), torch.float16, {}),
        ((2, 20, 2, 16), torch.float32, {"causal": True}),
        ((2, 20, 2, 16), torch.float16, {"mask": mask}),
    ):
        qkv, _ = draw(*shape, dtype)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        theirs = F.scaled_dot_product_attention(
            q, k, v, attn_mask=options.get("mask"), is_causal=options.get("causal", False)
        )
        assert packed_attention(qkv, backend="fused", **options).equal(theirs.transpose(1, 2))


def test_attention_modules_take_it():
    attention = HopfieldAttention(32, 2, alpha=0.0, alpha_prime=0.0).to(DEVICE, torch.float16)
    x = torch.randn(2, 20, 32, device=DEVICE, dtype=torch.float16)
    with use_backend("fused"):
        ours = attention(x)[0]
    with use_backend("reference"):
        theirs = attention(x)[0]
        exactly = attention.double()(x.double())[0]
    assert not ours.equal(theirs)  # by other kernels
    assert close(ours, exactly, TOLERANCE[torch.float16])


def test_a_wrong_shape_is_one_clear_line():
    with pytest.raises(LeadlineError, match=r"qkv has shape \(2, 5, 2, 4, 8\); it must be \(batch, tokens, 3"):
        packed_attention(torch.zeros(2, 5, 2, 4, 8))


def test_the_custom_operators_are_well_formed():
    qkv, d_out = draw(1, 16, 1, 16)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    packed_attention(qkv, backend="fused")  # makes them
    torch.library.opcheck(torch.ops.leadline.packed_forward, (qkv, False), test_utils=checks)
    torch.library.opcheck(torch.ops.leadline.packed_backward, (qkv.detach(), d_out, False), test_utils=checks[:2])
