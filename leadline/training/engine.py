"""The training loop: ``train(recipe)``.

A step is a function of its number: batch, learning rate and random numbers follow from it. So a run goes on from its
last checkpoint as if nothing had happened, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from leadline.anatomy.blocks import find_blocks
from leadline.anatomy.calling import call_model, uncompiled
from leadline.errors import LeadlineError, Stopped
from leadline.machine import versions
from leadline.models.checkpoints import find_checkpoint, listed, newest
from leadline.probing.watch import Watcher
from leadline.training.distributed import Processes, Weights, check_same_data, ignored_precision, join, replicate, shard
from leadline.training.divergence import diagnose
from leadline.training.graph import GraphStep
from leadline.training.recipe.recipe import Recipe
from leadline.training.recipe.section import Span
from leadline.training.run_folder import checkpoint, state
from leadline.training.run_folder.folder import FULL, SUMMARY, alone, claim, owner, read_summary, write_summary
from leadline.training.run_folder.logs import PROBE, Listener, Logs, preparing
from leadline.training.schedule import LearningRate
from leadline.training.step import Step
from leadline.training.stop import StopRequest
from leadline.training.tasks import build_task
from leadline.training.tasks.base import Task

PATIENCE = 2.0  # seconds until a signal is heard by several processes
MakeTask = Callable[[Recipe, torch.device, int, int], Task]


def train(recipe: Recipe, *, console: Console | None = None, make_task: MakeTask = build_task) -> dict[str, Any]:
    """Run a recipe, or what is left of it; returns what ``summary.json`` holds.

    Raises ``Stopped`` when the run ends before its time: asked to, diverged, or the disk is full.
    """
    console = console or Listener(stderr=True)
    if (recipe.threads or 1) > (cores := os.cpu_count() or 1):
        raise LeadlineError(f"threads is {recipe.threads} and this machine has {cores} cores; give at most these")
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_num_threads(recipe.threads or threads)
    try:
        processes = join(recipe)
        with StopRequest() as request, _explained(recipe, processes):
            request.saved = "before the training began; run the same command again"
            with preparing(console):
                run = Run(recipe, processes, console, make_task)
            return run.go(request)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def _explained(recipe: Recipe, processes: Processes) -> Iterator[None]:
    """What ends a run from outside, as one line."""
    try:
        yield
    except OSError as error:  # most likely a log that finds no room; checkpoints say so themselves
        advice = "make room" if error.errno in FULL else "mend that"
        raise Stopped(
            f"the run cannot go on: {error.strerror or error} ({error.filename or recipe.out}); the last checkpoint: "
            f"{_last_checkpoint(recipe)}; {advice} and run the same command again"
        ) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # a GPU's, the CPU's
            raise Stopped(
                f"{processes.device} has not enough memory for this run; the last checkpoint: "
                f"{_last_checkpoint(recipe)}; run again with checkpointing=true, or with another out= and a larger "
                "batch.accumulate or a smaller batch.size or model"
            ) from error
        if processes.world == 1 or " by peer" not in str(error):  # closed, or reset
            raise
        raise Stopped(
            f"another process of this run ended; the last checkpoint: {_last_checkpoint(recipe)}; when what it says is "
            "mended, run the same command again"
        ) from error


def _last_checkpoint(recipe: Recipe) -> str:
    found = find_checkpoint(str(recipe.out), "last")
    return str(found.folder) if found else "none yet"


class Run:
    def __init__(self, recipe: Recipe, processes: Processes, console: Console, make_task: MakeTask) -> None:
        if recipe.out is None:
            raise LeadlineError("out is missing; give a folder for this run, such as out=runs/first")
        self.recipe, self.processes, self.console = recipe, processes, console
        self.out = Path(recipe.out)
        torch.set_float32_matmul_precision("highest" if recipe.precision == "float32" else "high")
        torch.backends.cudnn.allow_tf32 = recipe.precision != "float32"
        self.task = make_task(recipe, processes.device, processes.rank, processes.world)
        check_same_data(processes, self.task.fingerprints)
        per_epoch = self.per_epoch = self.task.batches.steps_per_epoch
        if per_epoch < 1:
            raise LeadlineError(f"batch.size is {recipe.batch.size}; the data set has fewer samples, make it smaller")
        total = self.total = recipe.length.steps(per_epoch, 0)
        if total < 1:
            raise LeadlineError(f"length is {recipe.length.text}, less than one step; make it longer")
        rate = LearningRate(recipe.schedule, recipe.optimizer.lr, total, per_epoch)
        torch.manual_seed(recipe.seed)
        model = self.task.make_model().to(processes.device)
        self.step = prepare_step(recipe, self.task, model, processes, rate)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.every = {name: self._steps(span) for name, span in self._spans().items()}
        self.seconds = 0.0  # of earlier parts of this run
        self.best: dict[str, Any] | None = None
        self.since = 0  # steps since the figures were last read
        self.watched: dict[str, float] | None = None  # figures of the last evaluation
        self.owed = False  # the evaluation of the last step failed
        self.saved = 0  # step of the newest checkpoint

    def go(self, request: StopRequest) -> dict[str, Any]:
        with ExitStack() as held:
            return self._go(request, held)

    def _go(self, request: StopRequest, held: ExitStack) -> dict[str, Any]:
        """``held``: what ends with the run."""
        with preparing(self.console):
            start = self._resume(held)
        finished = self.processes.agree(read_summary(self.out)) if start == self.total else None
        if finished is not None and finished["steps"] == self.total:
            if self.processes.main:
                self._tell(f"{self.out} is finished: nothing to do")
            return finished
        if self.processes.main:
            (self.out / SUMMARY).unlink(missing_ok=True)  # of a shorter run
        tensorboard = self.recipe.log.tensorboard
        self.logs = Logs(
            self.out, start, self.total, console=self.console, main=self.processes.main, tensorboard=tensorboard
        )
        held.callback(self._close_logs)
        if start == 0:
            epochs = f"{self.total / self.per_epoch:.4g}"
            self.logs.say(f"{self.total} steps, {epochs} epoch{'s' * (epochs != '1')} of {self.per_epoch}")
        if (theirs := ignored_precision(self.recipe)) is not None:
            self.logs.say(theirs)
        if self.recipe.graph and not self.processes.alone_on_a_gpu:
            found = f"{self.processes.world} process(es) on {self.processes.device.type}"
            self.logs.say(f"no CUDA graph, which is for one process on a GPU: this run has {found}")
        self.began = self.last_read = self.asked = time.monotonic()
        self.asked_after = self.ask_after = start  # steps done when processes last asked each other, and will again
        self.read_after = start  # steps done when the figures were last read, or when this process began
        request.saved = None  # from here on a step is finished and saved
        self._loop(start, request)
        last = checkpoint.folder_of(self.out, self.total)
        request.saved = f"after the last step; saved in {last}, run the same command again for its evaluation"
        return self._finish()

    def _tell(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _close_logs(self) -> None:
        with suppress(OSError):  # said already
            self.logs.close()

    def _loop(self, start: int, request: StopRequest) -> None:
        self.step.model.train()
        if start == 0:
            self._probe(0)
        if self.owed:
            self._judge(start, True, True)
        for number in range(start, self.total):
            self._train(number)
            done, last = number + 1, number + 1 == self.total
            self.since += 1
            due = {name: bool(every) and (done % every == 0 or last) for name, every in self.every.items()}
            read = done % self.recipe.log.every == 0 or last
            stop = self._asked_to_stop(request, done, read or any(due.values()))
            if read or stop or any(due.values()):
                self._check()
            if read:
                self._log(done)
            if due["watch"]:
                self._probe(done)
            self._judge(done, due["evaluate"], due["checkpoint"] or stop is not None)
            if stop and not last:
                assert stop is not None
                raise Stopped(
                    f"{stop.name} after step {done} of {self.total}; saved in {checkpoint.folder_of(self.out, done)}, "
                    "run the same command again to go on",
                    128 + stop,
                )

    def _train(self, number: int) -> None:
        """A step; where its data fail, for example by an image that cannot be read, what was done is saved."""
        try:
            self.step(number)
        except LeadlineError:
            if self.processes.world == 1 and number > self.saved:
                self._check()
                self._save(number, None)
            raise

    def _judge(self, done: int, evaluate: bool, save: bool) -> None:
        """Evaluate, if that is due, and save, if that is or if it is the best; what cannot be evaluated is owed."""
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
        if score is not None and better:
            self.best = {"step": done, "score": score, "split": self.task.watched}
        if save or (better and self.recipe.checkpoint.best):
            self._save(done, score)

    def _asked_to_stop(self, request: StopRequest, done: int, read: bool) -> signal.Signals | None:
        """Several processes must stop after the same step, so they ask each other: when they wait anyway, and when the
        slowest of them has spent about ``PATIENCE`` since."""
        if self.processes.world == 1:
            return request.signal
        if not read and done < self.ask_after:
            return None
        answers = self.processes.gather((request.signal, time.monotonic() - self.asked))
        pace = max(spent for _, spent in answers) / max(done - self.asked_after, 1)  # seconds a step
        self.ask_after = done + max(1, int(PATIENCE / max(pace, 1e-9)))
        self.asked, self.asked_after = time.monotonic(), done
        return next((asked for asked, _ in answers if asked is not None), None)

    def _check(self) -> None:
        """Stop if a step went wrong."""
        failed = self.step.failed()
        if failed is None:
            return
        probe = self.out / "divergence.csv"
        words, measured = diagnose(self.step, failed, probe)
        raise self._diverged(f"at step {failed}: {words}", f"figures of its layers: {probe}, " if measured else "")

    def _diverged(self, words: str, figures: str = "") -> Stopped:
        saved = self.processes.agree(_last_checkpoint(self.recipe))
        return Stopped(
            f"diverged {words}; {figures}the last checkpoint: {saved}; try a lower optimizer.lr, a longer "
            "schedule.warmup or a regularise.clip, with another out="
        )

    def _log(self, done: int) -> None:
        now = time.monotonic()
        figures = self.step.read(self.since)
        speed = (done - self.read_after) / max(now - self.last_read, 1e-9)
        self.since, self.last_read, self.read_after = 0, now, done
        self.logs.training(
            {
                "step": done,
                "epoch": round(done / self.per_epoch, 4),
                **figures,
                "lr": self.step.rate(done - 1),
                "samples_per_second": round(speed * self.recipe.batch.size, 1),
                "seconds": round(self._seconds(), 3),
            }
        )

    def _evaluate(self, done: int) -> float:
        """Evaluate, log, and return the score, where more is better."""
        split = self.task.watched
        figures = self.watched = self._figures(split)
        if not math.isfinite(figures["loss"]):
            raise self._diverged(f"by step {done}: the loss on the {split} split is {figures['loss']}")
        self.logs.evaluation({"step": done, "epoch": round(done / self.per_epoch, 4), **figures}, split)
        name, way = self.task.best
        return figures[name] if way == "max" else -figures[name]

    def _figures(self, split: str) -> dict[str, float]:
        began, model = time.monotonic(), self.step.model
        model.eval()
        try:
            with torch.no_grad(), uncompiled(), self.step.averaged(), self.step.autocast():
                return self.task.evaluate(model, split)
        finally:
            model.train()
            self.last_read += time.monotonic() - began  # not the training's time

    def _probe(self, done: int) -> None:
        """The watcher's figures of the probe inputs, in evaluation mode."""
        if not self.every["watch"]:
            return
        began, model = time.monotonic(), self.step.model
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
            self.last_read += time.monotonic() - began

    def _save(self, done: int, score: float | None) -> None:
        began = time.monotonic()
        facts = {"score": score, "best": self.best, "seconds": self._seconds(), "since": self.since, "owed": self.owed}
        state.save(self.step, self.out, done, facts)
        self.saved = done
        self.last_read += time.monotonic() - began

    def _resume(self, held: ExitStack) -> int:
        """Take up the newest whole checkpoint in ``out``; returns the number of steps that are done."""
        saved, before, failure = None, None, None
        if self.processes.main:
            try:
                held.enter_context(alone(self.out))
                before = owner(self.out, self.recipe)
                saved = newest(self.out)
                if saved is None and (damaged := listed(self.out)):
                    raise LeadlineError(
                        f"no checkpoint in {self.out} is whole ({', '.join(folder.name for _, folder in damaged)}); to "
                        "begin anew give another out= or remove them"
                    )
                if saved is not None and saved.step > self.total:
                    raise LeadlineError(
                        f"length is {self.total} steps and {self.out} holds a checkpoint of step {saved.step}; make "
                        "length longer or give another out="
                    )
                self.task.settle(self.out)
                claim(self.out, self.recipe)
                checkpoint.set_aside(self.out, self._tell)
            except LeadlineError as error:
                failure = error
        if (told := self.processes.agree(failure)) is not None:
            raise told
        if not self.processes.agree(saved is not None):
            return 0
        facts = state.load(self.step, saved)
        self.seconds, self.best, self.since = facts["seconds"], facts["best"], facts["since"]
        self.saved = facts["step"]
        self.owed = facts.get("owed", False) or (self.saved == self.total and facts["score"] is None)
        if self.processes.main and facts["step"] < self.total:
            line = f"going on after step {facts['step']} of {self.total}, from {self.out}"
            self._tell(line + self._stretched(before, facts["step"]))
        return facts["step"]

    def _stretched(self, before: Recipe | None, step: int) -> str:
        """What another length does to the learning rate of the next step."""
        total = self.total if before is None else before.length.steps(self.per_epoch, 0)
        if total == self.total or step >= self.total:
            return ""
        old = LearningRate(self.recipe.schedule, self.recipe.optimizer.lr, total, self.per_epoch)(step - 1)
        new = self.step.rate(step)
        if old == new:
            return ""
        return (
            f"; length was {total} steps, and the schedule is now that of {self.total}: the learning rate goes from "
            f"{old:.3g} to {new:.3g}"
        )

    def _finish(self) -> dict[str, Any]:
        watched = self.task.watched
        found = {watched: self.watched or self._figures(watched)}
        if watched != "test":
            found["test"] = self._figures("test")
        seconds = self._seconds()
        last = checkpoint.folder_of(self.out, self.total).name
        summary = {
            "model": self.recipe.model.name,
            **{f"{split}_{name}": value for split in ("test", "valid") for name, value in found.get(split, {}).items()},
            "best": self.best,
            "checkpoint": last,
            "steps": self.total,
            "epochs": self.total / self.per_epoch,
            "seconds": round(seconds, 3),
            "parameters": self.parameters,
            "data": self.task.describe(),
            "processes": self.processes.world,
            "distributed": self.processes.mode,
            "device": _device_name(self.processes.device),
            "versions": {**versions(), "cuda": torch.version.cuda},
            "recipe": self.recipe.model_dump(mode="json"),
        }
        if self.processes.main:
            write_summary(self.out, summary)
        return summary

    def _seconds(self) -> float:
        return self.seconds + time.monotonic() - self.began

    def _spans(self) -> dict[str, Span]:
        r = self.recipe
        return {"watch": r.watch.every, "evaluate": r.evaluate, "checkpoint": r.checkpoint.every}

    def _steps(self, span: Span) -> int:
        """A span as steps, at least one; 0 only if it is 0."""
        return max(span.steps(self.per_epoch, self.total), 1) if span.number else 0


def prepare_step(recipe: Recipe, task: Task, model: nn.Module, processes: Processes, rate: LearningRate) -> Step:
    """Activation checkpointing, sharding or copying, compilation; then the step over it all."""
    model.train()
    if recipe.checkpointing:
        stacks = [module for module in model.modules() if hasattr(module, "activation_checkpointing")]
        if not stacks:
            raise LeadlineError(f"checkpointing is true; {recipe.model.name} cannot recompute, set checkpointing=false")
        for stack in stacks:
            stack.activation_checkpointing = True  # type: ignore[assignment]
    unused = processes.mode == "ddp" and _has_unused(recipe, task, model, processes)
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


def _has_unused(recipe: Recipe, task: Task, model: nn.Module, processes: Processes) -> bool:
    """Whether the loss leaves some weights out, as where the last layer's scores come too late to be used."""
    batch = task.batches(0, 0, rank=processes.rank, world=processes.world)
    loss, _, _ = task.loss(model, {name: part[:1] for name, part in batch.items()}, None)  # one sample tells
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return any(gradient is None for gradient in gradients)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
