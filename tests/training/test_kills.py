"""A few of the kills of benchmarks/kills.py, and the recipe that must work anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from leadline.training import load_recipe, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_killed_runs_end_as_if_nothing_had_happened():
    words = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "4", "--steps", "40"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == 4
    assert result["differences"] == []


def test_the_smoke_recipe_learns_the_digits(tmp_path):
    recipe = load_recipe(ROOT / "recipes" / "smoke_digits.yaml", [f"out={tmp_path}", "device=cpu"])
    summary = train(recipe, console=Console(quiet=True))
    assert summary["test_accuracy"] > 0.9
