"""The entries that train on text, run whole at sizes that take seconds."""

import csv
import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import leadline as ll
from leadline import papers
from leadline.papers import ENTRIES, Context
from leadline.papers.hop import fig4, table2
from leadline.papers.ours import text_depth
from leadline.papers.shared.language import describe_loss_difference, loss_difference, text_recipe
from leadline.papers.shared.runner import Options, run_entries
from leadline.papers.tse import fig7
from leadline.training.recipe import parse_recipe
from leadline.training.runs import Record

TINY = {"length": "3 steps", "evaluate": "1 steps", "dim": 8, "heads": 2, "tokens": 16, "batch": 2, "depth": 2}
TINY |= {"seeds": 2, "tokenizer": "byte", "vocab_size": None, "probed": 2, "compile": "none"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        (root / f"{split}.txt").write_text("".join(f"{split} by the mark {i % 9}\n" for i in range(count)))
    return root


@pytest.fixture
def context(text, tmp_path, monkeypatch):
    monkeypatch.setenv("LEADLINE_CACHE", str(text / "cache"))
    return lambda setting: Context(setting, 0, torch.device("cpu"), text=text, out=tmp_path)


def run(context, entry, **changes):
    made = context({**entry.setting, **entry.budgets["short"], **TINY, **changes})
    result = entry.run(made)
    for claim in result.claims:
        assert claim.ours is None or isinstance(claim.ours, float)
    assert all(rows and set(rows[0]) == set(rows[-1]) for rows in result.tables.values())
    result.plot()
    return result, made


def test_runs_on_one_text_are_not_those_on_another(text, tmp_path, monkeypatch):
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    tiny = replace(table2.ENTRY, setting={**table2.ENTRY.setting, **TINY, "seeds": 1,
                   "arms": ["alpha' 0", "alpha = alpha' = .5"]}, budgets={})  # fmt: skip
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(text, moved, ignore=lambda *_: ["cache"])
    shutil.copytree(moved, other)
    (other / "train.txt").write_text("".join(f"deep {i * i % 11}\n" for i in range(300)))
    losses = []
    for folder in (text, moved, other):
        options = Options(text=folder, device="cpu", console=Console(quiet=True))
        run_entries("hop-table2", tmp_path / "out", [tiny], options)
        with (tmp_path / "out" / "hop-table2" / "runs.csv").open() as file:
            losses.append([row["valid_loss"] for row in csv.DictReader(file)])
    assert losses[0] == losses[1] != losses[2]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2 * 2


def test_a_deep_decoder_with_the_better_of_two_rates(context):
    entry = text_depth.ENTRY
    arms = ["pre-norm", "post-norm", "de-escalated", "both"]
    result, made = run(
        context,
        entry,
        arms=arms,
        lrs={"pre": [1e-3, 1e-9], "post": [1e-3, 1e-9]},
        places={
            "1 layer": {"arms": ["pre-norm", "both"], "depth": 1, "embedding_scale": 4.0},
            "bytes": {
                "arms": ["pre-norm", "both"],
                "tokenizer": "byte",
                "vocab_size": None,
                "lr": 1e-2,
                "length": "2 steps",
            },
        },
    )
    tried = {row["arm"]: row["valid_loss"] for row in result.tables["rates"]}
    for arm in arms:
        better = min(("0.001", "1e-09"), key=lambda lr, arm=arm: tried[f"{arm}, lr {lr}"])
        rows = [row for row in result.tables["runs"] if row["arm"] == arm]
        assert [row["seed"] for row in rows] == [0, 1]
        assert rows[0]["valid_loss"] == tried[f"{arm}, lr {better}"]
    assert len(list((made.out / "runs").glob("*.json"))) == 2 * 4 + 2 * 4 + 2 * 2 * 2  # those that count are watched
    during = {(row["arm"], row["step"], row["layer"]): row["similarity"] for row in result.tables["watched"]}
    assert {arm for arm, _, _ in during} == set(arms)
    assert len({step for _, step, _ in during}) > 2
    assert all(0 <= similarity <= 1 for similarity in during.values())
    for row in result.tables["layers"]:  # the probe after training sees more text
        last = during[row["arm"], max(step for _, step, _ in during), row["layer"]]
        assert last == pytest.approx(row["similarity"], abs=0.3)
    assert {row["arm"] for row in result.tables["layers"]} == set(arms)
    highest = [arm for arm in arms if tried[f"{arm}, lr 0.001"] <= tried[f"{arm}, lr 1e-09"]]
    advice = f"A higher rate than those tried may be better for {', '.join(highest)}."
    assert any(advice in note for note in result.notes) == bool(highest)
    assert [row["place"] for row in result.tables["elsewhere"]] == ["1 layer"] * 4 + ["bytes"] * 4
    for lr in ("0.001", "1e-09"):
        gap = tried[f"both, lr {lr}"] - tried[f"pre-norm, lr {lr}"]
        (note,) = (note for note in result.notes if note.startswith(f"Against pre-norm at {lr}, first seed: "))
        assert f"both {gap:+.4f} nats" in note
    assert len(result.shown) == 4
    kept = {path: path.stat().st_mtime_ns for path in (made.out / "runs").iterdir()}
    assert entry.run(made).tables["runs"] == result.tables["runs"]  # nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in (made.out / "runs").iterdir()} == kept
    assert all("cost" in row for row in result.shown)
    shared = entry.run(replace(made, jobs=2))  # runs that share the machine say nothing of their cost
    assert not any({"cost", "ms a step"} & set(row) for row in shared.shown)
    assert any("2 at a time (for the cost of a step see" in note for note in shared.notes)
    again = "The first seed was then trained again, with token similarity watched."
    assert any(note.startswith(again) and "within 0.0000 nats" in note for note in result.notes)
    for path in (made.out / "runs").iterdir():  # as a GPU, whose sums come in another order, would leave it
        record = json.loads(path.read_text())
        if record["watched"] and record["recipe"]["model"].get("attention") == "hopfield":
            record["valid_loss"] += 0.25
            path.write_text(json.dumps(record))
    assert any("within 0.2500 nats of the first (both)" in note for note in entry.run(made).notes)


def test_gpt2_with_carried_scores_and_where_learned_ones_go(context):
    result, _ = run(context, table2.ENTRY, seeds=1, arms=["alpha' 0", "alpha' learned", "alpha = alpha' = .5"])
    assert len(result.tables["strengths"]) == 2  # layers
    assert all(0.4 < row["mean"] < 0.6 for row in result.tables["strengths"])
    shape = next(claim for claim in result.claims if claim.kind == "shape")
    losses = {row["arm"]: row["valid_loss"] for row in result.tables["runs"]}
    assert shape.ours == pytest.approx(losses["alpha = alpha' = .5"] - losses["alpha' 0"])
    assert shape.holds == (shape.ours < 0)


def test_learned_strengths_are_described_for_runs_that_did_not_diverge():
    def record(*means):
        names = ["blocks.0.alpha_prime", "blocks.1.alpha_prime"]
        return Record("r", {"strengths": {name: [mean] for name, mean in zip(names, means, strict=False)}})

    note = table2._learned({"alpha' learned": [record(), record(0.9, 0.4)]})
    assert "ended at a mean of 0.40 without the first block" in note
    for lost in ([record()], [record(0.9)], []):
        assert "not known" in table2._learned({"alpha' learned": lost})


def test_violins_of_a_trained_gpt2(context):
    result, _ = run(context, fig4.ENTRY, seeds=1)
    assert {(row["arm"], row["layer"]) for row in result.tables["layers"]} == {
        (a, n) for a in ("standard", ".5") for n in (0, 1, 2)
    }
    assert any("cosine 1" in note for note in result.notes)
    assert "epochs of the text" in result.plot().get_suptitle()  # the budget stands on the figure


def test_transformer_xl_three_ways_and_as_printed(context):
    result, _ = run(context, fig7.ENTRY, seeds=1, ffn=16, memory_length=16)
    assert [row["arm"] for row in result.shown] == list(fig7.ARMS)
    assert [claim.kind for claim in result.claims[:3]] == ["shape"] * 3


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.group == "language"], ids=lambda e: e.id)
def test_the_recipes_are_whole_and_large_enough(entry, text):
    """At least 20 M parameters, 2,000 steps and 16 M tokens an arm; depth 48 and more where depth is the question."""
    setting = entry.with_budget("short").setting
    if entry.id == "tse-fig7":
        tree = fig7.recipe(setting, "pre-norm", 0)
    else:
        sizes = {name: setting[name] for name in ("depth", "dim", "heads")}
        tree = text_recipe(setting, {"name": "gpt2_small", **sizes}, 0, 1e-3)
    tree["data"]["path"] = str(text)
    recipe = parse_recipe(tree)
    with torch.device("meta"):
        model = ll.create_model(recipe.model.name, **recipe.model_options(), vocab_size=setting["vocab_size"])
    assert sum(parameter.numel() for parameter in model.parameters()) >= 20e6
    steps = recipe.length.steps(6_796_714 // setting["tokens"] // setting["batch"], 0)  # tokens of the text at hand
    assert steps >= 2000
    assert steps * setting["tokens"] * setting["batch"] >= 16e6
    if entry.id == "ours-text-depth":
        assert setting["depth"] >= 48


def test_differences_with_runs_that_diverged():
    good = Record("a", {"diverged": None, "valid_loss": 2.0})
    bad = Record("b", {"diverged": "at step 3", "valid_loss": None})
    assert loss_difference([good], [good]) == (0.0, 0.0)
    assert loss_difference([good, bad], [good, good]) is None
    assert "diverged" in describe_loss_difference("b", [bad], [good])
    worse = Record("c", {"diverged": None, "valid_loss": 2.5})
    assert (
        describe_loss_difference("c", [worse, worse], [good, good])
        == "c +0.5000 ± 0.0000 nats (beyond the noise of 2 seeds at 95 %)"
    )


def test_without_text_it_says_so(tmp_path):
    with pytest.raises(ll.LeadlineError, match=r"ours-text-depth needs text to train on; .* by --text"):
        papers.run_entries("ours-text-depth", tmp_path, device="cpu")


def test_the_command_runs_an_entry(text, tmp_path, monkeypatch):
    monkeypatch.setenv("LEADLINE_CACHE", str(text / "cache"))
    entry = table2.ENTRY
    small = {**entry.setting, **TINY, "seeds": 1, "arms": ["alpha' 0", "alpha = alpha' = .5"]}
    budgets = {"short": {"length": "3 steps", "evaluate": "1 steps"}, "full": {}}
    monkeypatch.setattr(papers, "ENTRIES", (replace(entry, setting=small, budgets=budgets),))
    papers.run_entries("language", tmp_path, text=text, device="cpu", page=tmp_path / "page.md")
    summary = json.loads((tmp_path / "hop-table2" / "summary.json").read_text())
    assert summary["setting"]["budget"] == "short"
    with (tmp_path / "hop-table2" / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert "hop-table2" in (tmp_path / "page.md").read_text()
