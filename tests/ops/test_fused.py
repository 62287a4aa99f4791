"""The fused kernels against the reference in float64: on the GPU, or by Triton's interpreter on small odd shapes."""

import warnings

import pytest
import torch

from leadline import LeadlineError, ops
from leadline.ops import backends
from leadline.ops.hopfield import fused, linear, reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# the interpreter knows no bfloat16 products
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3} | ({torch.bfloat16: 1e-2} if GPU else {})
SHAPES = [(1, 16), (63, 24), (64, 16), (130, 16), (130, 24)]  # tokens, head width
if GPU:
    SHAPES = [(1, 64), (63, 32), (130, 41), (197, 64), (1000, 64), (1024, 64), (1024, 128)]


def draw(B, H, Hkv, N, D, layers=3, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda heads: torch.randn(B, N, heads, D, generator=g).transpose(1, 2).to(DEVICE, dtype)  # noqa: E731
    return [[make(H), make(Hkv), make(Hkv)] for _ in range(layers)]


def through(attention, layers, dtype, strength, learned=False, **options):
    """Outputs of a chain of layers, and the gradients of a loss that sees every output."""
    leaves = [[x.detach().to(dtype).clone().requires_grad_() for x in layer] for layer in layers]
    strength = torch.tensor(strength, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
    strength.requires_grad_(learned)
    state, outs = None, []
    for q, k, v in leaves:
        out, state = attention(q, k, v, state, alpha_prime=strength, **options)
        outs.append(out)
    weights = torch.Generator().manual_seed(9)
    loss = sum(
        (out.double() * torch.randn(out.shape, generator=weights, dtype=torch.float64).to(DEVICE)).sum() for out in outs
    )
    loss.backward()
    grads = [x.grad for layer in leaves for x in layer] + ([strength.grad] if learned else [])
    return [out.detach().double() for out in outs], [grad.double() for grad in grads]


def compare(layers, dtype, strength, attention=fused.hopfield_attention, **options):
    got = through(attention, layers, dtype, strength, **options)
    rounded = [[x.to(dtype) for x in layer] for layer in layers]
    want = through(reference.hopfield_attention, rounded, torch.float64, strength, **options)
    # relative to the layer's largest gradient: with a single token those of queries and keys are truly 0
    largest = max(grad.norm() for grad in want[1])
    for ours, theirs in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        size = theirs.norm() if theirs.norm() > 1e-9 * largest else largest
        assert (ours - theirs).norm() <= TOLERANCE[dtype] * size


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("N", "D"), SHAPES)
def test_shapes(N, D, causal, dtype):
    compare(draw(2, 2, 2, N, D, dtype=dtype), dtype, [0.5, 0.5], causal=causal)


@pytest.mark.parametrize("start", ["zero", "scores"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_grouped_queries_padding_learned_strengths_and_starts(start, causal, padded):
    layers = draw(2, 4, 2, 70, 16)
    mask = None
    if padded:
        mask = torch.ones(2, 1, 1, 70, dtype=torch.bool, device=DEVICE)
        mask[0, ..., :5] = mask[1, ..., 66:] = False  # causal: the first five queries of sample 0 see nothing
    options = {"start": start, "causal": causal, "mask": mask, "learned": True, "scale": 0.3}
    compare(layers, torch.float32, [0.2, 0.5, 0.8, 0.4], **options)


def test_same_results_from_run_to_run():
    layers = draw(2, 2, 2, 130, 16, dtype=torch.float16)
    runs = [through(fused.hopfield_attention, layers, torch.float16, [0.5, 0.5], causal=True) for _ in range(2)]
    for one, other in zip([*runs[0][0], *runs[0][1]], [*runs[1][0], *runs[1][1]], strict=True):
        assert torch.equal(one, other)


def test_dropout_has_its_rate_its_mean_and_its_gradient():
    N = 64
    q, k, _ = (x.requires_grad_() for x in draw(1, 1, 1, N, 64 if GPU else 16, layers=1)[0])
    v = torch.eye(N, 64 if GPU else 16, device=DEVICE).expand(1, 1, -1, -1).clone().requires_grad_()
    whole = fused.hopfield_attention(q, k, v)[0]
    torch.manual_seed(1)
    dropped = fused.hopfield_attention(q, k, v, dropout=0.4)[0]
    shown = whole[..., : v.shape[-1]] != 0
    zero = (dropped == 0) & shown
    assert abs(zero[shown].double().mean() - 0.4) < 0.05
    assert torch.allclose(dropped[shown & ~zero], (whole / 0.6)[shown & ~zero], rtol=1e-4)
    # the gradient by finite differences, the same weights dropped each time
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    target = torch.randn(dropped.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def value(step):
        torch.manual_seed(1)
        return (fused.hopfield_attention(q + step * direction, k, v, dropout=0.4)[0].double() * target).sum()

    (gradient,) = torch.autograd.grad((dropped * target).sum(), q)
    with torch.no_grad():
        numeric = (value(1e-2) - value(-1e-2)) / 2e-2
    assert torch.allclose((gradient * direction).sum().double(), numeric, rtol=2e-3)


def test_large_scores_are_cut_and_not_infinite():
    q, k, v = (100 * x for x in draw(1, 1, 1, 64, 16, layers=1, dtype=torch.float16)[0])
    out, state = fused.hopfield_attention(q, k, v, scale=100.0)
    assert out.isfinite().all()
    assert state[0].abs().max() == torch.tensor(60000.0, dtype=torch.float16)


def test_a_causal_state_holds_the_lower_tiles_only():
    q, k, v = draw(2, 3, 3, 130, 16, layers=1, dtype=torch.float16)[0]
    assert fused.hopfield_attention(q, k, v, causal=True)[1][0].shape == (6, 6, 64 * 64)
    assert fused.hopfield_attention(q, k, v)[1][0].shape == (6, 9, 64 * 64)


def test_a_state_of_the_reference_is_known_whatever_its_shape():
    q, k, v = draw(2, 1, 1, 64, 16, layers=1)[0]  # where there are as many numbers in both
    _, state = reference.hopfield_attention(q, k, v)
    assert fused.unsupported(q, k, v, state, None, None, False) == "the state comes from the reference path"
    _, state = fused.hopfield_attention(q, k, v)
    assert fused.unsupported(q, k, v, state, None, None, False) is None
    with pytest.raises(LeadlineError, match="state has shapes"):
        reference.hopfield_attention(q, k, v, state)


def test_an_unsupported_combination_falls_back_with_one_warning():
    q, k, v = draw(1, 2, 2, 20, 16, layers=1)[0]
    bias = torch.randn(2, 20, 20, device=DEVICE)
    backends._warned.clear()
    with pytest.warns(UserWarning, match="slow reference path: a bias is carried"):
        out, state = ops.hopfield_attention(q, k, v, bias=bias, backend="fused")
    assert torch.equal(out, reference.hopfield_attention(q, k, v, bias=bias)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ops.hopfield_attention(q, k, v, bias=bias, backend="fused")  # told once
        ops.hopfield_attention(q[:, :, :1], k, v, backend="fused")  # decoding: nothing to tell
        assert torch.equal(ops.hopfield_attention(q, k, v, backend="fused")[0], fused.hopfield_attention(q, k, v)[0])
    for change, reason in (
        ({"state": state}, "the state comes from the reference path"),
        ({"mask": torch.ones(20, 20, dtype=torch.bool, device=DEVICE)}, "it takes key padding"),
        ({"q": q.double(), "k": k.double(), "v": v.double()}, "the inputs are torch.float64"),
        ({"v": torch.randn(1, 2, 20, 8, device=DEVICE)}, "the head width is 16"),
    ):
        with pytest.warns(UserWarning, match=reason):
            ops.hopfield_attention(**{"q": q, "k": k, "v": v, "backend": "fused", **change})


def test_without_triton_the_reference_runs_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr("leadline.ops.backends.HAS_TRITON", False)
    backends._warned.clear()
    q, k, v = draw(1, 2, 2, 20, 16, layers=1)[0]
    with pytest.warns(UserWarning, match=r"pip install 'leadline\[gpu\]'"):
        out, _ = ops.hopfield_attention(q, k, v, backend="fused")
    assert torch.equal(out, reference.hopfield_attention(q, k, v)[0])


def test_the_custom_operators_are_well_formed():
    """Schema, fake tensors and autograd registration, by torch's own check."""
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 1, 70, 16, layers=1)[0])
    strength = torch.full((2,), 0.5, device=DEVICE)
    arguments = (q, k, v, strength, None, None, None, 0.0, False, True, 0.0, 0.25, False)
    torch.library.opcheck(torch.ops.leadline.hopfield_forward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("strength", [0.0, 1e-6, 0.3, 0.9])
def test_gradients_through_a_state_of_any_weight(strength):
    layers = draw(1, 2, 2, 70, 16)
    for given in (strength, torch.tensor([strength, 0.5], device=DEVICE)):
        found = []
        for attention, dtype in ((fused.hopfield_attention, torch.float32), (reference.hopfield_attention, None)):
            leaves = [[x.to(dtype or torch.float64).requires_grad_() for x in layer] for layer in layers]
            state, loss = None, 0
            for q, k, v in leaves:
                out, state = attention(q, k, v, state, alpha_prime=given)
                loss = loss + out.square().sum()
            found.append(torch.autograd.grad(loss, [x for layer in leaves for x in layer]))
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_what_the_kernels_cannot_count_to_is_left_to_the_reference():
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    projected = make(14564, 64, 3, 6, 128).permute(2, 0, 3, 1, 4)[0]  # queries as they lie beside keys and values
    for x, reason in (
        (make(5461, 12, 64, 8), None),
        (make(5462, 12, 64, 8), "batch times heads is 65,544; it takes up to 65,535, make the batch smaller"),
        (projected, "a tensor spans 2,147,547,647 numbers in memory; it takes up to 2^31, make the batch smaller"),
    ):
        assert fused.unsupported(x, x, x, None, None, None, False) == reason
        assert linear.unsupported(x, x, x, None, 0.5, None, None) is None  # which goes sample by sample
    for tokens, fits in ((2**24, True), (2**24 + 1, False)):
        x = make(1, 1, tokens, 128)
        assert (linear.unsupported(x, x, x, None, 0.5, None, None) is None) == fits


def test_exported_for_a_batch_of_any_size():
    class Attention(torch.nn.Module):
        def forward(self, q):
            return ops.hopfield_attention(q, q, q, backend="fused")[0]

    q = draw(3, 2, 2, 64, 16, layers=1)[0][0]
    exported = torch.export.export(Attention(), (q,), dynamic_shapes={"q": {0: torch.export.Dim("b")}}, strict=False)
    other = draw(5, 2, 2, 64, 16, layers=1, seed=1)[0][0]
    assert torch.allclose(exported.module()(other), Attention()(other), atol=1e-6)


def test_a_number_and_a_tensor_of_strengths_give_the_same():
    q, k, v = draw(1, 2, 2, 64, 16, layers=1)[0]
    strengths = (0.3, torch.full((2,), 0.3, device=DEVICE), 0.3)
    outs = [fused.hopfield_attention(q, k, v, alpha_prime=strength)[0] for strength in strengths]
    assert torch.allclose(outs[0], outs[1], atol=1e-6)
    assert torch.equal(outs[0], outs[2])
