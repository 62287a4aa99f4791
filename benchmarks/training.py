"""Training steps per second on a GPU: the depth-80 ViT, ViT-B at 224 beside timm's own, or any recipe.

    python benchmarks/training.py                                  both, on images made up on the GPU
    python benchmarks/training.py --recipe recipes/NAME.yaml data.path=DIR      a recipe with its data and augmentation

A recipe is timed with its own batches, with four of them that stay on the GPU, and its batches are timed alone. The
share of the first in the second is what augmentation costs, on the GPU or by waiting; where batches alone are much
faster than steps, the GPU does not wait for images.
ViT-B: our step and a plain step on timm's model (autocast, cross-entropy, fused AdamW) take turns in one process, so
that a machine that slows down slows both: once uncompiled, once compiled. Medians of the repeats.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline import create_model
from leadline.machine import versions
from leadline.papers.tse.fig6 import ARMS, ENTRY, recipe
from leadline.training import load_recipe, parse_recipe
from leadline.training.distributed import join
from leadline.training.loop import prepare_step
from leadline.training.optimizer import LearningRate
from leadline.training.recipe import Recipe
from leadline.training.tasks import build_task

DEPTH_80 = ENTRY.with_budget("short").setting  # of TSE figure 6
TARGETS = {"depth_80_steps_per_second": 60.0, "vit_b_share_of_timm": 0.9}


class Held:
    """Batches that lie on the GPU already: four, in turn."""

    def __init__(self, ready: list[dict[str, Tensor]], steps_per_epoch: int = 1000) -> None:
        self.ready, self.steps_per_epoch = ready, steps_per_epoch

    def __call__(self, step: int, micro: int = 0, *, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        return self.ready[step % 4]


def made_up(size: int, batch: int, classes: int, device: torch.device) -> Held:
    images = [torch.randn(batch, 3, size, size, device=device) for _ in range(4)]
    labels = [torch.randint(classes, (batch,), device=device) for _ in range(4)]
    return Held([{"pixels": x, "labels": y} for x, y in zip(images, labels, strict=True)])


class MadeUpTask:
    best = ("accuracy", "max")

    def __init__(self, recipe: Recipe, device: torch.device, size: int, classes: int) -> None:
        self.recipe = recipe
        self.options = {"image_size": size, "num_classes": classes, **recipe.model_options()}
        self.batches = made_up(size, recipe.batch.size, classes, device)

    def make_model(self) -> nn.Module:
        return create_model(self.recipe.model.name, **self.options)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], carry: Any) -> tuple[Tensor, dict[str, Tensor], None]:
        return F.cross_entropy(model(batch["pixels"]).float(), batch["labels"]), {}, None


def our_step(tree: dict[str, Any], size: int, classes: int) -> Callable[[int], None]:
    parsed = parse_recipe({"data": {"name": "cifar10"}, "length": 1000, "out": "unused", **tree})
    processes = join(parsed)
    return step_of(parsed, MadeUpTask(parsed, processes.device, size, classes), processes)


def step_of(recipe: Recipe, task: Any, processes: Any) -> Callable[[int], None]:
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(recipe.seed)
    per_epoch = task.batches.steps_per_epoch
    rate = LearningRate(recipe.schedule, recipe.optimizer.lr, recipe.length.steps(per_epoch, 0), per_epoch)
    return prepare_step(recipe, task, task.make_model().to(processes.device), processes, rate)


def timm_step(batch: int, size: int, classes: int, compiled: bool) -> Callable[[int], None]:
    import timm

    device = torch.device("cuda")
    model = timm.create_model("vit_base_patch16_224", num_classes=classes).to(device).train()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    batches = made_up(size, batch, classes, device)

    def step(number: int) -> None:
        given = batches(number)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(called(given["pixels"]), given["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def speed(steps: dict[str, Callable[[int], Any]], count: int, repeats: int) -> dict[str, float]:
    """Steps per second of each, in turns."""
    at = 0
    for name, step in steps.items():
        began = time.perf_counter()
        for number in range(12):  # compiled, warmed up and captured by then
            step(number)
        torch.cuda.synchronize()
        print(f"{name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(at, at + count):
                step(12 + number)
            torch.cuda.synchronize()
            times[name].append(count / (time.perf_counter() - began))
        at += count
    medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
    print(json.dumps(medians), flush=True)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value, with --recipe")
    parser.add_argument("--batch", type=int, default=128, help="of ViT-B")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    result: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "versions": versions("timm"),
        "command": shlex.join(["python", "benchmarks/training.py", *sys.argv[1:]]),
    }
    if options.recipe is not None:
        given = load_recipe(options.recipe, options.settings).model_copy(update={"out": None})
        if given.batch.accumulate > 1:
            raise SystemExit(f"batch.accumulate is {given.batch.accumulate}; batches are timed whole, give 1")
        processes = join(given)
        own, held, alone = (build_task(given, processes.device) for _ in range(3))
        held.batches = Held([own.batches(step) for step in range(4)], own.batches.steps_per_epoch)
        steps = {
            "own batches": step_of(given, own, processes),
            "held batches": step_of(given, held, processes),
            "batches alone": alone.batches,
        }
        found = result["steps_per_second"] = speed(steps, options.steps, options.repeats)
        result["share"] = round(found["own batches"] / found["held batches"], 3)
    else:
        steps = {f"depth 80, {arm}": our_step({**recipe(DEPTH_80, arm, 0), "device": "cuda"}, 32, 10) for arm in ARMS}
        result["steps_per_second"] = speed(steps, options.steps, options.repeats)
        del steps
        torch.cuda.empty_cache()
        base = {"model": {"name": "vit_base"}, "batch": {"size": options.batch}, "precision": "bf16", "device": "cuda"}
        steps = {
            "ViT-B, ours": our_step(base, 224, 1000),
            "ViT-B, timm": timm_step(options.batch, 224, 1000, compiled=False),
            "ViT-B, ours, compiled": our_step({**base, "compile": "model"}, 224, 1000),
            "ViT-B, timm, compiled": timm_step(options.batch, 224, 1000, compiled=True),
            "ViT-B, ours, graph": our_step({**base, "compile": "model", "graph": True}, 224, 1000),
        }
        result["steps_per_second"] |= speed(steps, max(options.steps // 5, 1), options.repeats)
        found = result["steps_per_second"]
        result["depth_80_steps_per_second"] = min(found[f"depth 80, {arm}"] for arm in ARMS)
        result["vit_b_share_of_timm"] = min(
            round(found["ViT-B, ours"] / found["ViT-B, timm"], 3),
            round(found["ViT-B, ours, compiled"] / found["ViT-B, timm, compiled"], 3),
        )
        result["met"] = {name: result[name] >= target for name, target in TARGETS.items()}
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    if not all(result.get("met", {}).values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
