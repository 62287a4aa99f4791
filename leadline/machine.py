"""The machine: its device and processor, file locks, versions of packages, and signals that end a run."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from leadline.errors import LeadlineError

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


def choose_device(given: str | None) -> torch.device:
    """Return the device "cpu", "cuda" or "cuda:1"; None: a GPU if there is one."""
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise LeadlineError(f"device is {given!r}; give 'cpu', 'cuda' or nothing")
    device, count = torch.device(given), torch.cuda.device_count()
    if device.type == "cuda" and not count:
        raise LeadlineError(f"device is {given!r} and torch finds no GPU here; give 'cpu' or nothing")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise LeadlineError(f"device is {given!r} and torch finds {count} GPU(s) here, counted from 0; give 'cuda'")
    return device


def free_memory() -> int:
    """Return the bytes of memory that this process can still take, as far as the system tells."""
    limits = [sys.maxsize]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, ValueError, KeyError):
        pass
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [limit] if limit > 0 else []
    except (ImportError, OSError):
        pass
    return min(limits)


def lock(opened: int, wait: bool) -> bool:
    """Lock an open file or folder for this process alone.

    Args:
        opened: File descriptor.
        wait: Whether to wait for a process that holds the lock.

    Returns:
        Whether this process holds it; True on systems without such locks.
    """
    try:
        import fcntl

        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Leadline, Python, torch and the given packages, as far as they are installed."""
    from leadline import __version__

    names = {"leadline": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in packages:
        try:
            names[package] = version(package)
        except PackageNotFoundError:
            continue
    return names


def spare_cores(world: int = 1) -> int:
    """Return a share of the cores that this process may use, at most 16, with one left for the training loop.

    Args:
        world: Processes on this machine, which share its cores.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(0, min(16, cores // world - 1))


def processor() -> str:
    """Return the name of the processor and the number of threads that torch uses."""
    threads = torch.get_num_threads()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"
