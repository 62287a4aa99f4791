"""Many runs: recorded one by one, shared, never made twice, several at a time, and ended by signals."""

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
from leadline.training.runs import Job, Setting, pool, run_all, worker

TINY = {"name": "vit_tiny", "depth": 1, "dim": 16, "heads": 2, "patch_size": 2, "pool": "max"}


def setting(out: Path, **options: Any) -> Setting:
    return Setting(out, torch.device("cpu"), lambda recipe: recipe, **options)


def job(name: str = "a b", probe: int = 0, lr: float = 1e-3, **sections: Any) -> Job:
    recipe = {"model": TINY, "data": {"name": "digits"}, "length": "4 steps", "batch": {"size": 32},
              "optimizer": {"lr": lr}, "log": {"every": 2}, "graph": True, "compile": "blocks",
              "precision": "bf16"}  # fmt: skip
    return Job(name, {**recipe, **sections}, probe)


def test_a_run_is_kept_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(probe=2), job("other", seed=1)]
    seen: list[tuple[int, int]] = []
    found = run_all(setting(tmp_path, progress=lambda done, total: seen.append((done, total))), jobs)
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
        patch.setattr(pool, "train_and_record", never)
        again = run_all(setting(tmp_path), jobs)
        assert again["a b"].figures == json.loads(json.dumps(record.figures))
        for changed in (job(probe=3), job(lr=2e-3, probe=2), job(probe=2, length="5 steps")):
            with pytest.raises(AssertionError):
                run_all(setting(tmp_path), [changed])
    (tmp_path / "runs" / files[1]).write_text('{"half')
    assert run_all(setting(tmp_path), jobs)["other"]["test_accuracy"] == found["other"]["test_accuracy"]


def test_several_at_a_time_give_what_one_gives(tmp_path: Path) -> None:
    jobs = [job("a"), job("b", seed=1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of the two has
    try:
        one = run_all(setting(tmp_path / "one"), jobs)
    finally:
        torch.set_num_threads(threads)
    two = run_all(setting(tmp_path / "two", jobs=2), jobs)
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
from test_runs import job, run_all, setting
if __name__ == "__main__":
    sections = dict(length="100000 steps", checkpoint={{"every": "100 %"}}, evaluate="100 %")
    other = dict(length="4 steps") if {idle} else sections
    run_all(setting(Path({str(tmp_path)!r}), jobs=2), [job("a", **sections), job("b", seed=1, **other)])
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

    monkeypatch.setattr(worker, "train", stopped)
    with pytest.raises(Stopped) as found:
        run_all(setting(tmp_path), [job()])
    assert pickle.loads(pickle.dumps(found.value)).code == 143  # as it comes out of a process
    monkeypatch.setattr("leadline.papers.run_entries", stopped)
    result = CliRunner().invoke(app, ["reproduce", "hop-skipless"])
    assert isinstance(result.exception, Stopped)
    assert result.exception.code == 143


def test_a_record_that_finds_no_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises((LeadlineError, Stopped), match="No space left on device"):
        run_all(setting(tmp_path), [job()])


def test_a_run_that_diverges_is_a_record(tmp_path: Path) -> None:
    found = run_all(setting(tmp_path), [job(lr=1e30, probe=2)])["a b"]
    assert found.diverged
    assert found["diverged"].startswith("diverged at step")
    assert found["test_accuracy"] is None
    assert found.layers == []


def test_when_the_time_is_up(tmp_path: Path) -> None:
    run_all(setting(tmp_path), [job()])
    late = setting(tmp_path, until=time.monotonic() - 1)
    assert run_all(late, [job()])["a b"]["steps"] == 4
    with pytest.raises(LeadlineError, match="the time is up: 1 of 2 runs are finished"):
        run_all(late, [job(), job("b", seed=1)])
    with pytest.raises(LeadlineError, match="1 of 2 runs"):
        run_all(replace(late, jobs=2), [job(), job("b", seed=1)])
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot be made"):
        run_all(setting(tmp_path / "file"), [job()])
