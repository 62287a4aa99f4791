"""What watching costs a training run: step time with and without, interleaved in one run on one machine.

    python benchmarks/watch_overhead.py [--every 50] [--repeats 20] [--out FOLDER]

Plain steps, measured steps and steps measured with attention entropy take turns, each with a CSV file to write to,
so that a machine that slows down slows all of them. Overhead = (measured / plain - 1) / every, from medians. Steps
that are not measured carry no hooks; what is left of the watcher there is timed too ("idle"). FOLDER gets the
numbers as watch_overhead.json and as a table in watch_overhead.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

import torch
import torch.nn.functional as F

import leadline as ll
from leadline.papers.shared.store import environment
from leadline.probing import watch

TARGET = 0.05
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # model, options, batch
    "vit_tiny, 12 layers, 197 tokens": ("vit_tiny", {}, 4),
    "gpt2, 12 layers, width 256, 128 tokens": ("gpt2_small", {"dim": 256, "heads": 4, "vocab_size": 4096}, 4),
    "vit, 80 layers, width 192, 65 tokens": (
        "vit_tiny",
        {"depth": 80, "image_size": 32, "patch_size": 4, "ffn": 384},
        4,
    ),
}


def step_of(name: str, options: dict[str, Any], batch: int, device: str) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model and one training step of it: forward, backward, AdamW."""
    torch.manual_seed(0)
    model = ll.create_model(name, **options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config: Any = model.config
    if name.startswith("vit"):
        x = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
        y = torch.randint(0, config.num_classes, (batch,), device=device)
    else:
        x = torch.randint(0, config.vocab_size, (batch, 128), device=device)
        y = x.roll(-1, 1)

    def step() -> None:
        logits = model(x)
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def seconds(action: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(case: str, repeats: int, every: int, device: str) -> dict[str, Any]:
    model, step = step_of(*CASES[case], device)
    times: dict[str, list[float]] = {"plain": [], "idle": [], "measured": [], "with entropy": []}
    with tempfile.TemporaryDirectory() as folder:
        light = watch(model, every=1, to=Path(folder) / "light.csv")
        heavy = watch(model, every=1, to=Path(folder) / "heavy.csv", entropy=True)
        idle = watch(model, every=10**9)

        def watched(watcher: Any, at: int) -> None:
            watcher.begin(at)
            step()
            watcher.end()

        for at in range(1, repeats + 3):
            row = {
                "plain": seconds(step, device),
                "idle": seconds(lambda at=at: watched(idle, at), device),
                "measured": seconds(lambda at=at: watched(light, at), device),
                "with entropy": seconds(lambda at=at: watched(heavy, at), device),
            }
            if at > 2:  # the first two warm up
                for name, value in row.items():
                    times[name].append(value)
        for watcher in (light, heavy, idle):
            watcher.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    overhead = {name: (median[name] / median["plain"] - 1) / every for name in ("measured", "with entropy")}
    return {
        "case": case,
        "device": device,
        "every": every,
        "ms": {name: 1e3 * value for name, value in median.items()},
        "overhead": overhead,
        "idle": median["idle"] / median["plain"] - 1,
        "met": overhead["measured"] <= TARGET,
    }


def table(results: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The page that goes with the numbers."""
    every = results[0]["every"]
    lines = [
        "# What watching a training run costs",
        "",
        f"`{about['command']}`, torch {about['torch']}, {about['hardware']}.",
        "",
        "Median time of a training step (forward, backward, AdamW), in milliseconds, and what watching adds to it when",
        f"every {every}th step is measured. The steps take turns in one run. Target: at most {TARGET:.0%}.",
        "",
        "| model | step | measured step | with entropy | overhead | with entropy | at steps not measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        ms, cost = result["ms"], result["overhead"]
        lines.append(
            f"| {result['case']} | {ms['plain']:.1f} | {ms['measured']:.1f} | {ms['with entropy']:.1f} | "
            f"{cost['measured']:.2%} | {cost['with entropy']:.2%} | {result['idle']:+.1%} |"
        )
    lines += ["", "There are no hooks at steps that are not measured, so the last column is the noise of the machine."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for case in CASES:
        result = measure(case, given.repeats, given.every, device)
        results.append(result)
        ms, cost = result["ms"], result["overhead"]
        print(
            f"{case}: step {ms['plain']:.1f} ms, measured {ms['measured']:.1f} ms, with entropy "
            f"{ms['with entropy']:.1f} ms; every {given.every} steps {cost['measured']:.2%}, with entropy "
            f"{cost['with entropy']:.2%}; at steps not measured {result['idle']:+.1%} (noise included)"
        )
    if given.out:
        command = f"python benchmarks/watch_overhead.py --every {given.every} --repeats {given.repeats}"
        about = {"command": command, **environment()}
        given.out.mkdir(parents=True, exist_ok=True)
        numbers = json.dumps({**about, "results": results}, indent=2) + "\n"
        (given.out / "watch_overhead.json").write_text(numbers, encoding="utf-8")
        (given.out / "watch_overhead.md").write_text(table(results, about), encoding="utf-8")
    return 0 if all(result["met"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
