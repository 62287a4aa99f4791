"""Workers that prepare batches ahead leave the loop's random numbers and its end to the loop."""

import os
import signal

import torch

from leadline.data.prefetch import Prefetch, Request


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


def test_a_signal_to_all_leaves_the_step_at_hand_its_batch():
    prefetch = Prefetch(make, 2, last=40)
    prefetch(Request(0, 0, 0, 1))
    for worker in prefetch._coming._workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert [int(prefetch(Request(step, 0, 0, 1))["step"]) for step in range(1, 30)] == list(range(1, 30))
    workers = prefetch._coming._workers
    prefetch.close()
    assert not any(worker.is_alive() for worker in workers)
