"""A quick slice of the fuzzer: nothing ends in a traceback, hangs or changes what it should only read."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import os
import subprocess

import fuzz
import pytest


def test_a_slice_of_every_area(tmp_path):
    """In a process of its own: the fuzzer forks, and this one may have threads."""
    out = tmp_path / "fuzz.json"
    command = [sys.executable, fuzz.__file__, "--cases", "66", "--seed", "7", "--jobs", "1", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    result = fuzz.json.loads(out.read_text())
    assert result["failures"] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(result["areas"]) == set(fuzz.AREAS)
    assert sum(sum(counts.values()) for counts in result["areas"].values()) == 66
    assert result["samples_changed"] is False


def run(area, monkeypatch, tmp_path, seconds=5.0):
    """Run one case of an area that is defined here; return its outcome."""
    monkeypatch.setitem(fuzz.AREAS, "mine", area)
    monkeypatch.setattr(fuzz, "PATIENCE", seconds)
    samples = tmp_path / "samples"
    samples.mkdir()
    (samples / "file").write_text("precious")
    return fuzz.run([("mine", 0)], 0, 1, samples, lambda: None)


def boom(draw, at, samples):
    raise KeyError("boom")


def sleep(draw, at, samples):
    fuzz.time.sleep(60)


def greedy(draw, at, samples):
    bytearray(4 << 30)


def vandal(draw, at, samples):
    (samples / "file").write_text("gone")


def crash(draw, at, samples):
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    ("area", "kind"),
    [(boom, "traceback"), (sleep, "hang"), (greedy, "traceback"), (crash, "crash"), (vandal, "result")],
)
def test_the_fuzzer_sees_every_kind_of_failure(area, kind, monkeypatch, tmp_path):
    result = run(area, monkeypatch, tmp_path)
    assert result["areas"] == {"mine": {kind: 1}}
    assert result["samples_changed"] is (area is vandal)
    assert bool(result["failures"]) is (area is not vandal)


def test_cases_follow_from_their_seed_alone(tmp_path):
    draws = [fuzz.Draw("3-yaml-5") for _ in range(2)]
    assert [fuzz.value(draws[0]) for _ in range(9)].__repr__() == [fuzz.value(draws[1]) for _ in range(9)].__repr__()
    plan = fuzz.plan(110, None)
    assert len(set(plan)) == 110
    assert {area for area, _ in plan} == set(fuzz.AREAS)
