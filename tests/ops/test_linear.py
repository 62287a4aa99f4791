"""The linear-memory path against the reference in float64: on the GPU, or by Triton's interpreter on small shapes."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_fused import DEVICE, GPU, TOLERANCE, compare, draw, through

from leadline import ops
from leadline.errors import LeadlineError
from leadline.ops import backends
from leadline.ops.hopfield import dispatch, fused, linear, reference

SHAPES = [(1, 16), (70, 24), (130, 16)]  # tokens, head width
if GPU:
    SHAPES = [(1, 64), (130, 41), (1000, 64), (1024, 128)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("N", "D"), SHAPES)
def test_shapes(N, D, causal, dtype):
    layers = draw(2, 2, 2, N, D, dtype=dtype)
    compare(layers, dtype, [0.5, 0.5], attention=linear.hopfield_attention, causal=causal)


def test_strengths_other_than_a_power_of_two():
    """With 1/2 the weights of the layers are multiplied into the queries; with others that would round."""
    layers = draw(1, 2, 2, 70, 16, dtype=torch.float16)
    for strength, rounds in ((0.5, False), (0.7, True)):
        state = None
        for q, k, v in layers:
            _, state = linear.hopfield_attention(q, k, v, state, alpha_prime=strength)
        assert (linear._tables(list(state[2::3]), v).shares is None) == rounds
    compare(layers, torch.float16, [0.7, 0.5], attention=linear.hopfield_attention, causal=True)


@pytest.mark.parametrize("start", ["zero", "scores"])
@pytest.mark.parametrize("padded", [False, True])
def test_grouped_queries_padding_and_starts_in_pieces_and_strips(start, padded, monkeypatch):
    monkeypatch.setattr(linear, "PIECE", 2 * 64 * 150 * 4)  # one pair of heads and 64 queries at a time
    layers = draw(2, 4, 2, 150, 16)
    mask = None
    if padded:
        mask = torch.ones(2, 1, 1, 150, dtype=torch.bool, device=DEVICE)
        mask[0, ..., :5] = mask[1, ..., 66:] = False  # the first five queries of sample 0 see nothing
    options = {"start": start, "causal": True, "mask": mask, "scale": 0.3}
    compare(layers, torch.float32, [0.2, 0.5, 0.8, 0.4], attention=linear.hopfield_attention, **options)


def test_a_window_forgets_the_oldest_layers():
    """With W layers the error of the scores is at most alpha'^W times what was left out."""
    layers = draw(1, 2, 2, 40, 16, layers=5)
    state, whole = None, None
    for q, k, v in layers:
        out, state = linear.hopfield_attention(q, k, v, state, alpha_prime=0.5, window=3)
        _, whole = reference.hopfield_attention(q.double(), k.double(), v.double(), whole, alpha_prime=0.5)
    assert len(state) == 9  # three layers of queries, keys, strengths
    scores = [q.double() @ k.double().mT / 4 for q, k, _ in layers]
    kept = sum(0.5 ** (5 - m) * s for m, s in enumerate(scores) if m >= 2)
    assert torch.allclose(out.double(), kept.softmax(-1) @ layers[-1][2].double(), atol=1e-5)
    left_out = max(s.abs().max() for s in scores[:2])
    assert (kept - whole[0]).abs().max() <= 0.5**3 * left_out


def test_no_tensor_of_all_pairs_is_kept_and_runs_repeat():
    layers = draw(1, 2, 2, 130, 16, dtype=torch.float16)
    state = None
    for q, k, v in layers:
        _, state = linear.hopfield_attention(q, k, v, state)
    assert max(x.numel() for x in state) == layers[0][0].numel()
    runs = [through(linear.hopfield_attention, layers, torch.float16, [0.5, 0.5], causal=True) for _ in range(2)]
    for one, other in zip([*runs[0][0], *runs[0][1]], [*runs[1][0], *runs[1][1]], strict=True):
        assert torch.equal(one, other)


def test_dropout_has_its_gradient():
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 1, 70, 16, layers=1)[0])
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    target = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def value(step):
        torch.manual_seed(1)
        return (linear.hopfield_attention(q + step * direction, k, v, dropout=0.4)[0].double() * target).sum()

    (gradient,) = torch.autograd.grad(value(0.0), q)
    with torch.no_grad():
        numeric = (value(1e-2) - value(-1e-2)) / 2e-2
    assert torch.allclose((gradient * direction).sum().double(), numeric, rtol=2e-3)
    assert not torch.allclose(value(0.0), (linear.hopfield_attention(q, k, v)[0].double() * target).sum(), rtol=1e-3)


def test_what_it_does_not_take_is_named():
    q, k, v = draw(1, 2, 2, 20, 16, layers=1)[0]
    no = lambda **change: linear.unsupported(  # noqa: E731
        **{"q": q, "k": k, "v": v, "state": None, "alpha_prime": 0.5, "bias": None, "mask": None, **change}
    )
    assert no() is None
    assert "a bias is carried" in no(bias=torch.zeros(20, 20))
    assert "alpha' is learned" in no(alpha_prime=torch.tensor(0.5, requires_grad=True))
    assert "another path" in no(state=(torch.zeros(1, 2, 20, 20),))
    assert "float64" in no(q=q.double())
    assert "head width" in no(v=v[..., :8])
    assert "key padding" in no(mask=torch.ones(20, 20, dtype=torch.bool))


def test_the_dispatch_takes_it_when_asked_and_when_a_dense_state_would_not_fit(monkeypatch):
    q, k, v = draw(1, 2, 2, 20, 16, layers=1)[0]
    assert len(ops.hopfield_attention(q, k, v, backend="linear")[1]) == 3
    assert len(ops.hopfield_attention(q, k, v, backend="linear", window=1)[1]) == 3
    monkeypatch.setattr(dispatch, "worth_trying", lambda backend, q: True)  # as on a GPU
    assert len(ops.hopfield_attention(q, k, v)[1]) == 1
    monkeypatch.setattr(dispatch, "_needs_linear", lambda *inputs: True)
    out, state = ops.hopfield_attention(q, k, v)
    assert len(state) == 3
    monkeypatch.undo()
    assert dispatch._needs_linear(q, state, True)  # the layers after the first follow it
    assert torch.allclose(out, reference.hopfield_attention(q, k, v)[0], atol=1e-5)


def test_memory_that_is_kept_for_reuse_counts_as_free(monkeypatch):
    q = SimpleNamespace(is_cuda=True, device="cuda:0", shape=(8, 12, 4096, 64), element_size=lambda: 2)
    state = 2 * math.prod(fused.state_shape(q.shape, False))
    free, kept, used = 4 * state, 30 * state, 2 * state  # a step has left its states with the allocator
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept + used)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used)
    assert not dispatch._needs_linear(q, None, False)
    kept = 0
    assert dispatch._needs_linear(q, None, False)


def test_the_dispatch_falls_back_and_says_why():
    q, k, v = draw(1, 2, 2, 20, 16, layers=1)[0]
    bias = torch.randn(20, 20, device=DEVICE)
    backends._warned.clear()
    with pytest.warns(UserWarning, match="Hopfield attention") as told:
        out, _ = ops.hopfield_attention(q, k, v, bias=bias, backend="linear")
    assert ["cannot take its linear-memory path" in str(w.message) for w in told] == [True, False]
    assert torch.equal(out, reference.hopfield_attention(q, k, v, bias=bias)[0])
    with pytest.raises(LeadlineError, match="window is 0; it must be at least 1"):
        ops.hopfield_attention(q, k, v, window=0)


def test_a_forced_backend_wins():
    q, k, v = draw(1, 2, 2, 20, 16, layers=1)[0]
    with backends.use_backend("reference"):
        assert ops.hopfield_attention(q, k, v, backend="linear")[1][0].shape == (1, 2, 20, 20)
    with pytest.raises(LeadlineError, match="backend"), backends.use_backend("fastest"):
        pass
