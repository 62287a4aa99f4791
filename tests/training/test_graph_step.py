"""The order of things around a CUDA graph, with a stand-in for the graph: what a machine without a GPU can tell."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from training_toys import CarryTask, ToyTask, toy_recipe

from leadline.errors import LeadlineError
from leadline.training import graph
from leadline.training.distributed import Processes, join
from leadline.training.loop import prepare_step
from leadline.training.optimizer import LearningRate

STEPS = 9


class Stream:
    def __init__(self, *_):
        pass

    def wait_stream(self, other):
        pass


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(Processes, "alone_on_a_gpu", True)


def steps(tmp_path, task, as_graph, **settings):
    """Weights after some steps, and the step."""
    recipe = toy_recipe(tmp_path, **settings)
    processes = join(recipe)
    torch.manual_seed(0)
    made = task(recipe, processes.device)
    recipe = recipe.model_copy(update={"graph": as_graph})
    step = prepare_step(recipe, made, made.make_model(), processes, LearningRate(recipe.schedule, 3e-3, 12, 6))
    for number in range(STEPS):
        step(number)
    return [weight.clone() for weight in step.weights.local], step


@pytest.fixture
def replayed(monkeypatch):
    """A capture draws random numbers and computes nothing; the steps that are replayed after it are counted here."""
    found = []

    def capture(self, number):
        torch.rand(100)
        self.graph = SimpleNamespace(replay=lambda: (found.append(1), self.compute(lambda micro: self.inputs[micro])))
        self.begin(number)

    monkeypatch.setattr(graph.GraphStep, "_capture", capture)
    return found


@pytest.mark.parametrize("settings", [{}, {"batch": {"accumulate": 2}, "model": {"dropout": 0.3}}])
@pytest.mark.parametrize("task", [ToyTask, CarryTask])
def test_before_and_after_the_capture_steps_are_the_plain_ones(tmp_path, replayed, task, settings):
    plain, _ = steps(tmp_path / "plain", task, False, **settings)
    captured, step = steps(tmp_path / "graph", task, True, **settings)
    assert len(replayed) + step.ran == STEPS
    assert graph.WARM_UP <= step.ran < STEPS
    assert all(torch.equal(one, other) for one, other in zip(plain, captured, strict=True))


def test_the_steps_before_the_capture_read_where_it_reads(tmp_path, replayed):
    """What is compiled goes by strides: the first steps must not meet others than the graph."""
    seen = set()

    class Watching(ToyTask):
        def loss(self, model, batch, carry):
            seen.update((name, tensor.data_ptr(), tensor.stride()) for name, tensor in batch.items())
            return super().loss(model, batch, carry)

    steps(tmp_path, Watching, True)
    assert replayed
    assert len(seen) == 2  # pixels and labels


def test_a_capture_that_fails_says_what_to_do(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with pytest.raises(LeadlineError, match=r"cannot be captured \(operation not .* capturing\); set graph=false$"):
        steps(tmp_path, ToyTask, True)


def test_a_batch_of_another_shape_says_what_to_do(tmp_path, monkeypatch):
    _, step = steps(tmp_path, ToyTask, False)
    other = graph.GraphStep.__new__(graph.GraphStep)
    other.inputs = [step.part(0, 0)]
    with pytest.raises(LeadlineError, match=r"a CUDA graph needs batches of one shape: set graph=false"):
        other._fill([{name: tensor[:3] for name, tensor in step.part(1, 0).items()}])
