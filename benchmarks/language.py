"""Tokens per second of the GPT-2 Small recipe against a plain step of the same size, in one run on a GPU.

    python benchmarks/language.py [--batch 12] [--steps 30] [--rounds 5] [--out FILE.json]
    python benchmarks/language.py --deep [--out FILE.json]
    python benchmarks/language.py --strengths [--out FILE.json]

Three things are timed in turn, round by round, so that a clock that drifts meets all of them:

    plain     a compact GPT written here as nanoGPT does it: the loss inside one compiled model, fused AdamW
    standard  the training engine on recipes/kerneldoc_gpt2_small.yaml, standard attention
    carried   the same with carried scores, alpha' = .5

With --deep it is recipes/kerneldoc_deep.yaml (48 layers, 16 x 512 tokens) and each arm of `leadline reproduce
ours-text-depth`, against pre-norm; with --strengths the GPT-2 Small recipe and each arm of `leadline reproduce
hop-table2`, against standard attention. All in bf16 and compiled, gradients clipped, vocabulary 50,304, batches cut
from tokens that are in memory. A ratio is meaningful within one run only.
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
from torch import Tensor, nn

from leadline.machine import processor, versions
from leadline.papers.hop.table2 import ARMS as STRENGTHS
from leadline.papers.ours.text_depth import ARMS as NORMS
from leadline.training import load_recipe
from leadline.training.distributed import join
from leadline.training.loop import prepare_step
from leadline.training.optimizer import LearningRate
from leadline.training.tasks import build_task

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SMALL = {"batch": 12, "tokens": 1024, "depth": 12, "dim": 768, "heads": 12, "compile": "model"}
DEEP = {"batch": 16, "tokens": 512, "depth": 48, "dim": 256, "heads": 4, "compile": "blocks"}
VOCABULARY = 50304


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, d = x.shape
        q, k, v = (
            part.view(B, N, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(d, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, N, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Tokens and targets in, the mean loss out."""

    def __init__(self, depth: int, dim: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(tokens, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def plain_step(options: argparse.Namespace, device: torch.device) -> Callable[[int], None]:
    model = PlainGPT(options.depth, options.dim, options.heads, options.tokens).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=6e-4,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    called = torch.compile(model)
    text = torch.randint(256, (1 << 21,))

    def step(number: int) -> None:
        starts = torch.randint(len(text) - options.tokens - 1, (options.batch,))
        rows = torch.stack([text[start : start + options.tokens + 1] for start in starts.tolist()])
        rows = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = called(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def recipe_step(options: argparse.Namespace, folder: Path, **model: Any) -> Callable[[int], None]:
    """The engine's own step, batches included, as ``leadline train`` runs it."""
    changes = {
        "data.path": folder / "text",
        "data.cache": folder / "cache",
        "data.tokenizer": "byte",
        "data.vocab_size": "null",
        "data.tokens": options.tokens,
        "batch.size": options.batch,
        "device": options.device,
        "compile": options.compile,
        "graph": options.deep and options.device == "cuda",
        **{f"model.{name}": value for name, value in {"vocab_size": VOCABULARY, **sizes(options), **model}.items()},
    }
    name = "kerneldoc_deep" if options.deep else "kerneldoc_gpt2_small"
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"{key}={value}" for key, value in changes.items()])
    recipe = recipe.model_copy(update={"out": None})
    torch.set_float32_matmul_precision("high")
    processes = join(recipe)
    task = build_task(recipe, processes.device)
    rate = LearningRate(recipe.schedule, recipe.optimizer.lr, 2000, task.batches.steps_per_epoch)
    return prepare_step(recipe, task, task.make_model().to(processes.device), processes, rate)


def sizes(options: argparse.Namespace) -> dict[str, int]:
    return {"depth": options.depth, "dim": options.dim, "heads": options.heads}


def measure(steps: dict[str, Callable[[int], None]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds a step, by round."""
    wait = torch.cuda.synchronize if options.device == "cuda" else (lambda: None)
    number = dict.fromkeys(steps, 0)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):  # the first one compiles and warms up
        for name, step in steps.items():
            wait()
            began = time.perf_counter()
            for _ in range(options.steps):
                step(number[name])
                number[name] += 1
            wait()
            if turn:
                found[name].append(1000 * (time.perf_counter() - began) / options.steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--deep", action="store_true", help="the arms of ours-text-depth instead")
    instead.add_argument("--strengths", action="store_true", help="the arms of hop-table2 instead")
    for name in ("batch", "tokens", "depth", "dim", "heads"):
        parser.add_argument(f"--{name}", type=int, help=f"{SMALL[name]}, with --deep {DEEP[name]}")
    parser.add_argument("--compile", choices=("none", "blocks", "model"), help="model, with --deep blocks")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name, value in (DEEP if options.deep else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 128  # arms share their code; beyond the limit one would run uncompiled
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text").mkdir()
        line = "by the mark, and deep\n"
        need = (options.batch + 2) * options.tokens * 8
        for split in ("train", "valid", "test"):
            (folder / "text" / f"{split}.txt").write_text(line * (need // len(line) + 1))
        if options.deep or options.strengths:
            arms = NORMS if options.deep else STRENGTHS
            steps = {arm: recipe_step(options, folder, **model) for arm, model in arms.items()}
        else:
            steps = {
                "plain": plain_step(options, torch.device(options.device)),
                "standard": recipe_step(options, folder),
                "carried": recipe_step(options, folder, attention="hopfield", alpha=0, alpha_prime=0.5),
            }
        found = measure(steps, options)
    tokens = options.batch * options.tokens
    middle = {name: statistics.median(times) for name, times in found.items()}
    against = ("plain", "standard") if "plain" in found else (next(iter(found)),)  # of arms the first
    rows = [
        {
            "method": name,
            "ms_per_step": round(middle[name], 3),
            "tokens_per_second": round(1000 * tokens / middle[name]),
            **{f"time_against_{other}": round(middle[name] / middle[other], 4) for other in against},
            "rounds_ms": [round(value, 3) for value in found[name]],
        }
        for name in found
    ]
    result = {
        "hardware": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "versions": {**versions(), "cuda": torch.version.cuda},
        "command": " ".join(["python", "benchmarks/language.py", *sys.argv[1:]]),
        "rows": rows,
    }
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "rounds_ms"))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
