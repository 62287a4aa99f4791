"""Two processes on the CPU, over gloo: the losses and weights of one with the doubled batch, to rounding."""

import csv
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_toys import CarryTask, ToyTask, toy_recipe
from two_processes import CONSTANT, LAGGING, LEARNED

from leadline.training import Stopped, find_checkpoint, train

pytest.importorskip("accelerate")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launched(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    train(toy_recipe(out / "more", length="6 steps", **CONSTANT), make_task=CarryTask)  # begun by one, ended by two
    words = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    launched(*words, str(HERE / "two_processes.py"), str(out))
    return out


def rows_of(out):
    with (out / "log.csv").open() as stream:
        return list(csv.DictReader(stream))


def assert_equal_to_rounding(one, two):
    for single, double in zip(rows_of(one), rows_of(two), strict=True):
        for figure in ("loss", "gradient_norm"):
            assert float(single[figure]) == pytest.approx(float(double[figure]), rel=2e-5), (single["step"], figure)
    last = [find_checkpoint(out, "last") for out in (one, two)]
    for file in ("model", "ema/model"):
        first, second = (saved.tensors(file) for saved in last)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            # Adam makes rounding noise of the keys' bias, which has no gradient, as large as anything
            if not name.endswith("qkv.bias"):
                torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_are_one_with_the_doubled_batch(two, tmp_path, kind):
    recipe = toy_recipe(tmp_path, model=LEARNED, regularise={"ema": 0.9}, watch={"every": "6 steps"})
    train(recipe, make_task=ToyTask)
    assert_equal_to_rounding(tmp_path, two / kind)
    summaries = [json.loads((out / "summary.json").read_text()) for out in (tmp_path, two / kind)]
    assert summaries[1]["processes"] == 2
    assert summaries[1]["distributed"] == kind
    assert summaries[0]["test_accuracy"] == summaries[1]["test_accuracy"]
    probes = [list(csv.DictReader((out / "probe.csv").open())) for out in (tmp_path, two / kind)]
    assert len(probes[0]) == 9
    for one, other in zip(*probes, strict=True):
        assert float(one["similarity"]) == pytest.approx(float(other["similarity"]), rel=1e-3)


def test_fsdp_really_shards_and_leaves_carried_scores_alone(two):
    facts = [json.loads((two / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    assert facts[0]["whole"] == ["blocks.0.attention.alpha.parameter", "blocks.1.attention.alpha.parameter"]
    assert facts[0]["numbers_here"] + facts[1]["numbers_here"] == facts[0]["numbers"]
    assert facts[0]["numbers_here"] < 0.6 * facts[0]["numbers"]
    assert facts[0]["states_in_bf16"] == facts[1]["states_in_bf16"] == ["torch.float32"]


def test_accumulated_and_carried_over_two_processes(two, tmp_path):
    train(toy_recipe(tmp_path), make_task=CarryTask)
    assert_equal_to_rounding(tmp_path, two / "parts")
    carried = [find_checkpoint(out, "last").tensors("carry")["carry.0"] for out in (tmp_path, two / "parts")]
    torch.testing.assert_close(*carried, rtol=1e-3, atol=1e-5)


def test_weights_without_a_gradient_do_not_hang_ddp(two, tmp_path):
    train(toy_recipe(tmp_path, model=LAGGING), make_task=ToyTask)
    assert_equal_to_rounding(tmp_path, two / "lagging")


def test_a_run_goes_on_with_fewer_or_more_processes(two, tmp_path):
    train(toy_recipe(tmp_path / "one", **CONSTANT), make_task=ToyTask)
    train(toy_recipe(two / "fewer", **CONSTANT), make_task=ToyTask)
    assert_equal_to_rounding(tmp_path / "one", two / "fewer")
    train(toy_recipe(tmp_path / "carry", **CONSTANT), make_task=CarryTask)
    assert_equal_to_rounding(tmp_path / "carry", two / "more")


def test_both_processes_stop_when_one_is_asked_to(two):
    for rank in (0, 1):
        facts = json.loads((two / f"facts-{rank}.json").read_text())
        assert facts["asked"] == ["SIGTERM after step 6 of 12", 143]
    assert find_checkpoint(two / "asked", "last").step == 6


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_divergence_is_seen_where_it_is(two, tmp_path, mode):
    """In whichever process and part it lies; every process says the same, and gradients are those of all together."""
    facts, other = (json.loads((two / f"facts-{rank}.json").read_text()) for rank in (0, 1))
    found = {kind: facts[f"{kind} {mode}"] for kind in ("nan", "exploding", "limit")}
    assert found == {kind: other[f"{kind} {mode}"] for kind in found}
    assert found["nan"].startswith("diverged at step 3: the output of patch is not finite; figures of its layers: ")
    rows = list(csv.DictReader((two / f"nan-{mode}" / "divergence.csv").open()))
    assert {row["step"] for row in rows} == {"3"}
    assert math.isnan(float(rows[0]["norm"]))
    norm = float(re.search(r"gradients explode \(norm (\S+),", found["exploding"])[1])
    assert norm > 1e6
    with pytest.raises(Stopped) as one:
        train(toy_recipe(tmp_path, norm_limit=1e-3, log={"every": 4}), make_task=ToyTask)
    assert found["limit"].split(";")[0] == str(one.value).split(";")[0]


def test_with_fp16_a_loss_that_is_not_finite_on_one_process_stops_all(two):
    """No gradient tells the others there: one that is not finite may be the scale's."""
    facts = [json.loads((two / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    assert facts[0]["nan fp16"] == facts[1]["nan fp16"]
    assert facts[0]["nan fp16"].startswith("diverged at step 3: ")
    assert facts[0]["weights fp16"] == facts[1]["weights fp16"]


def test_processes_with_different_recipes_or_data_are_refused(two):
    found = [json.loads((two / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, facts in enumerate(found):
        rates = ("0.001", "0.002")
        assert facts["recipes"].startswith(
            f"processes were given different recipes: optimizer.lr ({rates[rank]} on process {rank}, "
            f"{rates[1 - rank]} on {1 - rank});"
        )
        assert facts["data"].startswith(f"processes were given different data: train of process {rank} and of")
        assert not (two / f"own-{rank}").exists()


def test_the_same_command_in_two_processes(tmp_path):
    words = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    settings = ["length=2 steps", "schedule.warmup=0", "model.depth=1", "watch.every=0", f"out={tmp_path}", "--json"]
    done = launched(*words, "-m", "leadline", "train", "recipes/smoke_digits.yaml", *settings)
    summary = json.loads(done.stdout)  # printed once
    assert summary["processes"] == 2
    assert summary["distributed"] == "ddp"
