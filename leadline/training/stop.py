"""The early end of a training run: stop requests by signal, divergence, and failures from outside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from leadline.errors import Stopped
from leadline.machine import ENDING
from leadline.models.checkpoints import find_checkpoint
from leadline.training.distributed import Processes
from leadline.training.recipe import Recipe
from leadline.training.run_folder.folder import FULL


class Diverged(Stopped):
    """The run ended because a loss or a gradient was not finite, or a gradient was too large.

    Attributes:
        cause: What happened and where, such as "diverged at step 7: the output of patch is not finite".
    """

    def __init__(self, message: str, cause: str = "") -> None:  # unpickling passes the message alone
        super().__init__(message)
        self.cause = cause


class StopRequest:
    """Handles SIGTERM, SIGINT and SIGHUP for a run, as a context manager.

    The first signal is stored in ``signal``, so that the loop can finish its step and save. A second one interrupts
    the process at once. Where SIGHUP is ignored, as under nohup, it stays ignored.

    Attributes:
        current: The request of the run in this process; None where no run is active.
        signal: The signal received, if any.
        immediate: Outside the loop, the message with which the first signal ends the run at once; None inside it.
    """

    current: StopRequest | None = None

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.immediate: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
            StopRequest.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        StopRequest.current = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.immediate is not None:
            raise Stopped(f"{signal.Signals(number).name} {self.immediate}", 128 + number)
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


class StopPoll:
    """Polls for a stop request, so that all processes of a run stop after the same step.

    A single process looks at its own request after every step. Several processes exchange theirs at steps where they
    wait for each other anyway, and otherwise about every ``INTERVAL`` seconds of the slowest process.

    Args:
        request: The request of this process.
        processes: All processes of the run.
        done: How many steps are done when polling begins.
    """

    INTERVAL = 2.0

    def __init__(self, request: StopRequest, processes: Processes, done: int) -> None:
        self.request, self.processes = request, processes
        self.last_time, self.last_step = time.monotonic(), done  # of the last exchange
        self.next_step = done  # of the next exchange

    def __call__(self, done: int, waiting: bool) -> signal.Signals | None:
        """Return the signal after which to stop, if any, when ``done`` steps are done.

        Args:
            done: How many steps are done.
            waiting: Whether all processes wait for each other after this step anyway.
        """
        if self.processes.world == 1:
            return self.request.signal
        if not waiting and done < self.next_step:
            return None
        answers = self.processes.gather((self.request.signal, time.monotonic() - self.last_time))
        seconds_per_step = max(seconds for _, seconds in answers) / max(done - self.last_step, 1)
        self.next_step = done + max(1, int(self.INTERVAL / max(seconds_per_step, 1e-9)))
        self.last_time, self.last_step = time.monotonic(), done
        return next((number for number, _ in answers if number is not None), None)


@contextmanager
def failures_explained(recipe: Recipe, processes: Processes) -> Iterator[None]:
    """Turn failures from outside into ``Stopped`` with one line: files, memory, and the other processes of the run."""
    try:
        yield
    except OSError as error:  # most likely a log on a full disk; checkpoints have messages of their own
        advice = "make room" if error.errno in FULL else "mend that"
        raise Stopped(
            f"the run cannot go on: {error.strerror or error} ({error.filename or recipe.out}); the last checkpoint: "
            f"{last_checkpoint(recipe)}; {advice} and run the same command again"
        ) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # GPU, CPU
            raise Stopped(
                f"{processes.device} has not enough memory for this run; the last checkpoint: "
                f"{last_checkpoint(recipe)}; run again with checkpointing=true, or with another out= and a larger "
                "batch.accumulate or a smaller batch.size or model"
            ) from error
        if processes.world == 1 or " by peer" not in str(error):  # "closed by peer", "reset by peer"
            raise
        raise Stopped(
            f"another process of this run ended; the last checkpoint: {last_checkpoint(recipe)}; when the cause that "
            "it names is mended, run the same command again"
        ) from error


def last_checkpoint(recipe: Recipe) -> str:
    """Return the folder of the run's newest checkpoint, for a message."""
    saved = find_checkpoint(str(recipe.out), "last")
    return str(saved.folder) if saved else "none yet"
