"""Where it runs: on which device, among which other processes, ended by what, and what to call it in a result."""

from __future__ import annotations

import platform
import re
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from leadline.errors import LeadlineError

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


def choose_device(given: str | None) -> torch.device:
    """ "cpu", "cuda" or "cuda:1"; None: a GPU if there is one."""
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise LeadlineError(f"device is {given!r}; give 'cpu', 'cuda' or nothing")
    device, found = torch.device(given), torch.cuda.device_count()
    if device.type == "cuda" and not found:
        raise LeadlineError(f"device is {given!r} and torch finds no GPU here; give 'cpu' or nothing")
    if device.type == "cuda" and (device.index or 0) >= found:
        raise LeadlineError(f"device is {given!r} and torch finds {found} GPU(s) here, counted from 0; give 'cuda'")
    return device


def lock(opened: int, wait: bool) -> bool:
    """Whether an open file or folder is ours alone among the processes; where there are no locks it counts as that."""
    try:
        import fcntl

        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def versions(*packages: str) -> dict[str, str]:
    """Of Leadline, Python, torch, and of those packages that are installed."""
    from leadline import __version__

    found = {"leadline": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name and the threads that torch uses of it."""
    threads = torch.get_num_threads()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"
