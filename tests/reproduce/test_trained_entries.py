"""The trained entries of vision from end to end, on the embedded digits, at sizes of seconds."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leadline.reproduce import ENTRIES, runner, store, trained_skipless
from leadline.reproduce.base import Entry
from leadline.reproduce.hop_nets import COLUMNS

BY_ID = {entry.id: entry for entry in ENTRIES}
SMALL = {"name": "vit_tiny", "depth": 2, "dim": 16, "heads": 2}


def shrunk(name: str, short: dict[str, Any], **setting: Any) -> Entry:
    entry = BY_ID[name]
    budgets = {"short": {**entry.budgets["short"], **short}}
    return replace(entry, setting={**entry.setting, "probed": 2, **setting}, budgets=budgets)


def run(entries: list[Entry], out: Path, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=300)
    runner.run_entries(
        "all", out, entries=entries, device="cpu", embedded=True, console=console, page=out / "cifar10.md", **options
    )
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_depth_80(tmp_path: Path) -> None:
    entry = shrunk("tse-fig6", {"epochs": 1, "evaluate": "50 %"}, depth=2, dim=16, ffn=16, heads=2, seeds=2, batch=256)
    run([entry], tmp_path)
    summary = store.read(tmp_path / "tse-fig6")
    assert summary is not None
    assert [claim["kind"] for claim in summary["claims"]] == ["shape"] * 3 + ["digits"] * 3
    runs = rows(tmp_path / "tse-fig6" / "runs.csv")
    assert [(row["arm"], row["seed"]) for row in runs] == [
        (arm, str(seed)) for arm in ("post-norm", "pre-norm", "de-escalated") for seed in (0, 1)
    ]
    means = {arm: 50 * sum(float(r["test_accuracy"]) for r in runs if r["arm"] == arm) for arm in
             ("post-norm", "pre-norm", "de-escalated")}  # fmt: skip
    assert summary["claims"][0]["ours"] == pytest.approx(means["de-escalated"] - means["post-norm"])
    assert summary["claims"][1]["ours"] == pytest.approx(means["de-escalated"] - means["pre-norm"])
    assert summary["claims"][2]["ours"] == pytest.approx(means["pre-norm"] - means["post-norm"])
    page = (tmp_path / "cifar10.md").read_text()
    assert "[runs.csv](cifar10/tse-fig6_runs.csv)" in page
    assert rows(tmp_path / "cifar10" / "tse-fig6_runs.csv") == runs
    assert " of 3 | - |" in page  # what is only reported has no tolerance to be within
    assert "![tse-fig6](cifar10/tse-fig6.png)" in page
    assert "| de-escalated |" in page
    # after tau = 1 the mean of the tokens is 0: the last layer's similarity, as the page's table has it
    assert summary["shown"][2]["token similarity after the last layer"] == "0.000 ± 0.000"


def test_skipless(tmp_path: Path) -> None:
    short = {"epochs": 2, "batch": 256}
    sizes = {"dim": 16, "heads": 2, "depths": [2], "inits": ["trunc_normal"], "lrs": [1e-3, 1e30], "seeds": 2}
    run([shrunk("hop-skipless", short, **sizes)], tmp_path)
    summary = store.read(tmp_path / "hop-skipless")
    assert summary is not None
    trials = rows(tmp_path / "hop-skipless" / "trials.csv")
    assert len(trials) == 4 * 2
    assert {row["valid_accuracy"] for row in trials if row["lr"] == "1e+30"} == {""}  # diverged, so never chosen
    runs = rows(tmp_path / "hop-skipless" / "runs.csv")
    assert len(runs) == 4 * 2
    assert {row["lr"] for row in runs} == {"0.001"}
    notes = " ".join(summary["notes"])
    assert "4 of 8 such runs diverged and" in notes
    assert "more ended below 15 %; 0 of 8 final ones diverged" in notes
    right = {c: [float(row["test_accuracy"]) for row in runs if row["column"] == c] for c in COLUMNS}
    claim = next(claim for claim in summary["claims"] if claim["name"] == "both over standard, depth 2, points")
    assert claim["ours"] == pytest.approx(50 * (sum(right["both"]) - sum(right["standard"])))
    assert claim["paper"] == pytest.approx(16.1)
    alpha = 25 * sum(a - s + b - p for s, a, p, b in zip(*right.values(), strict=True))
    assert f"by {alpha:+.1f} and " in " ".join(summary["notes"])


def test_initialisations_are_crossed_at_some_depths() -> None:
    setting = BY_ID["hop-skipless"].with_budget("short").setting
    found = trained_skipless.cells(setting)
    assert len(found) == 4 * 5
    assert {depth for init, depth, _ in found if init == "trunc_normal"} == {2, 4, 8, 12}
    assert {depth for init, depth, _ in found if init == "xavier"} == {8}


def test_vits_share_their_runs(tmp_path: Path) -> None:
    short = {"epochs": dict.fromkeys("TSBL", 1), "lrs": dict.fromkeys("TSBL", 1e-3)}
    models = dict.fromkeys("TSBL", SMALL)
    names = ("hop-vit", "hop-fig6", "hop-fig16")
    said = run(
        [shrunk(name, short, models=models, **({"seeds": 2} if name == "hop-vit" else {})) for name in names], tmp_path
    )
    # four ways by two seeds; figure 6 adds .7, figure 16 nothing
    assert len(list((tmp_path / "runs").iterdir())) == 9
    assert "peak at cosine 1" in said
    for name in names:
        assert (tmp_path / "cifar10" / f"{name}.png").is_file()
    layers = rows(tmp_path / "hop-fig6" / "layers.csv")
    assert {row["way"] for row in layers} == {"standard", ".5", ".7"}
    assert len(rows(tmp_path / "hop-fig16" / "entropy.csv")) == 2 * 2  # layers by heads
