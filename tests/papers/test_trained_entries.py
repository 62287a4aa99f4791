"""The entries that train on images, run whole on the embedded digits at sizes that take seconds."""

import csv
import io
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from image_files import write_cifar
from rich.console import Console

from leadline.papers import ENTRIES
from leadline.papers.hop import skipless
from leadline.papers.shared import runner, store, vits
from leadline.papers.shared.attention_nets import COLUMNS
from leadline.papers.shared.entry import Context, Entry
from leadline.papers.shared.runner import Options
from leadline.papers.shared.trained import training_setting
from leadline.papers.tse import fig6
from leadline.training.runs import Job
from leadline.training.runs.jobs import recipe_of
from leadline.training.tasks import build_task

BY_ID = {entry.id: entry for entry in ENTRIES}
SMALL = {"name": "vit_tiny", "depth": 2, "dim": 16, "heads": 2}


def shrunk(name: str, short: dict[str, Any], **setting: Any) -> Entry:
    entry = BY_ID[name]
    budgets = {"short": {**entry.budgets["short"], **short}}
    return replace(entry, setting={**entry.setting, "probed": 2, **setting}, budgets=budgets)


def run(entries: list[Entry], out: Path, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=300)
    page = out / "cifar10.md"
    runner.run_entries("all", out, entries, Options(device="cpu", embedded=True, console=console, page=page, **options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_depth_80(tmp_path: Path) -> None:
    entry = shrunk("tse-fig6", {"epochs": 1, "evaluate": "50 %"}, depth=2, dim=16, ffn=16, heads=2, seeds=2, batch=256)
    run([entry], tmp_path)
    summary = store.read(tmp_path / "tse-fig6")
    assert summary is not None
    assert [claim["kind"] for claim in summary["claims"]] == ["shape"] * 3 + ["digits"] * 6
    runs = rows(tmp_path / "tse-fig6" / "runs.csv")
    assert [(row["arm"], row["seed"]) for row in runs] == [
        (arm, str(seed)) for arm in ("post-norm", "pre-norm", "de-escalated") for seed in (0, 1)
    ]
    curves = rows(tmp_path / "tse-fig6" / "curves.csv")
    for first, figure, scale in ((0, "training_loss", 1), (3, "test_accuracy", 100)):
        values = {arm: [float(r[figure]) for r in runs if r["arm"] == arm] for arm in fig6.ARMS}
        means = {arm: scale * fmean(of_arm) for arm, of_arm in values.items()}
        for i, (one, other) in enumerate(fig6.PAIRS):
            assert summary["claims"][first + i]["ours"] == pytest.approx(means[one] - means[other])
    for row in runs:  # 7 steps: the last tenth is the last of them
        own = [r for r in curves if (r["arm"], r["seed"], r["curve"]) == (row["arm"], row["seed"], "training")]
        assert row["training_loss"] == own[-1]["loss"]
    page = (tmp_path / "cifar10.md").read_text()
    assert "[runs.csv](cifar10/tse-fig6_runs.csv)" in page
    assert rows(tmp_path / "cifar10" / "tse-fig6_runs.csv") == runs
    assert " steps/s in the quickest run" in page  # runs ran one at a time
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
    cells = skipless.cells(setting)
    assert len(cells) == 4 * 5
    assert {cell.depth for cell in cells if cell.init == "trunc_normal"} == {2, 4, 8, 12}
    assert {cell.depth for cell in cells if cell.init == "xavier"} == {8}


def test_vits_share_their_runs(tmp_path: Path) -> None:
    short = {"epochs": dict.fromkeys("TSBL", 1), "lrs": dict.fromkeys("TSBL", 1e-3)}
    models = dict.fromkeys("TSBL", SMALL)
    names = ("hop-vit", "hop-fig6", "hop-fig16")
    output = run(
        [shrunk(name, short, models=models, **({"seeds": 2} if name == "hop-vit" else {})) for name in names], tmp_path
    )
    # four ways by two seeds; figure 6 adds .7, figure 16 nothing
    assert len(list((tmp_path / "runs").iterdir())) == 9
    assert "peak at cosine 1" in output
    for name in names:
        assert (tmp_path / "cifar10" / f"{name}.png").is_file()
    for table in ("layers", "runs", "curves"):
        assert {row["arm"] for row in rows(tmp_path / "hop-fig6" / f"{table}.csv")} == {"standard", ".5", ".7"}
    assert output.count("scikit-learn's digits in place of CIFAR-10") == 3  # once an entry
    assert {row["arm"] for row in rows(tmp_path / "hop-vit" / "curves.csv")} == set(COLUMNS)
    assert len(rows(tmp_path / "hop-fig16" / "entropy.csv")) == 2 * 2  # layers by heads


@pytest.mark.parametrize("lost", ["standard", "both"])
def test_a_run_that_diverges_costs_no_other(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other runs are drawn; what is unknown is described as such, and its claims do not hold."""
    recipe = vits.recipe

    def hot(setting: Any, size: str, arm: str, seed: int) -> dict[str, Any]:
        sections = recipe(setting, size, arm, seed)
        if arm == lost and seed == 0:
            sections["optimizer"] = {**sections["optimizer"], "lr": 1e30}
        return sections

    monkeypatch.setattr(vits, "recipe", hot)
    short = {"epochs": dict.fromkeys("TSBL", 1), "lrs": dict.fromkeys("TSBL", 1e-3)}
    models = dict.fromkeys("TSBL", SMALL)
    names = ("hop-vit", "hop-fig6", "hop-fig15", "hop-fig16")
    entries = [shrunk(name, short, models=models, **({"seeds": 2} if name == "hop-vit" else {})) for name in names]
    run(entries, tmp_path)
    page = (tmp_path / "cifar10.md").read_text()
    assert f"Diverged, which counts as guessing: {lost}, 1 of 2 (diverged at step " in page
    vit, cosines, plain, hopfield = (store.read(tmp_path / name) for name in names)
    assert vit is not None
    assert [row["diverged"] for row in vit["shown"]] == [str(int(arm == lost)) for arm in COLUMNS]
    assert cosines is not None
    claims = {claim["name"].rpartition(", ")[2]: claim for claim in cosines["claims"] if claim["kind"] == "shape"}
    gone = "standard" if lost == "standard" else ".5"
    assert claims[gone]["ours"] is None
    assert not claims[gone]["holds"]
    assert claims[".7"]["ours"] is not None
    notes = " ".join(cosines["notes"])
    assert ("is not known: its run diverged" in notes) == (lost == "standard")
    assert plain is not None
    assert ("entropy.csv" in plain["files"]) == (lost != "standard")
    assert hopfield is not None
    assert hopfield["claims"][-1]["ours"] is None


def test_figures_of_other_images_are_not_taken_over(tmp_path: Path) -> None:
    """The same command with another copy trains again; a copy of the same images elsewhere does not."""
    write_cifar(tmp_path / "one", 300, 40)
    write_cifar(tmp_path / "two", 300, 40, seed=1)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    short = {"epochs": dict.fromkeys("TSBL", 1), "lrs": dict.fromkeys("TSBL", 1e-3)}
    entry = shrunk("hop-fig13", short, models=dict.fromkeys("TSBL", SMALL))

    def runs(data: str) -> int:
        console = Console(file=io.StringIO(), width=300)
        options = Options(data=tmp_path / data, device="cpu", console=console)
        runner.run_entries("all", tmp_path / "out", [entry], options)
        return len(list((tmp_path / "out" / "runs").iterdir()))

    assert [runs(data) for data in ("one", "copy", "two")] == [1, 1, 2]
    summary = store.read(tmp_path / "out" / "hop-fig13")
    assert summary is not None
    assert summary["setting"]["images"].startswith("CIFAR-10 ")
    assert summary["notes"][-1].startswith("1 run, ")
    assert "shared" not in summary["notes"][-1]


def test_the_full_budget_runs_on_digits(tmp_path: Path) -> None:
    """Without RandAugment, which needs colour."""
    context = Context(BY_ID["hop-vit"].with_budget("full").setting, 0, torch.device("cpu"), embedded=True, out=tmp_path)
    recipe = vits.recipe(context.setting, "S", "both", 0)
    assert recipe["augment"]["rand_augment"]
    completed = recipe_of(training_setting(context), Job("x", recipe))
    assert completed.augment.rand_augment is None
    assert not completed.augment.flip
    assert completed.augment.mixup == 0.8
    assert build_task(completed, torch.device("cpu")).batches.steps_per_epoch > 0
