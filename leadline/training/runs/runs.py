"""Training runs that entries ask for: several at a time, each kept as soon as it ends, none made twice.

What is kept of a run is one small file: its figures, its curves and what the probe says of the trained model. The
weights are thrown away. Entries that ask for the same recipe share the run.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import leadline
from leadline.errors import LeadlineError, Stopped
from leadline.files import whole
from leadline.models.checkpoints import find_checkpoint
from leadline.papers.shared.entry import Context
from leadline.probing import DepthReport, probe
from leadline.report.layers import LayerData
from leadline.training.engine import train
from leadline.training.recipe.recipe import Recipe, parse_recipe
from leadline.training.run_folder.logs import EVALUATION, PROBE, TRAINING
from leadline.training.stop import StopRequest
from leadline.training.tasks import build_task
from leadline.training.tasks.language import LanguageTask, TextData
from leadline.training.tasks.vision import VisionTask

RUNS, WORK = "runs", "work"  # folders below ``Context.out``
_POINTS = 150  # of a curve, at most


@dataclass(frozen=True)
class Job:
    """A run that an entry wants: the sections of a recipe, and how many test images to probe the trained model on."""

    name: str
    recipe: Mapping[str, Any]
    probe: int = 0  # 0: no probe
    cost: float = 1.0  # how long it takes against the others; the longest begin first


@dataclass
class Record:
    """What is kept of a run."""

    name: str
    figures: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def diverged(self) -> bool:
        return self.figures["diverged"] is not None

    @property
    def layers(self) -> list[LayerData]:
        """What the probe measured, by layer; empty where it was not asked for."""
        text = self.figures["report"]
        return [] if text is None else DepthReport.from_json(text).layers

    @property
    def watched(self) -> list[dict[str, float]]:
        """Token similarity by step and layer during training; empty where it was not asked for."""
        return self.figures.get("watched") or []

    def told(self) -> str:
        """In a few words, for people who wait."""
        if self.diverged:
            return str(self.figures["diverged"])
        figures = [f"{name} {value:.4g}" for name, value in self.figures.items() if name.startswith("test_") and value]
        return f"{', '.join(figures)}, {self.figures['seconds']:.0f} s"

    def curve(self, which: str, figure: str) -> tuple[list[float], list[float]]:
        """Epochs and values of a figure of ``which``: "training" or "evaluation"."""
        rows = self.figures[which]
        return [row["epoch"] for row in rows], [row[figure] for row in rows]


def run_all(context: Context, jobs: Sequence[Job]) -> dict[str, Record]:
    """The records of all jobs by name: those that are there, and the rest trained, ``context.jobs`` at a time."""
    folder = context.out / RUNS
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeadlineError(
            f"{folder} cannot be made ({error.strerror}); give a folder to write to by --out"
        ) from error
    found = {job.name: record for job in jobs if (record := _read(folder, context, job)) is not None}
    left = sorted((job for job in jobs if job.name not in found), key=lambda job: -job.cost)
    total = len(jobs)
    context.progress(len(found), total)
    if not left:
        return found
    context.say(f"{len(left)} of {total} {'run' if total == 1 else 'runs'} to train")

    def keep(job: Job, figures: dict[str, Any]) -> None:
        record = found[job.name] = Record(job.name, figures)
        context.say(f"{len(found)}/{total}  {job.name}: {record.told()}")
        context.progress(len(found), total)

    if context.jobs == 1:
        for job in left:
            _check_time(context, len(found), total)
            with torch.enable_grad():
                keep(job, _train(*_task(context, job)))
        return found
    build_task(_recipe(context, left[0]), torch.device("cpu")).describe()  # images and text are read once, for all
    threads = max(1, torch.get_num_threads() // context.jobs)
    spawn = multiprocessing.get_context("spawn")
    ended = spawn.Event()
    with ProcessPoolExecutor(context.jobs, spawn, _prepare, (threads, os.getpid(), ended)) as pool:
        waiting = list(left)
        running: dict[Future[dict[str, Any]], Job] = {}
        try:
            while waiting or running:
                while waiting and len(running) < context.jobs and not _late(context):
                    job = waiting.pop(0)
                    running[pool.submit(_train, *_task(context, job))] = job
                if not running:
                    _check_time(context, len(found), total)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    keep(running.pop(future), future.result())
        except BrokenProcessPool as error:
            raise LeadlineError(
                f"a training process ended by itself, perhaps for want of memory; what is finished is kept in "
                f"{folder}, --jobs is {context.jobs}, give fewer"
            ) from error
        except BaseException:
            if running:
                context.say("saving what is being trained")
            raise
        finally:
            ended.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return found


def _prepare(threads: int, parent: int, ended: Event) -> None:
    """Of a training process: it ends when the one that gives it work says so, or has ended, by whatever."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run hears it all the same, and saves
    threading.Thread(target=_follow, args=(parent, ended), daemon=True).start()


def _follow(parent: int, ended: Event) -> None:
    """Ask a run once to save and stop, unless a signal to all has; without a parent the process ends after it."""
    asked = None
    while True:
        alone = os.getppid() != parent
        if alone or ended.is_set():
            run = StopRequest.current
            if run is not None and run is not asked and run.signal is None:
                asked = run
                os.kill(os.getpid(), signal.SIGTERM)
            if run is None and alone:
                os._exit(128 + signal.SIGTERM)
        time.sleep(1)


def _late(context: Context) -> bool:
    return context.until is not None and time.monotonic() > context.until


def _check_time(context: Context, done: int, total: int) -> None:
    if _late(context):
        raise LeadlineError(
            f"the time is up: {done} of {total} runs are finished and kept in {context.out / RUNS}; "
            "run the same command again to go on"
        )


def _recipe(context: Context, job: Job, out: Path | None = None) -> Recipe:
    """The recipe of a job: on the images and the device of the context."""
    tree = {name: dict(part) if isinstance(part, Mapping) else part for name, part in job.recipe.items()}
    data = tree["data"]
    if data["name"] == "text":
        data["path"] = str(context.text)
    elif context.embedded:
        # RandAugment needs colour, and a mirrored digit is none
        tree["augment"] = {**tree.get("augment", {}), "rand_augment": None, "flip": False}
        tree["data"] = {"name": "digits", **({"valid": data["valid"]} if "valid" in data else {})}
        model = tree["model"]
        model["patch_size"] = max(1, model.get("patch_size", 16) * 8 // data.get("image_size", 32))
    elif context.data is not None:
        data["path"] = str(context.data)
    cuda = context.device.type == "cuda"
    if not cuda:
        tree.update(graph=False, compile="none", precision="float32")
    return parse_recipe({**tree, "device": "cuda" if cuda else "cpu", "out": None if out is None else str(out)})


def _stem(context: Context, job: Job) -> str:
    """The name of a run's file: it depends on everything that decides the figures."""
    plain = _recipe(context, job).model_dump(mode="json")
    for free in ("path", "cache", "workers"):
        plain["data"].pop(free, None)
    plain["data"]["id"] = context.data_id
    text = json.dumps({"recipe": plain, "probe": job.probe}, sort_keys=True)
    return f"{job.name.replace(' ', '_').replace(chr(39), 'p')}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _read(folder: Path, context: Context, job: Job) -> Record | None:
    try:
        return Record(job.name, json.loads((folder / f"{_stem(context, job)}.json").read_text()))
    except (OSError, ValueError):
        return None


def _task(context: Context, job: Job) -> tuple[Recipe, Path, int, str]:
    """What a worker process needs: the recipe, the file to write, how many images to probe, the device."""
    stem = _stem(context, job)
    recipe = _recipe(context, job, context.out / WORK / stem)
    return recipe, context.out / RUNS / f"{stem}.json", job.probe, str(context.device)


def _train(recipe: Recipe, file: Path, probed: int, device: str) -> dict[str, Any]:
    """Train, measure, keep the record; a run that diverged is a record too."""
    work = Path(str(recipe.out))
    if recipe.compile != "none":  # a process that trains many models compiles the block of each
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    diverged = None
    try:
        summary = train(recipe, console=Console(file=io.StringIO()))
    except Stopped as stopped:
        if stopped.code > 128:  # by a signal
            raise
        if not str(stopped).startswith("diverged"):
            raise LeadlineError(str(stopped)) from stopped
        diverged, summary = str(stopped).partition(";")[0], {}
    # images are few and small: on the CPU, so that another run may have the GPU meanwhile
    where = torch.device(device if isinstance(recipe.data, TextData) else "cpu")
    training = _curve(work / TRAINING)
    speeds = [row["samples_per_second"] for row in training]
    record = {
        **{name: summary.get(name) for name in ("test_accuracy", "test_loss", "valid_accuracy", "valid_loss")},
        **{name: value for name, value in summary.items() if name.startswith(("test_", "valid_"))},
        "strengths": {} if diverged else _strengths(work),
        **{name: summary.get(name) for name in ("steps", "epochs", "seconds", "parameters", "device")},
        "diverged": diverged,
        "steps_per_second": statistics.median(speeds) / recipe.batch.size if speeds else None,
        "training": training,
        "evaluation": _curve(work / EVALUATION),
        "watched": _watched(work / PROBE),
        "report": None if diverged or not probed else _probe(recipe, work, probed, where),
        "recipe": {**recipe.model_dump(mode="json"), "out": None},
    }
    try:
        with whole(file) as new:
            new.write_text(json.dumps(record) + "\n")
    except OSError as error:
        raise LeadlineError(f"{file} cannot be written ({error.strerror}); make room and run it again") from error
    shutil.rmtree(work, ignore_errors=True)
    return record


def _probe(recipe: Recipe, work: Path, count: int, device: torch.device) -> str:
    saved = find_checkpoint(work, "last")
    assert saved is not None
    model = leadline.load(saved.folder).to(device)
    report = probe(model, _inputs(recipe, device, count), trials=False)
    return json.dumps(json.loads(report.to_json()))  # without its line breaks


def _inputs(recipe: Recipe, device: torch.device, count: int) -> Tensor:
    """The first test images, or stretches of the validation text."""
    if isinstance(recipe.data, TextData):
        return LanguageTask(recipe, device).windows(count)
    return VisionTask(recipe, device).images(count)


def _strengths(work: Path) -> dict[str, list[float]]:
    """The learned strengths of the trained model, by their names, cut as the model cuts them."""
    saved = find_checkpoint(work, "last")
    assert saved is not None
    found = {name: tensor for name, tensor in saved.tensors("model").items() if name.endswith(".parameter")}
    return {name: tensor.float().clamp(0, 1).flatten().tolist() for name, tensor in found.items()}


def _watched(file: Path) -> list[dict[str, float]]:
    """Token similarity by step and layer, where the recipe watches."""
    if not file.is_file():
        return []
    with file.open(newline="") as stream:
        return [
            {"step": int(row["step"]), "layer": int(row["layer"]), "similarity": float(row["similarity"])}
            for row in csv.DictReader(stream)
        ]


def _curve(file: Path) -> list[dict[str, float]]:
    """The rows of a log, thinned to what a picture can show; the last one stays, numbers that are not finite go."""
    if not file.is_file():
        return []
    with file.open(newline="") as stream:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]
    step = math.ceil(len(rows) / _POINTS) if rows else 1
    kept = rows[(len(rows) - 1) % step :: step] if rows else []
    return [{name: value for name, value in row.items() if math.isfinite(value)} for row in kept]
