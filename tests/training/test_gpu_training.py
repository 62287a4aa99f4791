"""On a GPU: the step as a CUDA graph gives what the plain step gives, and nothing waits for the device."""

import csv
import threading

import pytest
import torch
from training_toys import CarryTask, Poisoned, ToyTask, toy_recipe

from leadline.errors import LeadlineError
from leadline.training import Stopped, find_checkpoint, parse_recipe, train
from leadline.training.distributed import join
from leadline.training.loop import prepare_step
from leadline.training.optimizer import LearningRate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def losses(out, task=ToyTask, **settings):
    train(toy_recipe(out, device="cuda", **settings), make_task=task)
    with (out / "log.csv").open() as stream:
        return [float(row["loss"]) for row in csv.DictReader(stream)]


@pytest.mark.parametrize(
    ("settings", "task", "tolerance"),
    [
        ({}, ToyTask, 1e-4),
        ({"regularise": {"ema": 0.9}, "batch": {"accumulate": 2}}, ToyTask, 1e-4),
        ({"batch": {"accumulate": 2}}, CarryTask, 1e-4),
        ({"precision": "fp16"}, ToyTask, 2e-2),
        ({"precision": "bf16", "model": {"attention": "hopfield"}}, ToyTask, 2e-2),
        ({"precision": "bf16", "compile": "blocks", "model": {"depth": 4}}, ToyTask, 2e-2),
        ({"precision": "bf16", "compile": "model"}, ToyTask, 2e-2),
    ],
)
def test_a_graph_is_the_plain_step(tmp_path, settings, task, tolerance):
    plain = losses(tmp_path / "plain", task, **{**settings, "compile": "none"})
    graph = losses(tmp_path / "graph", task, graph=True, **settings)
    assert graph == pytest.approx(plain, rel=tolerance)
    assert len({*graph}) == len(graph)


def test_a_graph_draws_new_random_numbers_at_every_step(tmp_path):
    random = {"model": {"dropout": 0.3}, "regularise": {"drop_path": 0.3}}
    first = losses(tmp_path / "1", graph=True, **random)
    assert first == pytest.approx(losses(tmp_path / "2", graph=True, **random), rel=1e-4)
    assert first == pytest.approx(losses(tmp_path / "plain", **random), rel=1e-3)  # the same ones as without a graph
    assert first[5:] != pytest.approx(losses(tmp_path / "none", graph=True)[5:], rel=1e-4)


def test_a_graph_is_captured_while_another_thread_pins_memory(tmp_path):
    """As that of a data loader does."""
    pinned, done = [], threading.Event()

    def pin():
        while not done.is_set() and len(pinned) < 50_000:
            pinned.append(torch.empty(4096, dtype=torch.uint8, pin_memory=True))

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        assert losses(tmp_path / "beside", graph=True)
    finally:
        done.set()
        thread.join()
    assert 10 < len(pinned) < 50_000  # it was at it all the while


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_on_the_gpu_goes_on(tmp_path, graph):
    constant = {"schedule": {"name": "constant"}, "model": {"dropout": 0.1}, "graph": graph}
    whole = losses(tmp_path / "whole", **constant)
    losses(tmp_path / "parts", length="6 steps", **constant)
    assert losses(tmp_path / "parts", **constant) == pytest.approx(whole, rel=1e-3)
    one, other = (find_checkpoint(tmp_path / name, "last").tensors("model") for name in ("whole", "parts"))
    for name, tensor in one.items():
        if not name.endswith("qkv.bias"):  # the keys' part has no gradient but noise
            torch.testing.assert_close(tensor, other[name], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("graph", [False, True])
def test_divergence_is_noticed_later_and_named_all_the_same(tmp_path, graph):
    with pytest.raises(Stopped, match=r"diverged at step 7: the output of patch is not finite"):
        losses(tmp_path, Poisoned, graph=graph, log={"every": 12}, evaluate="12 steps", checkpoint={"every": 12})


@pytest.mark.parametrize("settings", [{}, {"graph": True, "compile": "blocks"}, {"precision": "fp16"}])
def test_no_step_waits_for_the_device(tmp_path, settings):
    recipe = toy_recipe(tmp_path, device="cuda", regularise={"ema": 0.9}, **settings)
    processes = join(recipe)
    task = ToyTask(recipe, processes.device)
    ready = [task.batches(number) for number in range(12)]
    task.batches = lambda number, *rest, **options: ready[number]
    step = prepare_step(recipe, task, task.make_model().cuda(), processes, LearningRate(recipe.schedule, 3e-3, 12, 6))
    for number in range(6):  # compiled, warmed up and captured by then
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(6, 12):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.failed() is None


def language_recipe(root, out, **model):
    """A tiny language model on text of our own."""
    for split, count in (("train", 400), ("valid", 40), ("test", 40)):
        lines = (f"mark {i % 9} fathom {i % 7} by the lead , deep {(i * i) % 11}\n" for i in range(count))
        (root / f"{split}.txt").write_text("".join(lines))
    data = {"name": "text", "path": str(root), "tokenizer": "byte", "tokens": 16, "cache": str(root / "cache")}
    tree = {"data": data, "length": "12 steps", "batch": {"size": 4}, "log": {"every": 1}, "device": "cuda"}
    small = {"depth": 2, "dim": 32, "heads": 2}
    return {**tree, "precision": "bf16", "compile": "blocks", "model": {**small, **model}, "out": str(out)}


@pytest.mark.parametrize(
    "model",
    [
        {"name": "gpt2_small"},
        {"name": "gpt2_small", "norm": "post", "de_escalation": 1.0},
        {"name": "gpt2_small", "attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.5},
        {"name": "llama", "ffn": 64, "kv_heads": 1},
        {"name": "transformer_xl_base", "ffn": 64, "memory_length": 24, "de_escalation": 1.0},
    ],
)
def test_language_models_as_a_graph(tmp_path, model):
    found = []
    for graph in (False, True):
        out = tmp_path / str(graph)
        train(parse_recipe({**language_recipe(tmp_path, out, **model), "graph": graph}))
        with (out / "log.csv").open() as stream:
            found.append([float(row["loss"]) for row in csv.DictReader(stream)])
    assert found[1] == pytest.approx(found[0], rel=2e-2)
    assert found[1][-1] < found[1][0]


def test_a_step_that_no_graph_can_hold_says_so(tmp_path):
    """A clustered softmax looks at which words are rare."""
    xl = {"name": "transformer_xl_base", "ffn": 64, "memory_length": 24, "cutoffs": [60]}
    with pytest.raises(LeadlineError, match=r"graph is true and the step cannot be captured .*; set graph=false"):
        train(parse_recipe({**language_recipe(tmp_path, tmp_path / "run", **xl), "graph": True}))
