"""Attention over few tokens: our kernels beside torch's own, forward and backward, replayed from CUDA graphs.

python benchmarks/few_tokens.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

import torch

from leadline.bench.measure import median_ms
from leadline.ops import packed_attention

SHAPES = ((128, 64, 8, 24), (128, 65, 8, 24), (256, 64, 3, 64), (256, 65, 6, 64), (64, 128, 6, 64))  # B, N, H, D
LAYERS = 10  # in a graph, so that starting it does not count


def microseconds(work: Callable[[], object]) -> float:
    """Of one layer."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what is captured must have run before
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1000 * median_ms(graph.replay, True, 50) / LAYERS


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, microseconds a layer, forward and backward"
    )
    for B, N, H, D in SHAPES:
        qkv = torch.randn(B, N, 3, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        d_out = torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16)

        def both(backend: str, qkv: torch.Tensor = qkv, d_out: torch.Tensor = d_out) -> None:
            for _ in range(LAYERS):
                torch.autograd.grad(packed_attention(qkv, backend=backend), qkv, d_out)

        torchs, ours = (microseconds(lambda backend=backend: both(backend)) for backend in ("reference", "fused"))  # type: ignore[misc]
        print(f"{B * H} heads, {N} tokens of width {D}: torch {torchs:.1f}, ours {ours:.1f}, {torchs / ours:.1f} times")


if __name__ == "__main__":
    main()
