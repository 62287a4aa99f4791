"""Biased attention against torch's own in float64: on the GPU, or by Triton's interpreter on small odd shapes."""

import pytest
import torch
import torch.nn.functional as F
from test_fused import DEVICE, GPU, TOLERANCE

from leadline.errors import LeadlineError
from leadline.ops import backends, biased_attention

CASES = [  # B, H, Hkv, M, N, D, shape of the bias, causal
    (2, 2, 2, 70, 70, 16, (2, 2, 70, 70), True),
    (2, 4, 2, 33, 70, 24, (1, 4, 33, 70), True),
    (2, 2, 1, 70, 65, 16, (2, 1, 70, 65), False),
    (3, 2, 2, 40, 40, 16, (40, 40), False),
    (2, 2, 2, 40, 40, 16, (2, 1, 40), True),  # the same for all queries
    (1, 1, 1, 1, 1, 16, (1, 1, 1, 1), False),
]
if GPU:
    CASES += [
        (2, 4, 2, 1000, 1024, 64, (1, 4, 1000, 1024), True),
        (2, 4, 4, 197, 197, 64, (2, 4, 197, 197), False),
        (2, 2, 2, 300, 300, 128, (1, 1, 300, 300), True),
    ]


def draw(B, H, Hkv, M, N, D, shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, D), shape)
    return [torch.randn(size, generator=g).to(DEVICE, dtype).requires_grad_() for size in sizes]


def gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(DEVICE)
    return [x.double() for x in (out.detach(), *torch.autograd.grad((out.double() * weights).sum(), inputs))]


def by_torch(q, k, v, bias, causal, mask=None, scale=None):
    """torch's attention with the bias as a float mask; a row without a visible key gives 0."""
    M, N = q.shape[2], k.shape[2]
    seen = torch.ones(M, N, dtype=torch.bool, device=q.device)
    seen = seen.tril(N - M) if causal else seen
    seen = seen if mask is None else seen & mask
    lost = ~seen.any(-1, keepdim=True)
    added = bias + torch.zeros(M, N, dtype=bias.dtype, device=q.device).masked_fill(~(seen | lost), -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale, enable_gqa=True)
    return out.masked_fill(lost, 0.0)


def close(ours, theirs, tolerance):
    largest = max(x.norm() for x in theirs)  # with a single key the gradients of scores are truly 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= tolerance * (other.norm() or largest)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("B", "H", "Hkv", "M", "N", "D", "shape", "causal"), CASES)
def test_output_and_gradients(B, H, Hkv, M, N, D, shape, causal, dtype):
    inputs = draw(B, H, Hkv, M, N, D, shape, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = gradients(biased_attention(*inputs, causal=causal, backend="fused"), inputs)
    close(ours, gradients(by_torch(*exact, causal), exact), TOLERANCE[dtype])


def test_padding_scale_and_a_bias_without_gradient():
    inputs = draw(2, 2, 2, 40, 40, 16, (1, 2, 40, 40), torch.float32)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=DEVICE)
    mask[0, ..., :5] = mask[1, ..., 30:] = False  # causal: the first five queries of sample 0 see nothing
    options = {"mask": mask, "causal": True, "scale": 0.3}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = gradients(biased_attention(*inputs, **options, backend="fused"), inputs)
    close(ours, gradients(by_torch(*exact, **options), exact), 2e-6)
    fixed = biased_attention(*inputs[:3], inputs[3].detach(), **options, backend="fused")
    close(gradients(fixed, inputs[:3]), ours[:-1], 0.0)


def test_the_reference_agrees_and_takes_any_mask():
    inputs = draw(2, 4, 2, 9, 12, 8, (4, 9, 12), torch.float32)
    mask = torch.rand(2, 4, 9, 12, device=DEVICE) < 0.7
    backends._warned.clear()
    with pytest.warns(UserWarning, match="slow reference path: the mask is"):
        out = biased_attention(*inputs, mask=mask, causal=True, backend="fused")
    close([out.detach()], [by_torch(*inputs, True, mask=mask).detach()], 1e-6)


def test_dropout_has_its_gradient():
    q, k, v, bias = draw(1, 2, 2, 40, 40, 16, (1, 1, 40, 40), torch.float32)
    direction = torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    target = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def value(step):
        torch.manual_seed(1)
        out = biased_attention(q, k, v, bias + step * direction, dropout=0.4, backend="fused")
        return (out.double() * target).sum()

    (gradient,) = torch.autograd.grad(value(0.0), bias)
    with torch.no_grad():
        numeric = (value(1e-2) - value(-1e-2)) / 2e-2
    assert torch.allclose((gradient * direction).sum().double(), numeric, rtol=2e-3)


def test_results_repeat():
    inputs = draw(3, 2, 2, 70, 70, 16, (1, 1, 70, 70), torch.float16)
    runs = [gradients(biased_attention(*inputs, backend="fused"), inputs) for _ in range(2)]
    close(*runs, 0.0)


def test_a_bias_that_does_not_fit_is_refused():
    q, k, v, _ = draw(2, 2, 2, 9, 12, 8, (1,), torch.float32)
    with pytest.raises(LeadlineError, match=r"bias has shape \(3, 9, 12\); it must broadcast to \(2, 2, 9, 12\)"):
        biased_attention(q, k, v, torch.zeros(3, 9, 12))
