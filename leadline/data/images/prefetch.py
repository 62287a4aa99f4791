"""Batches prepared ahead by worker processes, for what PIL must decode or augment."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from leadline.data.images.draws import restored_generators
from leadline.errors import LeadlineError
from leadline.machine import ENDING


class Request(NamedTuple):
    """Which part of which batch, as in ``leadline.data.base.Batches``."""

    step: int
    micro: int
    rank: int
    world: int


Make = Callable[[Request], dict[str, Tensor]]  # tensors on the CPU; picklable where processes are spawned


class Prefetch:
    """Calls ``make(request)`` ahead in worker processes, in the order in which steps follow.

    A request out of order, as in a resumed run, restarts the workers there. An error in a worker is raised here as one
    line.

    Args:
        make: Returns tensors on the CPU; picklable where processes are spawned.
        workers: Worker processes; 0: ``make`` runs in this process.
        accumulate: Forward passes of a step.
        pin: Whether to put tensors into pinned memory.
        last: The last step to prepare; None: no end.
    """

    def __init__(
        self, make: Make, workers: int, *, accumulate: int = 1, pin: bool = False, last: int | None = None
    ) -> None:
        self.make, self.workers, self.accumulate, self.pin, self.last = make, workers, accumulate, pin, last
        self._next: Request | None = None
        self._batches: Iterator[Any] | None = None

    def __call__(self, request: Request) -> dict[str, Tensor]:
        if self.workers == 0:
            with restored_generators():
                return self.make(request)
        if self._batches is None or request != self._next:
            self.close()
            with restored_generators(), _blocked_signals():  # torch draws a seed for its workers
                self._batches = iter(self._loader(request))
            atexit.register(_end, weakref.ref(self._batches))  # however the program ends
        try:
            batch = next(self._batches)
        except RuntimeError as error:  # a worker was killed by the system, most often out of memory
            self.close()
            if "worker (pid" not in str(error):
                raise
            raise LeadlineError(
                f"a data worker ended ({str(error).splitlines()[0]}), perhaps for want of memory; give fewer "
                "data.workers"
            ) from error
        if isinstance(batch, str):
            self.close()
            raise LeadlineError(batch)
        self._next = _after(request, self.accumulate)
        return batch

    def close(self) -> None:
        """End the workers."""
        if self._batches is not None:
            _end(weakref.ref(self._batches))
        self._batches, self._next = None, None

    def _loader(self, first: Request) -> DataLoader:
        return DataLoader(
            _Batches(self.make),
            batch_size=None,
            sampler=_Following(first, self.accumulate, self.last),
            num_workers=self.workers,
            prefetch_factor=4,
            pin_memory=self.pin,
            collate_fn=_as_is,
            worker_init_fn=_ignore_signals,
        )


def _after(request: Request, accumulate: int) -> Request:
    step, micro = divmod(request.step * accumulate + request.micro + 1, accumulate)
    return request._replace(step=step, micro=micro)


class _Following(Sampler[Request]):
    def __init__(self, first: Request, accumulate: int, last: int | None) -> None:
        self.first, self.accumulate, self.last = first, accumulate, last

    def __iter__(self) -> Iterator[Request]:
        request = self.first
        while self.last is None or request.step <= self.last:
            yield request
            request = _after(request, self.accumulate)


class _Batches(Dataset[Any]):
    def __init__(self, make: Make) -> None:
        self.make = make

    def __getitem__(self, request: Request) -> dict[str, Tensor] | str:
        try:
            return self.make(request)
        except LeadlineError as error:  # as text: torch would wrap it into a traceback of many lines
            return str(error)


def _as_is(item: Any) -> Any:
    return item


def _end(loader: weakref.ref[Any]) -> None:
    """Tell the workers to end and wait for them; they ignore the signal by which Python would end them."""
    if (batches := loader()) is not None:
        batches._shutdown_workers()
        for worker in batches._workers:
            if worker.is_alive():  # stuck
                worker.kill()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the ending signals while processes are started, until ``_ignore_signals`` runs in them.

    The handler of torch for dead workers is removed: it would raise in the middle of anything. A dead worker is noticed
    where its batch is asked for.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if handler not in (None, signal.getsignal(signal.SIGCHLD)):  # None: not a handler of Python
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # signals that came meanwhile reach the loop now


def _ignore_signals(_: int) -> None:
    """Leave signals to the loop, which still needs its workers for the present step and then ends them."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def stack(images: list[Any]) -> Tensor:
    """Stack arrays or tensors (C, h, w) of bytes into (n, C, h, w), uint8."""
    return torch.stack([torch.as_tensor(image) for image in images])
