"""Time a chain of layers with carried scores against plain flash attention without any carry, in one run on a GPU.

    python benchmarks/attention.py [shape ...]

Prints, per shape, milliseconds forward and forward+backward (wall time, eager launches), the time spent in kernels
alone, and the extra memory. A ratio is meaningful within one run only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from leadline.ops import hopfield_attention

Layers = Sequence[tuple[Tensor, Tensor, Tensor]]
SHAPES = {  # layers, batch, heads, tokens, causal; head width 64
    "gpt2_small": (12, 12, 12, 1024, True),
    "gpt2_medium": (24, 4, 16, 1024, True),
    "vit_base": (12, 128, 12, 197, False),
    "vit_large": (24, 32, 16, 197, False),
    "long_4096": (12, 2, 12, 4096, True),
}


def flash(layers: Layers, causal: bool) -> list[Tensor]:
    return [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for q, k, v in layers]


def carried(layers: Layers, causal: bool) -> list[Tensor]:
    state, outs = None, []
    for q, k, v in layers:
        out, state = hopfield_attention(q, k, v, state, alpha_prime=0.5, causal=causal, backend="fused")
        outs.append(out)
    return outs


def measure(run: Callable[[Layers, bool], list[Tensor]], layers: Layers, causal: bool) -> dict[str, float]:
    leaves = [x for layer in layers for x in layer]
    grads = [torch.randn_like(layer[0]) for layer in layers]

    def both() -> None:
        torch.autograd.grad(run(layers, causal), leaves, grads)

    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        both()
        torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in record.key_averages()) / 1000
    with torch.no_grad():
        forward = triton.testing.do_bench(lambda: run(layers, causal), return_mode="median")
    total = triton.testing.do_bench(both, return_mode="median")
    return {"forward_ms": forward, "total_ms": total, "kernels_ms": kernels, "extra_gib": extra}


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for name in sys.argv[1:] or SHAPES:
        depth, B, H, N, causal = SHAPES[name]
        layers = [
            tuple(
                torch.randn(B, N, H, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                for _ in range(3)
            )
            for _ in range(depth)
        ]
        rows = {run.__name__: measure(run, layers, causal) for run in (flash, carried)}
        for method, row in rows.items():
            figures = "  ".join(f"{key} {value:.2f}" for key, value in row.items())
            ratio = row["kernels_ms"] / rows["flash"]["kernels_ms"]
            print(f"{name:12s} {method:8s} {figures}  kernels/flash {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
