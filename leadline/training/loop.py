"""The training loop: ``train(recipe)``, from the first step or from the last checkpoint.

A step depends on its number alone: batch, learning rate and random numbers follow from it. So a run that was stopped
continues from its last checkpoint as if nothing had happened, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from leadline.anatomy.blocks import find_blocks
from leadline.anatomy.calling import call_model, uncompiled
from leadline.errors import LeadlineError, Stopped
from leadline.machine import versions
from leadline.probing.watch import Watcher
from leadline.training.distributed import Processes, Weights, check_same_data, ignored_precision, join, replicate, shard
from leadline.training.divergence import diagnose
from leadline.training.graph import GraphStep
from leadline.training.optimizer import LearningRate
from leadline.training.recipe import Recipe
from leadline.training.run_folder import state
from leadline.training.run_folder.checkpoint import folder_of
from leadline.training.run_folder.folder import (
    DIVERGENCE,
    PROBE,
    SUMMARY,
    Previous,
    hold,
    read_summary,
    take,
    write_summary,
)
from leadline.training.run_folder.logs import Listener, Logs, preparing
from leadline.training.step import Step
from leadline.training.stop import Diverged, StopPoll, StopRequest, failures_explained, last_checkpoint
from leadline.training.tasks import build_task
from leadline.training.tasks.base import Task

MakeTask = Callable[[Recipe, torch.device, int, int], Task]


def train(recipe: Recipe, *, console: Console | None = None, make_task: MakeTask = build_task) -> dict[str, Any]:
    """Run a recipe, or what is left of it.

    Args:
        recipe: What to train; ``recipe.out`` is the folder of the run.
        console: Where lines and the progress bar go; standard error by default.
        make_task: Builds the task from recipe, device, rank and number of processes.

    Returns:
        The content of ``summary.json``.

    Raises:
        Stopped: The run ended early: by a signal, by divergence (``Diverged``), or because the disk is full.
        LeadlineError: The recipe, the data or the folder cannot be used.
    """
    console = console or Listener(stderr=True)
    if (recipe.threads or 1) > (cores := os.cpu_count() or 1):
        raise LeadlineError(f"threads is {recipe.threads} and this machine has {cores} cores; give at most these")
    with _torch_settings(recipe):
        processes = join(recipe)
        with StopRequest() as request, failures_explained(recipe, processes):
            request.immediate = "before the training began; run the same command again"
            with preparing(console):
                run = Run(recipe, processes, console, make_task)
            return run.go(request)


@contextmanager
def _torch_settings(recipe: Recipe) -> Iterator[None]:
    """Set torch's threads and float32 precision as the recipe has them; restore them at the end."""
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    exact = recipe.precision == "float32"
    try:
        torch.set_num_threads(recipe.threads or threads)
        torch.set_float32_matmul_precision("highest" if exact else "high")
        torch.backends.cudnn.allow_tf32 = not exact
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


class Run:
    """One run of a recipe, on one of its processes.

    Args:
        recipe: What to train.
        processes: The processes of the run; the first one writes its folder.
        console: Where lines and the progress bar go.
        make_task: Builds the task from recipe, device, rank and number of processes.
    """

    def __init__(self, recipe: Recipe, processes: Processes, console: Console, make_task: MakeTask) -> None:
        if recipe.out is None:
            raise LeadlineError("out is missing; give a folder for this run, such as out=runs/first")
        self.recipe, self.processes, self.console = recipe, processes, console
        self.out = Path(recipe.out)
        self.task = make_task(recipe, processes.device, processes.rank, processes.world)
        check_same_data(processes, self.task.fingerprints)
        self.per_epoch = self.task.batches.steps_per_epoch
        if self.per_epoch < 1:
            raise LeadlineError(f"batch.size is {recipe.batch.size}; the data set has fewer samples, make it smaller")
        self.total = recipe.length.steps(self.per_epoch, 0)
        if self.total < 1:
            raise LeadlineError(f"length is {recipe.length.text}, less than one step; make it longer")
        rate = LearningRate(recipe.schedule, recipe.optimizer.lr, self.total, self.per_epoch)
        torch.manual_seed(recipe.seed)
        model = self.task.make_model().to(processes.device)
        self.step = prepare_step(recipe, self.task, model, processes, rate)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.every = _intervals(recipe, self.per_epoch, self.total)
        self.logs = Logs(self.out, self.total, console, main=processes.main, tensorboard=recipe.log.tensorboard)
        self.clock = Clock()
        self.best: dict[str, Any] | None = None  # step, score and split of the best evaluation
        self.latest: dict[str, float] | None = None  # figures of the last evaluation
        self.unread = 0  # steps since the figures of training were last read
        self.owed = False  # whether the evaluation of the last step failed
        self.saved = 0  # step of the newest checkpoint

    def go(self, request: StopRequest) -> dict[str, Any]:
        """Take up the last checkpoint, train the remaining steps, evaluate, and return the summary."""
        with ExitStack() as stack:
            with preparing(self.console):
                start = self._resume(stack)
            finished = self.processes.agree(read_summary(self.out)) if start == self.total else None
            if finished is not None and finished["steps"] == self.total:
                self.logs.say(f"{self.out} is finished: nothing to do")
                return finished
            if self.processes.main:
                (self.out / SUMMARY).unlink(missing_ok=True)  # of a shorter run
            stack.enter_context(self.logs.opened(start))
            self._announce(start)
            self.clock.start(start)
            request.immediate = None  # from here on the loop finishes its step and saves
            self._loop(start, StopPoll(request, self.processes, start))
            last = folder_of(self.out, self.total)
            request.immediate = f"after the last step; saved in {last}, run the same command again for its evaluation"
            return self._finish()

    def _loop(self, start: int, stop_requested: StopPoll) -> None:
        """Train the steps from ``start`` on; log, probe, evaluate and save where it is due."""
        self.step.model.train()
        if start == 0:
            self._probe(0)
        if self.owed:
            self._evaluate_and_save(start, evaluate=True, save=True)
        for number in range(start, self.total):
            self._train(number)
            done, last = number + 1, number + 1 == self.total
            due = {name: bool(every) and (done % every == 0 or last) for name, every in self.every.items()}
            stop = stop_requested(done, waiting=any(due.values()))
            if any(due.values()) or stop is not None:
                self._check()
            if due["log"]:
                self._log(done)
            if due["watch"]:
                self._probe(done)
            self._evaluate_and_save(done, due["evaluate"], due["checkpoint"] or stop is not None)
            if stop is not None and not last:
                raise Stopped(
                    f"{stop.name} after step {done} of {self.total}; saved in {folder_of(self.out, done)}, "
                    "run the same command again to go on",
                    128 + stop,
                )

    def _train(self, number: int) -> None:
        """Train step ``number``. If its data cannot be read, the steps before it are saved first."""
        try:
            self.step(number)
        except LeadlineError:
            if self.processes.world == 1 and number > self.saved:
                self._check()
                self._save(number, None)
            raise
        self.unread += 1

    def _check(self) -> None:
        """Raise if a step went wrong since the last check."""
        failed = self.step.failed()
        if failed is None:
            return
        probe = self.out / DIVERGENCE
        words, measured = diagnose(self.step, failed, probe)
        raise self._diverged(f"at step {failed}: {words}", f"figures of its layers: {probe}, " if measured else "")

    def _diverged(self, words: str, figures: str = "") -> Diverged:
        checkpoint = self.processes.agree(last_checkpoint(self.recipe))
        cause = f"diverged {words}"
        return Diverged(
            f"{cause}; {figures}the last checkpoint: {checkpoint}; try a lower optimizer.lr, a longer schedule.warmup "
            "or a regularise.clip, with another out=",
            cause,
        )

    def _log(self, done: int) -> None:
        """Write a row of training figures: means over the steps since the last row."""
        speed = self.clock.speed(done)
        figures = self.step.read(self.unread)
        self.unread = 0
        self.logs.training(
            {
                "step": done,
                "epoch": round(done / self.per_epoch, 4),
                **figures,
                "lr": self.step.rate(done - 1),
                "samples_per_second": round(speed * self.recipe.batch.size, 1),
                "seconds": round(self.clock.seconds(), 3),
            }
        )

    def _probe(self, done: int) -> None:
        """Write the figures of every layer on the probe inputs, in evaluation mode, if the recipe watches."""
        if not self.every["watch"]:
            return
        with self.clock.paused():
            model = self.step.model
            watcher = Watcher(model, every=1, to=self.out / PROBE, entropy=self.recipe.watch.entropy)
            model.eval()
            try:
                watcher.begin(done)
                with torch.no_grad(), uncompiled(), self.step.autocast():
                    call_model(model, self.task.probe_inputs())
                watcher.end()
            finally:
                watcher.close()
                model.train()

    def _evaluate_and_save(self, done: int, evaluate: bool, save: bool) -> None:
        """Evaluate and save where due; also save the best model. A failed evaluation is repeated on resuming."""
        score = None
        if evaluate:
            try:
                score = self._evaluate(done)
            except LeadlineError:
                self.owed = True
                if self.processes.world == 1:
                    self._save(done, None)
                raise
            self.owed = False
        better = score is not None and (self.best is None or score > self.best["score"])
        if better:
            self.best = {"step": done, "score": score, "split": self.task.watched}
        if save or (better and self.recipe.checkpoint.best):
            self._save(done, score)

    def _evaluate(self, done: int) -> float:
        """Evaluate on the watched split, log the figures, and return the score: more is better."""
        split = self.task.watched
        figures = self.latest = self._figures(split)
        if not math.isfinite(figures["loss"]):
            raise self._diverged(f"by step {done}: the loss on the {split} split is {figures['loss']}")
        self.logs.evaluation({"step": done, "epoch": round(done / self.per_epoch, 4), **figures}, split)
        name, way = self.task.best
        return figures[name] if way == "max" else -figures[name]

    def _figures(self, split: str) -> dict[str, float]:
        """Return the task's figures of a split, with the averaged weights if there are any."""
        model = self.step.model
        with self.clock.paused():
            model.eval()
            try:
                with torch.no_grad(), uncompiled(), self.step.averaged(), self.step.autocast():
                    return self.task.evaluate(model, split)
            finally:
                model.train()

    def _save(self, done: int, score: float | None) -> None:
        with self.clock.paused():
            facts = {
                "score": score,
                "best": self.best,
                "seconds": self.clock.seconds(),
                "since": self.unread,
                "owed": self.owed,
            }
            state.save(self.step, self.out, done, facts)
        self.saved = done

    def _resume(self, stack: ExitStack) -> int:
        """Take the folder and load its newest checkpoint; return how many steps are done.

        The first process does this for all. ``stack`` holds the folder until the run ends.
        """
        previous = Previous(None, None)
        failure: LeadlineError | None = None
        if self.processes.main:
            try:
                stack.enter_context(hold(self.out))
                previous = take(self.out, self.recipe, self.total, self.task.settle, self.logs.say)
            except LeadlineError as error:
                failure = error
        if (failure := self.processes.agree(failure)) is not None:
            raise failure
        if not self.processes.agree(previous.saved is not None):
            return 0
        facts = state.load(self.step, previous.saved)
        self.clock.earlier, self.best, self.unread = facts["seconds"], facts["best"], facts["since"]
        done = self.saved = facts["step"]
        self.owed = facts.get("owed", False) or (done == self.total and facts["score"] is None)
        if done < self.total:
            change = self._schedule_change(previous.recipe, done)
            self.logs.say(f"going on after step {done} of {self.total}, from {self.out}{change}")
        return done

    def _schedule_change(self, before: Recipe | None, done: int) -> str:
        """Describe how a new length of the run changes the learning rate of the next step; empty if it does not."""
        total = self.total if before is None else before.length.steps(self.per_epoch, 0)
        if total == self.total:
            return ""
        old = LearningRate(self.recipe.schedule, self.recipe.optimizer.lr, total, self.per_epoch)(done - 1)
        new = self.step.rate(done)
        if old == new:
            return ""
        return (
            f"; length was {total} steps, and the schedule is now that of {self.total}: the learning rate goes from "
            f"{old:.3g} to {new:.3g}"
        )

    def _announce(self, start: int) -> None:
        """Print the length of a new run, and what of the machine or the recipe has no effect."""
        if start == 0:
            epochs = f"{self.total / self.per_epoch:.4g}"
            self.logs.say(f"{self.total} steps, {epochs} epoch{'s' * (epochs != '1')} of {self.per_epoch}")
        if (line := ignored_precision(self.recipe)) is not None:
            self.logs.say(line)
        if self.recipe.graph and not self.processes.alone_on_a_gpu:
            given = f"{self.processes.world} process(es) on {self.processes.device.type}"
            self.logs.say(f"no CUDA graph, which is for one process on a GPU: this run has {given}")

    def _finish(self) -> dict[str, Any]:
        """Evaluate on the test split, write the summary and return it."""
        watched = self.task.watched
        figures = {watched: self.latest or self._figures(watched)}
        if watched != "test":
            figures["test"] = self._figures("test")
        seconds = self.clock.seconds()
        device = self.processes.device
        summary = {
            "model": self.recipe.model.name,
            **{
                f"{split}_{name}": value
                for split in ("test", "valid")
                for name, value in figures.get(split, {}).items()
            },
            "best": self.best,
            "checkpoint": folder_of(self.out, self.total).name,
            "steps": self.total,
            "epochs": self.total / self.per_epoch,
            "seconds": round(seconds, 3),
            "parameters": self.parameters,
            "data": self.task.describe(),
            "processes": self.processes.world,
            "distributed": self.processes.mode,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "versions": {**versions(), "cuda": torch.version.cuda},
            "recipe": self.recipe.model_dump(mode="json"),
        }
        if self.processes.main:
            write_summary(self.out, summary)
        return summary


class Clock:
    """Measures the seconds of a run, and the speed of training without evaluations, probes and checkpoints.

    Attributes:
        earlier: Seconds of earlier parts of the run.
    """

    def __init__(self) -> None:
        self.earlier = 0.0
        self.began = self.lap_began = time.monotonic()
        self.lap_start = 0  # steps done when the lap began

    def start(self, done: int) -> None:
        """Begin to measure, with ``done`` steps done."""
        self.began = self.lap_began = time.monotonic()
        self.lap_start = done

    def seconds(self) -> float:
        """Return the seconds of the whole run so far."""
        return self.earlier + time.monotonic() - self.began

    def speed(self, done: int) -> float:
        """Return the steps per second since the last call, and begin a new lap."""
        now = time.monotonic()
        speed = (done - self.lap_start) / max(now - self.lap_began, 1e-9)
        self.lap_began, self.lap_start = now, done
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside out of the speed."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.lap_began += time.monotonic() - began


def _intervals(recipe: Recipe, per_epoch: int, total: int) -> dict[str, int]:
    """Return the steps between two logs, probes, evaluations and checkpoints; 0 means never."""
    spans = {"watch": recipe.watch.every, "evaluate": recipe.evaluate, "checkpoint": recipe.checkpoint.every}
    steps = {name: max(span.steps(per_epoch, total), 1) if span.number else 0 for name, span in spans.items()}
    return {"log": recipe.log.every, **steps}


def prepare_step(recipe: Recipe, task: Task, model: nn.Module, processes: Processes, rate: LearningRate) -> Step:
    """Prepare a model for training in place, and make the step that trains it.

    In this order: activation checkpointing, sharding (FSDP), compilation, replication (DDP).

    Args:
        recipe: How to train.
        task: Batches and loss.
        model: The model, on its device.
        processes: The processes that train it together.
        rate: The learning rate by step.

    Raises:
        LeadlineError: The recipe asks for activation checkpointing and the model has none.
    """
    model.train()
    if recipe.checkpointing:
        stacks = [module for module in model.modules() if hasattr(module, "activation_checkpointing")]
        if not stacks:
            raise LeadlineError(f"checkpointing is true; {recipe.model.name} cannot recompute, set checkpointing=false")
        for stack in stacks:
            stack.activation_checkpointing = True  # type: ignore[assignment]
    unused = processes.mode == "ddp" and _has_unused(task, model, processes)
    if processes.mode == "fsdp":
        shard(model, processes)
    options = {"combo_kernels": True} if processes.device.type == "cuda" else {}  # small kernels side by side in one
    if recipe.compile == "blocks":
        for block in {block.module for block in find_blocks(model)}:
            block.compile(options=options)
    elif recipe.compile == "model":
        model.compile(options=options)
    called = replicate(model, processes, unused) if processes.mode == "ddp" else model
    kind = GraphStep if recipe.graph and processes.alone_on_a_gpu else Step
    return kind(recipe, task, model, called, Weights(model, processes), processes, rate)


def _has_unused(task: Task, model: nn.Module, processes: Processes) -> bool:
    """Return whether the loss leaves some weights out, such as those of scores that no later layer uses."""
    batch = task.batches(0, 0, rank=processes.rank, world=processes.world)
    loss, _, _ = task.loss(model, {name: part[:1] for name, part in batch.items()}, None)  # one sample is enough
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return any(gradient is None for gradient in gradients)
