"""Where it runs, and what that is called. That a device is there is tested with ``leadline evaluate``."""

import os

import pytest
import torch

import leadline
from leadline.machine import choose_device, lock, processor, versions


def test_versions_are_those_of_what_is_installed():
    found = versions("numpy", "no-such-package")
    assert found.keys() == {"leadline", "python", "torch", "numpy"}
    assert (found["leadline"], found["torch"]) == (leadline.__version__, torch.__version__)


@pytest.mark.parametrize(("threads", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_the_processor_and_its_threads(monkeypatch, threads, words):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    name, _, said = processor().rpartition(", ")
    assert said == words
    assert name


def test_a_gpu_if_there_is_one(monkeypatch):
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert choose_device(None).type == kind
    assert choose_device("cpu").type == "cpu"


def test_one_holds_what_the_other_must_wait_for(tmp_path):
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock(first, wait=True)
    assert not lock(second, wait=False)
    os.close(first)
    assert lock(second, wait=False)
    os.close(second)
