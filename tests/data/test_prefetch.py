"""Workers that prepare batches ahead leave the loop's random numbers and its end to the loop."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import leadline.data.images.prefetch as module
from leadline.data.images.prefetch import Prefetch, Request
from leadline.errors import LeadlineError


def make(request):
    return {"step": torch.tensor(request.step), "drawn": torch.rand(2)}


def test_workers_draw_from_generators_of_their_own():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    for workers in (0, 1):
        torch.manual_seed(3)
        prefetch = Prefetch(make, workers, last=2)
        assert prefetch(Request(0, 0, 0, 1))["step"] == 0
        assert torch.equal(torch.rand(4), wanted)
        prefetch.close()


@pytest.mark.parametrize("birth", [0, 1])
def test_a_signal_to_all_leaves_the_step_at_hand_its_batch(monkeypatch, birth):
    def slow(number):  # the second worker is still being set up when the signal comes
        time.sleep(birth * number)
        settled(number)

    settled = module._ignore_signals
    monkeypatch.setattr(module, "_ignore_signals", slow)
    prefetch = Prefetch(make, 2, last=40)
    prefetch(Request(0, 0, 0, 1))
    for worker in prefetch._batches._workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert [int(prefetch(Request(step, 0, 0, 1))["step"]) for step in range(1, 30)] == list(range(1, 30))
    workers = prefetch._batches._workers
    prefetch.close()
    assert not any(worker.is_alive() for worker in workers)


def test_a_worker_that_dies_is_one_line_where_its_batch_is_asked_for_and_the_others_go():
    prefetch = Prefetch(make, 2, last=40)
    prefetch(Request(0, 0, 0, 1))
    workers = prefetch._batches._workers
    os.kill(workers[1].pid, signal.SIGKILL)
    workers[1].join()
    time.sleep(0.1)  # nothing is raised here
    with pytest.raises(LeadlineError, match=r"a data worker ended .*give fewer data\.workers") as held:
        [prefetch(Request(step, 0, 0, 1)) for step in range(1, 30)]
    assert not any(worker.is_alive() for worker in workers)
    assert held.traceback  # which keeps torch's iterator


def test_a_worker_that_is_stuck_is_ended():
    prefetch = Prefetch(make, 1, last=40)
    prefetch(Request(0, 0, 0, 1))
    (worker,) = prefetch._batches._workers
    os.kill(worker.pid, signal.SIGSTOP)
    prefetch.close()
    worker.join(10)
    assert not worker.is_alive()


def test_a_program_that_fails_ends_its_workers():
    program = """
import torch
from leadline.data.images.prefetch import Prefetch, Request

def make(request):
    return {"step": torch.tensor(request.step)}

prefetch = Prefetch(make, 2, last=40)
prefetch(Request(0, 0, 0, 1))
raise ValueError("something else")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "something else" in ended.stderr


def test_what_else_goes_wrong_beside_the_workers_is_not_called_a_dead_one(monkeypatch):
    prefetch = Prefetch(make, 1, last=40)
    prefetch(Request(0, 0, 0, 1))

    def lost(coming):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(type(prefetch._batches), "__next__", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        prefetch(Request(1, 0, 0, 1))
