"""Kill a training run at random moments, resume it after each, and compare its end with that of an undisturbed run.

    python benchmarks/kills.py --kills 50 [--json FILE.json]

A tiny model on the embedded digits, with dropout, drop path, clipping, averaged weights, and a checkpoint every second
step, so that many kills hit one that is being written. Each try is a process of its own, ended by SIGKILL. The final
weights, averaged weights and optimizer state must be equal bit for bit, and so must the lines of the logs, but for
their clock.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

# all that a run needs is imported before the processes fork, so that each starts at once
import sklearn.datasets
import torch
import torch._dynamo
from rich.console import Console
from safetensors.torch import load_file

from leadline.machine import processor, versions
from leadline.models.checkpoints import check, find_checkpoint, listed
from leadline.training import load_recipe, train

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smoke_digits.yaml"
CLOCK = {"seconds", "samples_per_second"}


def recipe_for(out: Path, steps: int):
    settings = [
        f"length={steps} steps", "schedule.warmup=10 steps", "checkpoint.every=2 steps", "evaluate=10 steps",
        "watch.every=20 steps", "log.every=7", "batch.size=16", "model.depth=2", "model.dim=32", "model.dropout=.1",
        "regularise.drop_path=.1", "regularise.ema=.98", f"out={out}", "device=cpu",
    ]  # fmt: skip
    return load_recipe(RECIPE, settings)


def start(out: Path, steps: int) -> int:
    """A process that trains; returns its id."""
    process = os.fork()
    if process:
        return process
    try:
        train(recipe_for(out, steps), console=Console(file=(out.parent / f"{out.name}.txt").open("a")))
    except BaseException as error:
        print(f"a run failed: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def wait(process: int, seconds: float | None = None) -> int | None:
    """Its exit code, once it ends; None if it runs on after ``seconds``."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, 0 if deadline is None else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return [{key: value for key, value in row.items() if key not in CLOCK} for row in csv.DictReader(stream)]


def differences(calm: Path, disturbed: Path) -> list[str]:
    """What the two runs do not have in common."""
    found = []
    last = [find_checkpoint(out, "last") for out in (calm, disturbed)]
    assert last[0] is not None
    assert last[1] is not None
    for name in ("model", "ema/model", "optimizer"):
        one, other = (load_file(saved.folder / f"{name}.safetensors") for saved in last)
        if one.keys() != other.keys() or any(not torch.equal(one[key], other[key]) for key in one):
            found.append(f"{last[0].folder.name}/{name}.safetensors")
    found += [n for n in ("log.csv", "evaluation.csv", "probe.csv") if rows(calm / n) != rows(disturbed / n)]
    return found


def run(kills: int, steps: int, seed: int, folder: Path) -> dict:
    draw = random.Random(seed)
    began = time.monotonic()
    if wait(start(folder / "calm", steps)):
        raise SystemExit("the undisturbed run failed")
    whole = time.monotonic() - began
    killed = fresh = torn = 0
    found, ended = [], 0
    while killed < kills:  # a run that comes to its end before the last kill is compared, and another one begun
        out = folder / f"disturbed-{ended}"
        while killed < kills:
            process = start(out, steps)
            code = wait(process, draw.uniform(0, 0.3 + whole / kills))
            if code is not None:
                break
            os.kill(process, signal.SIGKILL)
            wait(process)
            killed += 1
            fresh += not listed(out)
            torn += any(out.glob(".new-*"))
            for _, saved in listed(out):
                check(saved)  # whatever has a checkpoint's name is whole
        else:
            code = wait(start(out, steps))
        found += differences(folder / "calm", out) if code == 0 else [f"a resume ended with exit code {code}"]
        ended += 1
    return {
        "kills": killed,
        "of_them_before_the_first_checkpoint": fresh,
        "of_them_while_writing_one": torn,
        "runs": ended,
        "differences": found,
        "seconds_undisturbed": round(whole, 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    sklearn.datasets.load_digits()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.kills, options.steps, options.seed, Path(folder))
    command = f"python benchmarks/kills.py --kills {options.kills} --steps {options.steps} --seed {options.seed}"
    text = json.dumps({"hardware": processor(), "versions": versions(), "command": command, **result}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    if result["differences"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
