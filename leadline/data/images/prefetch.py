"""Batches that worker processes prepare ahead: what must be decoded or augmented by PIL."""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from leadline.data.images.draws import generators_kept
from leadline.errors import LeadlineError
from leadline.machine import ENDING


class Request(NamedTuple):
    """Which part of which batch; as in ``leadline.data.base.Batches``."""

    step: int
    micro: int
    rank: int
    world: int


Make = Callable[[Request], dict[str, Tensor]]  # tensors on the CPU; picklable where processes are spawned


def default_workers(world: int = 1) -> int:
    """A share of the cores that this process may use: one is left for the loop."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(0, min(16, cores // world - 1))


class Prefetch:
    """``prefetch(request)`` is ``make(request)``, prepared by worker processes in the order in which steps follow.

    A request out of order (a resumed run) begins anew there; nothing is prepared beyond the step ``last``. An error in
    a worker is raised here, as one line.
    """

    def __init__(
        self, make: Make, workers: int, *, accumulate: int = 1, pin: bool = False, last: int | None = None
    ) -> None:
        self.make, self.workers, self.accumulate, self.pin, self.last = make, workers, accumulate, pin, last
        self._next: Request | None = None
        self._coming: Iterator[Any] | None = None

    def __call__(self, request: Request) -> dict[str, Tensor]:
        if self.workers == 0:
            with generators_kept():
                return self.make(request)
        if self._coming is None or request != self._next:
            self.close()
            with generators_kept(), _signals_held():  # torch draws a seed for its workers
                self._coming = iter(self._loader(request))
            atexit.register(_end, weakref.ref(self._coming))  # however the program ends
        try:
            found = next(self._coming)
        except RuntimeError as error:  # a worker died: killed by the system, most often for want of memory
            self.close()
            if "worker (pid" not in str(error):
                raise
            raise LeadlineError(
                f"a data worker ended ({str(error).splitlines()[0]}), perhaps for want of memory; give fewer "
                "data.workers"
            ) from error
        if isinstance(found, str):
            self.close()
            raise LeadlineError(found)
        self._next = _after(request, self.accumulate)
        return found

    def close(self) -> None:
        """End the workers."""
        if self._coming is not None:
            _end(weakref.ref(self._coming))
        self._coming, self._next = None, None

    def _loader(self, first: Request) -> DataLoader:
        return DataLoader(
            _Made(self.make),
            batch_size=None,
            sampler=_From(first, self.accumulate, self.last),
            num_workers=self.workers,
            prefetch_factor=4,
            pin_memory=self.pin,
            collate_fn=_as_is,
            worker_init_fn=_left_alone,
        )


def _after(request: Request, accumulate: int) -> Request:
    step, micro = divmod(request.step * accumulate + request.micro + 1, accumulate)
    return request._replace(step=step, micro=micro)


class _From(Sampler[Request]):
    def __init__(self, first: Request, accumulate: int, last: int | None) -> None:
        self.first, self.accumulate, self.last = first, accumulate, last

    def __iter__(self) -> Iterator[Request]:
        request = self.first
        while self.last is None or request.step <= self.last:
            yield request
            request = _after(request, self.accumulate)


class _Made(Dataset[Any]):
    def __init__(self, make: Make) -> None:
        self.make = make

    def __getitem__(self, request: Request) -> dict[str, Tensor] | str:
        try:
            return self.make(request)
        except LeadlineError as error:  # as text: torch would wrap it into a traceback of many lines
            return str(error)


def _as_is(item: Any) -> Any:
    return item


def _end(coming: weakref.ref[Any]) -> None:
    """Workers are told to go, since they ignore the signal that Python would end them with, and then wait for."""
    if (found := coming()) is not None:
        found._shutdown_workers()
        for worker in found._workers:
            if worker.is_alive():  # stuck
                worker.kill()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes begun in here are born with these signals blocked, so that none ends one before ``_left_alone`` ran.

    That a worker died is found where its batch is asked for: torch's handler would raise in the middle of anything.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if handler not in (None, signal.getsignal(signal.SIGCHLD)):  # None: it is not Python's
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what came meanwhile reaches the loop now


def _left_alone(_: int) -> None:
    """A signal to the whole group is for the loop: it still needs its workers for the step at hand, and ends them."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def stack(images: list[Any]) -> Tensor:
    """Arrays or tensors (C, h, w) of bytes -> (n, C, h, w), uint8."""
    return torch.stack([torch.as_tensor(image) for image in images])
