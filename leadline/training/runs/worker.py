"""One run of many, in this process or a worker process: train, measure, write the record."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import statistics
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import leadline
from leadline.errors import LeadlineError, Stopped
from leadline.models.checkpoints import Saved, find_checkpoint
from leadline.probing import probe
from leadline.training.loop import train
from leadline.training.recipe import Recipe
from leadline.training.run_folder.folder import EVALUATION, PROBE, TRAINING
from leadline.training.runs.record import curve, similarities, write
from leadline.training.stop import Diverged, StopRequest
from leadline.training.tasks import build_task, task_of

_POLL = 1.0  # seconds


class Assignment(NamedTuple):
    """A job as a worker process gets it.

    Attributes:
        recipe: What to train, in a folder of its own.
        file: Where the record goes.
        probe: How many samples to probe the trained model on; 0 for no probe.
        device: Where to probe, unless the task's probes are cheap enough for the CPU.
    """

    recipe: Recipe
    file: Path
    probe: int
    device: torch.device


def train_and_record(assignment: Assignment) -> dict[str, Any]:
    """Train, measure, and write the record; a run that diverged has one too.

    Returns:
        The figures of the record.

    Raises:
        Stopped: A signal ended the run; it is saved.
        LeadlineError: The run could not go on, or the record cannot be written.
    """
    recipe = assignment.recipe
    work = Path(str(recipe.out))
    if recipe.compile != "none":  # a process that trains many models compiles the block of each
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    summary: dict[str, Any] = {}
    diverged = None
    try:
        summary = train(recipe, console=Console(file=io.StringIO()))
    except Diverged as stopped:
        diverged = stopped.cause
    except Stopped as stopped:
        if stopped.code > 128:  # by a signal
            raise
        raise LeadlineError(str(stopped)) from stopped
    training = curve(work / TRAINING)
    speeds = [row["samples_per_second"] for row in training]
    saved = None if diverged else _last(work)
    figures = {
        **{name: summary.get(name) for name in ("test_accuracy", "test_loss", "valid_accuracy", "valid_loss")},
        **{name: value for name, value in summary.items() if name.startswith(("test_", "valid_"))},
        "strengths": {} if saved is None else _strengths(saved),
        **{name: summary.get(name) for name in ("steps", "epochs", "seconds", "parameters", "device")},
        "diverged": diverged,
        "steps_per_second": statistics.median(speeds) / recipe.batch.size if speeds else None,
        "training": training,
        "evaluation": curve(work / EVALUATION),
        "watched": similarities(work / PROBE),
        "report": None if saved is None or not assignment.probe else _report(saved, assignment),
        "recipe": {**recipe.model_dump(mode="json"), "out": None},
    }
    write(assignment.file, figures)
    shutil.rmtree(work, ignore_errors=True)
    return figures


def _last(work: Path) -> Saved:
    saved = find_checkpoint(work, "last")
    assert saved is not None
    return saved


def _report(saved: Saved, assignment: Assignment) -> str:
    """Probe the trained model; return the report as one line of JSON."""
    on_cpu = task_of(type(assignment.recipe.data)).probed_on_cpu
    device = torch.device("cpu") if on_cpu else assignment.device
    model = leadline.load(saved.folder).to(device)
    report = probe(model, build_task(assignment.recipe, device).samples(assignment.probe), trials=False)
    return json.dumps(json.loads(report.to_json()))


def _strengths(saved: Saved) -> dict[str, list[float]]:
    """Return the learned strengths of the trained model by name, clamped as the model clamps them."""
    tensors = {name: tensor for name, tensor in saved.tensors("model").items() if name.endswith(".parameter")}
    return {name: tensor.float().clamp(0, 1).flatten().tolist() for name, tensor in tensors.items()}


def prepare(threads: int, parent: int, ended: Event) -> None:
    """Prepare a worker process. It ends when ``ended`` is set, or when its parent process has ended.

    Args:
        threads: How many threads torch may use.
        parent: The process ID of the parent.
        ended: Set when the parent has no more work.
    """
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run handles it all the same, and saves
    threading.Thread(target=_follow, args=(parent, ended), daemon=True).start()


def _follow(parent: int, ended: Event) -> None:
    """Ask a run once to save and stop, unless it has a signal already; without a parent, end the process after it."""
    asked = None
    while True:
        orphaned = os.getppid() != parent
        if orphaned or ended.is_set():
            run = StopRequest.current
            if run is not None and run is not asked and run.signal is None:
                asked = run
                os.kill(os.getpid(), signal.SIGTERM)
            if run is None and orphaned:
                os._exit(128 + signal.SIGTERM)
        time.sleep(_POLL)
