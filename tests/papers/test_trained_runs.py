"""Runs of trained entries: kept one by one, shared, never made twice, and what is made of their records."""

import json
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leadline.cli import app
from leadline.errors import LeadlineError, Stopped
from leadline.papers import ENTRIES
from leadline.papers.hop import vit as trained_vits
from leadline.papers.shared.entry import Context, Entry
from leadline.papers.shared.trained import (
    difference,
    end_loss,
    near_one,
    peak_layers,
    peak_sentence,
    peaks_at_one,
    percent,
    said,
)
from leadline.report.layers import Distribution, LayerData
from leadline.training.runs import runs as trained_runs
from leadline.training.runs.runs import Job, Record, run_all

CPU = torch.device("cpu")
TINY = {"name": "vit_tiny", "depth": 1, "dim": 16, "heads": 2, "patch_size": 8, "pool": "max"}


def context(out: Path, **options: Any) -> Context:
    return Context({}, 0, CPU, embedded=True, out=out, **options)


def job(name: str = "a b", probe: int = 0, lr: float = 1e-3, **sections: Any) -> Job:
    recipe = {"model": TINY, "data": {"name": "cifar10"}, "length": "4 steps", "batch": {"size": 32},
              "optimizer": {"lr": lr}, "log": {"every": 2}, "graph": True, "compile": "blocks",
              "precision": "bf16"}  # fmt: skip
    return Job(name, {**recipe, **sections}, probe)


def test_a_run_is_kept_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(probe=2), job("other", seed=1)]
    seen: list[tuple[int, int]] = []
    found = run_all(context(tmp_path, progress=lambda done, total: seen.append((done, total))), jobs)
    assert seen == [(0, 2), (1, 2), (2, 2)]
    record = found["a b"]
    assert not record.diverged
    assert 0 <= record["test_accuracy"] <= 1
    assert record.curve("training", "loss")[0] == pytest.approx([2 / 44, 4 / 44], abs=1e-3)
    assert [layer.index for layer in record.layers] == [0, 1]
    assert found["other"].layers == []
    assert not list((tmp_path / "work").iterdir())
    files = sorted(file.name for file in (tmp_path / "runs").iterdir())
    assert [file.rpartition("-")[0] for file in files] == ["a_b", "other"]
    assert str(tmp_path) not in (tmp_path / "runs" / files[0]).read_text()

    def never(*_: Any) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(trained_runs, "_train", never)
        again = run_all(context(tmp_path), jobs)
        assert again["a b"].figures == json.loads(json.dumps(record.figures))
        for changed in (job(probe=3), job(lr=2e-3, probe=2), job(probe=2, length="5 steps")):
            with pytest.raises(AssertionError):
                run_all(context(tmp_path), [changed])
    (tmp_path / "runs" / files[1]).write_text('{"half')
    assert run_all(context(tmp_path), jobs)["other"]["test_accuracy"] == found["other"]["test_accuracy"]


def test_several_at_a_time_give_what_one_gives(tmp_path: Path) -> None:
    jobs = [job("a"), job("b", seed=1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of the two has
    try:
        one = run_all(context(tmp_path / "one"), jobs)
    finally:
        torch.set_num_threads(threads)
    two = run_all(context(tmp_path / "two", jobs=2), jobs)
    for name in one:
        for figure in ("test_accuracy", "test_loss", "steps"):
            assert one[name][figure] == two[name][figure]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("idle", [False, True])
def test_training_processes_end_with_the_one_that_gives_them_work(number: int, idle: bool, tmp_path: Path) -> None:
    """Killed as hard as can be, or interrupted alone, in the middle of long runs, or of one beside a process that waits
    for work; what they did until then is saved, and none is left."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_trained_runs import context, job, run_all
if __name__ == "__main__":
    sections = dict(length="100000 steps", checkpoint={{"every": "100 %"}}, evaluate="100 %")
    other = dict(length="4 steps") if {idle} else sections
    run_all(context(Path({str(tmp_path)!r}), jobs=2), [job("a", **sections), job("b", seed=1, **other)])
"""
    (tmp_path / "program.py").write_text(program)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "program.py")])
    try:
        _wait_for(lambda: len(list(tmp_path.glob("work/a-*/log.csv"))) == 1)
        _wait_for(lambda: len(list(tmp_path.glob("runs/b-*.json" if idle else "work/b-*/log.csv"))) == 1)
        children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        children = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(children) == 2
        parent.send_signal(number)
        parent.wait(60)
    finally:
        parent.kill()
        parent.wait()
    _wait_for(lambda: len(list(tmp_path.glob("work/a-*/step-*/manifest.json"))) == 1)
    if not idle:
        _wait_for(lambda: len(list(tmp_path.glob("work/b-*/step-*/manifest.json"))) == 1)
    _wait_for(lambda: not any(_runs(pid) for pid in children))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not what():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_signal_ends_it_with_the_code_of_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped("SIGTERM after step 2 of 4", 143)

    monkeypatch.setattr(trained_runs, "train", stopped)
    with pytest.raises(Stopped) as found:
        run_all(context(tmp_path), [job()])
    assert pickle.loads(pickle.dumps(found.value)).code == 143  # as it comes out of a process
    monkeypatch.setattr("leadline.papers.run_entries", stopped)
    assert CliRunner().invoke(app, ["reproduce", "hop-skipless"]).exit_code == 143


def test_a_record_that_finds_no_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises((LeadlineError, Stopped), match="No space left on device"):
        run_all(context(tmp_path), [job()])


def test_a_run_that_diverges_is_a_record(tmp_path: Path) -> None:
    found = run_all(context(tmp_path), [job(lr=1e30, probe=2)])["a b"]
    assert found.diverged
    assert found["diverged"].startswith("diverged at step")
    assert found["test_accuracy"] is None
    assert found.layers == []


def test_when_the_time_is_up(tmp_path: Path) -> None:
    run_all(context(tmp_path), [job()])
    late = context(tmp_path, until=time.monotonic() - 1)
    assert run_all(late, [job()])["a b"]["steps"] == 4
    with pytest.raises(LeadlineError, match="the time is up: 1 of 2 runs are finished"):
        run_all(late, [job(), job("b", seed=1)])
    with pytest.raises(LeadlineError, match="1 of 2 runs"):
        run_all(replace(late, jobs=2), [job(), job("b", seed=1)])
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot be made"):
        run_all(context(tmp_path / "file"), [job()])


def test_cifar_is_trained_on_where_it_lies(tmp_path: Path) -> None:
    plain = Context({}, 0, CPU, data=tmp_path / "copy", out=tmp_path)
    recipe = trained_runs._recipe(plain, job())
    assert (recipe.data.name, recipe.data.path) == ("cifar10", str(tmp_path / "copy"))
    assert (recipe.graph, recipe.compile, recipe.precision) == (False, "none", "float32")  # on a CPU
    elsewhere = replace(plain, data=tmp_path / "other")
    assert trained_runs._stem(plain, job()) == trained_runs._stem(elsewhere, job())
    gpu = replace(plain, device=torch.device("cuda"))
    assert trained_runs._recipe(gpu, job()).graph
    assert trained_runs._stem(gpu, job()) != trained_runs._stem(plain, job())


def histogram(**shares: int) -> Distribution:
    """Counts of cosines by percent: p97=5 is five pairs in [.97, .98)."""
    counts = [0] * 200
    for name, count in shares.items():
        counts[100 + int(name[1:])] = count
    return Distribution([-1 + 0.01 * i for i in range(201)], counts, 0.0, 0.0, 0.0)


def test_peak_at_one() -> None:
    assert near_one(histogram(p99=3, p98=1, p97=4, p10=2)) == pytest.approx(0.4)
    assert peaks_at_one(histogram(p99=3, p95=4, p10=93))
    assert not peaks_at_one(histogram(p99=1, p95=10, p10=89))  # falls towards 1
    assert not peaks_at_one(histogram(p99=1, p10=999))  # too few
    layers = [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=h) for i, h in enumerate(
        [histogram(p99=9), histogram(p99=3, p10=97), histogram(p10=9), histogram(p99=5, p10=5)])]  # fmt: skip
    assert peak_layers(layers) == ([1, 3], 0.5)


def test_what_is_said_follows_from_the_numbers() -> None:
    peak = [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=histogram(p99=5, p10=5)) for i in range(3)]
    flat = [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=histogram(p10=5)) for i in range(3)]
    line = peak_sentence({"standard": peak, "alpha only": flat, "alpha' only": peak})
    assert line == (
        "The peak at cosine 1 appears with standard attention in layers 1–2 of 2: up to 50 % of the token pairs have a "
        "cosine above 0.98. It is gone with alpha only (at most 0 %). It stays with alpha' only (layers 1–2, 50 %)."
    )
    few, fewer = (
        [LayerData(i, "x", 0, 1, 0, 1, 1, cosines=histogram(p99=n, p95=12, p10=88 - n)) for i in range(3)]
        for n in (4, 3)
    )
    assert peak_sentence({"standard": few, "alpha' only": fewer}).endswith(
        "With alpha' only (at most 3 %) it no longer stands out in any layer, but there are nearly as many such pairs."
    )
    line = peak_sentence({"standard": flat, "both": peak})
    assert line.startswith("A peak at cosine 1 does not appear with standard attention")
    assert line.endswith("It appears with both.")
    assert percent([0.5, 0.6, 0.7]) == "60.0 ± 10.0"
    assert percent([0.5]) == "50.0"
    mean, error = difference([0.5, 0.6, 0.7], [0.4, 0.4, 0.7])
    assert (mean, error) == pytest.approx((10.0, 10 / 3**0.5))
    assert "within the noise of 3 seeds" in said("x", [0.5, 0.6, 0.7], [0.4, 0.4, 0.7])
    assert "beyond the noise of 3 seeds" in said("x", [0.5, 0.6, 0.7], [0.1, 0.21, 0.3])
    assert said("x", [0.5], [0.4]) == "x +10.0 points (one seed)"


def test_a_net_that_guesses_is_said_to() -> None:
    found = {arm: [Record(arm, {"diverged": None, "test_accuracy": value})] for arm, value in (("a", 0.6), ("b", 0.11))}
    assert "What b gives is little more than guessing" in trained_vits._accuracy_note(found)
    assert "guessing" not in trained_vits._accuracy_note({"a": found["a"]})


def test_the_loss_at_the_end_is_of_the_last_tenth() -> None:
    rows = [{"epoch": 0.1 * i, "loss": float(i)} for i in range(1, 101)]
    assert end_loss(Record("a", {"training": rows})) == pytest.approx(95.5)
    assert end_loss(Record("a", {"training": rows[:3]})) == 3.0


def test_every_trained_entry_of_vision_is_there() -> None:
    ids = {entry.id for entry in ENTRIES if entry.group == "trained" and entry.images}
    figures = {f"hop-fig{i}" for i in (5, 6, 7, 8, 13, 14, 15, 16)}
    assert {"tse-fig6", "hop-skipless", "hop-vit", *figures} <= ids
    for entry in ENTRIES:
        if entry.budgets:
            assert entry.with_budget("short").setting["budget"] == "short"
            with pytest.raises(LeadlineError, match="unknown budget 'long'"):
                entry.with_budget("long")
    plain = next(entry for entry in ENTRIES if not entry.budgets)
    assert isinstance(plain, Entry)
    assert plain.with_budget("full") is plain
