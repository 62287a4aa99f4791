"""Training jobs, several at a time: ``run_all(setting, jobs)``."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from leadline.errors import LeadlineError
from leadline.training.runs.jobs import Job, Setting, recipe_of, stem
from leadline.training.runs.record import Record, read
from leadline.training.runs.worker import Assignment, prepare, train_and_record
from leadline.training.tasks import build_task

Finish = Callable[[Job, dict[str, Any]], None]


def run_all(setting: Setting, jobs: Sequence[Job]) -> dict[str, Record]:
    """Return the records of all jobs: those that are stored, and the rest trained, ``setting.jobs`` at a time.

    Args:
        setting: Where and how to train.
        jobs: The wanted runs.

    Returns:
        The records by the name of their job.

    Raises:
        LeadlineError: The time is up, a worker process died, or a folder cannot be written. Finished runs are stored.
        Stopped: A signal ended the runs; they are saved.
    """
    try:
        setting.records.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeadlineError(
            f"{setting.records} cannot be made ({error.strerror}); give a folder to write to by --out"
        ) from error
    stored = {job.name: read(setting.records / f"{stem(setting, job)}.json", job.name) for job in jobs}
    records = {name: record for name, record in stored.items() if record is not None}
    left = sorted((job for job in jobs if job.name not in records), key=lambda job: -job.cost)
    total = len(jobs)
    setting.progress(len(records), total)
    if not left:
        return records
    setting.say(f"{len(left)} of {total} {'run' if total == 1 else 'runs'} to train")

    def finish(job: Job, figures: dict[str, Any]) -> None:
        record = records[job.name] = Record(job.name, figures)
        setting.say(f"{len(records)}/{total}  {job.name}: {record.summary()}")
        setting.progress(len(records), total)

    (_train_one_by_one if setting.jobs == 1 else _train_side_by_side)(setting, left, total, finish)
    return records


def _train_one_by_one(setting: Setting, jobs: list[Job], total: int, finish: Finish) -> None:
    """Train jobs in this process."""
    for index, job in enumerate(jobs):
        if _late(setting):
            raise _time_is_up(setting, total - len(jobs) + index, total)
        with torch.enable_grad():
            finish(job, train_and_record(_assignment(setting, job)))


def _train_side_by_side(setting: Setting, jobs: list[Job], total: int, finish: Finish) -> None:
    """Train jobs in worker processes; an interruption saves the runs that are under way."""
    build_task(recipe_of(setting, jobs[0]), torch.device("cpu")).describe()  # caches images and text for all workers
    threads = max(1, torch.get_num_threads() // setting.jobs)
    spawn = multiprocessing.get_context("spawn")
    ended = spawn.Event()
    with ProcessPoolExecutor(setting.jobs, spawn, prepare, (threads, os.getpid(), ended)) as pool:
        waiting = list(jobs)
        running: dict[Future[dict[str, Any]], Job] = {}
        try:
            while waiting or running:
                while waiting and len(running) < setting.jobs and not _late(setting):
                    job = waiting.pop(0)
                    running[pool.submit(train_and_record, _assignment(setting, job))] = job
                if not running:
                    raise _time_is_up(setting, total - len(waiting), total)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    finish(running.pop(future), future.result())
        except BrokenProcessPool as error:
            raise LeadlineError(
                f"a training process ended by itself, perhaps for want of memory; finished runs are stored "
                f"in {setting.records}, --jobs is {setting.jobs}, give fewer"
            ) from error
        except BaseException:
            if running:
                setting.say("saving what is being trained")
            raise
        finally:
            ended.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _assignment(setting: Setting, job: Job) -> Assignment:
    name = stem(setting, job)
    recipe = recipe_of(setting, job, setting.work / name)
    return Assignment(recipe, setting.records / f"{name}.json", job.probe, setting.device)


def _late(setting: Setting) -> bool:
    return setting.until is not None and time.monotonic() > setting.until


def _time_is_up(setting: Setting, done: int, total: int) -> LeadlineError:
    return LeadlineError(
        f"the time is up: {done} of {total} runs are finished and stored in {setting.records}; "
        "run the same command again to go on"
    )
