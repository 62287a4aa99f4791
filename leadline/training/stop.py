"""How a run ends before its time: a message, an exit code, and a way to ask for it from outside."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from leadline.errors import Stopped
from leadline.machine import ENDING


class StopRequest:
    """Inside, SIGTERM, SIGINT and SIGHUP set ``signal`` and no more: the loop finishes its step and saves. A second
    one ends the process at once. Under nohup SIGHUP stays ignored. Where ``saved`` says what is kept, before the first
    step and after the last, the first one ends the run."""

    current: StopRequest | None = None  # of this process

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.saved: str | None = None
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
        if self.saved is not None:
            raise Stopped(f"{signal.Signals(number).name} {self.saved}", 128 + number)
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
