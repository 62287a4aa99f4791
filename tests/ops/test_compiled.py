"""The operators inside torch.compile: the same kernels through custom operators, so the same numbers bit for bit."""

import pytest
import torch
from test_fused import DEVICE, GPU, draw

from leadline.ops import biased_attention, hopfield_attention, packed_attention

DTYPE = torch.bfloat16 if GPU else torch.float16


def carried(strengths, start="zero", mask=None, causal=True):
    """Two layers, so that a state goes from one to the next."""

    def chain(q, k, v, q2, k2, v2, *learned):
        strength = learned[0] if learned else strengths
        options = {"alpha_prime": strength, "start": start, "mask": mask, "causal": causal, "backend": "fused"}
        out, state = hopfield_attention(q, k, v, **options)
        return out, hopfield_attention(q2, k2, v2, state, **options)[0]

    return chain


def biased(mask=None, causal=False):
    def attend(q, k, v, bias):
        return biased_attention(q, k, v, bias, mask=mask, causal=causal, backend="fused")

    return attend


def packed(causal):
    return lambda qkv: packed_attention(qkv, causal=causal, backend="fused")


def pair(H=2, Hkv=2, N=70):
    return [x for layer in draw(2, H, Hkv, N, 16, layers=2, dtype=DTYPE) for x in layer]


def padding():
    return (torch.arange(70, device=DEVICE) < torch.tensor([[70], [33]], device=DEVICE))[:, None, None]


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPE)


CASES = {
    "carried": (carried(0.5), pair),
    "carried, every token, from scores": (carried(0.5, start="scores", causal=False), pair),
    "carried, padding": (carried(0.5, mask=padding(), causal=False), pair),
    "carried, keys shared by heads": (carried(0.3), lambda: pair(Hkv=1)),
    "carried, learned": (carried(None), lambda: [*pair(), torch.tensor([0.3, 0.6], device=DEVICE)]),
    "biased": (biased(), lambda: [*pair()[:3], noise(2, 2, 70, 70)]),
    "biased, shared": (biased(causal=True), lambda: [*pair()[:3], noise(2, 70, 70)]),
    "biased, padding": (biased(mask=padding()), lambda: [*pair(Hkv=1)[:3], noise(1, 1, 70, 70)]),
    "packed": (packed(False), lambda: [noise(2, 33, 3, 2, 16)]),
    "packed, causal": (packed(True), lambda: [noise(2, 33, 3, 2, 16)]),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_is_the_same(case):
    function, make = CASES[case]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for call in (function, compiled):
        leaves = [x.requires_grad_() for x in make()]
        outs = call(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        gradients = torch.autograd.grad(outs, leaves, [noise(*out.shape) for out in outs])
        results.append([*outs, *gradients])
    for plain, ours in zip(*results, strict=True):
        assert plain.isfinite().all()
        assert torch.equal(plain, ours)
        assert plain.stride() == ours.stride()
