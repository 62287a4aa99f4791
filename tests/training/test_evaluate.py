"""``leadline evaluate``: the figures are those of the run, and the report is there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from image_files import write_cifar
from typer.testing import CliRunner

import leadline
from leadline.cli import app
from leadline.curing import cure_folder
from leadline.errors import LeadlineError
from leadline.models.checkpoints import find_checkpoint
from leadline.probing import DepthReport
from leadline.training.evaluate import evaluate, recipe_of
from leadline.training.loop import train
from leadline.training.recipe import parse_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
TREE = {
    "model": {"name": "vit_tiny", "depth": 2, "dim": 16, "heads": 2, "patch_size": 4, "attention": "hopfield"},
    "data": {"name": "digits"},
    "length": "2 epochs",
    "batch": {"size": 128},
    "optimizer": {"lr": 3e-3},
    "precision": "bf16",
    "device": "cpu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run") / "out"
    return out, train(parse_recipe({**TREE, "regularise": {"ema": 0.5}, "out": str(out)}))


def test_figures_are_those_of_the_run(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Averaged weights, the precision of training: the same numbers to the last digit."""
    out, summary = run
    last = evaluate(out, which="last", device="cpu", out=tmp_path / "e")
    assert last.figures == {"accuracy": summary["test_accuracy"], "loss": summary["test_loss"]}
    assert last.step == summary["steps"]
    assert sorted(file.name for file in (tmp_path / "e").iterdir()) == [
        "evaluation.json", "report.html", "report.json", "violins.png",
    ]  # fmt: skip
    stored = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    assert stored["accuracy"] == summary["test_accuracy"]
    report = DepthReport.from_json((tmp_path / "e" / "report.json").read_text())
    assert [layer.index for layer in report.layers] == [0, 1, 2]
    assert report.layers[1].cosines is not None
    assert report.settings["samples"] == 16
    assert report.settings["accuracy"] == summary["test_accuracy"]
    page = (tmp_path / "e" / "report.html").read_text()
    assert f"2 blocks; {last.checkpoint} on the test split of digits</p>" in page
    saved = find_checkpoint(out, "best")
    assert saved is not None
    assert evaluate(out, device="cpu").checkpoint == saved.folder
    assert evaluate(saved.folder, device="cpu").figures == evaluate(out, device="cpu").figures


def test_the_probe_sees_the_split_that_is_evaluated(run: tuple[Path, dict[str, Any]]) -> None:
    out, _ = run
    test, train = (evaluate(out, split=split, device="cpu").report for split in ("test", "train"))
    assert train.layers[0].similarity != test.layers[0].similarity


def test_a_cache_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    assert recipe_of({"recipe": {"data": {"name": "digits", "cache": str(tmp_path)}}})["data"]["cache"] == str(tmp_path)
    gone = {"data": {"name": "digits", "cache": str(tmp_path / "gone")}}
    assert recipe_of({"recipe": gone}) == {"data": {"name": "digits", "cache": None}}


def test_evaluated_where_the_cache_of_the_training_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "here"))
    write_cifar(tmp_path / "cifar", 64, 12)
    data = {"name": "cifar10", "path": str(tmp_path / "cifar"), "cache": str(tmp_path / "there")}
    summary = train(parse_recipe({**TREE, "data": data, "batch": {"size": 32}, "out": str(tmp_path / "run")}))
    shutil.rmtree(tmp_path / "there")
    (tmp_path / "there").write_text("")  # a folder could not be made there
    (tmp_path / "there").chmod(0)
    found = evaluate(tmp_path / "run", which="last", device="cpu")
    assert found.figures["accuracy"] == summary["test_accuracy"]
    assert list((tmp_path / "here").iterdir())


def test_command(run: tuple[Path, dict[str, Any]]) -> None:
    out, summary = run
    found = CliRunner().invoke(app, ["evaluate", str(out), "--which", "last", "--device", "cpu", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["accuracy"] == summary["test_accuracy"]
    assert (out / "evaluation" / "violins.png").is_file()
    found = CliRunner().invoke(app, ["evaluate", str(out), "--split", "train", "--device", "cpu"])
    assert "train: accuracy" in found.stdout


def test_a_device_that_is_not_there(run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("foo", "cuda:x", "meta"):
        with pytest.raises(LeadlineError, match=f"device is '{device}'; give 'cpu', 'cuda' or nothing"):
            evaluate(run[0], device=device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(LeadlineError, match="device is 'cuda' and torch finds no GPU here"):
        evaluate(run[0], device="cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(LeadlineError, match=r"device is 'cuda:7' and torch finds 1 GPU\(s\) here"):
        evaluate(run[0], device="cuda:7")


def test_other_images_in_the_place_of_its_own(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """As where a relative path is read in another folder."""
    out = Path(shutil.copytree(run[0], tmp_path / "run"))
    found = json.loads((out / "images.json").read_text())
    (out / "images.json").write_text(json.dumps({**found, "test": "others"}))
    with pytest.raises(LeadlineError, match=r"^digits holds other test images than .*run began with; give"):
        evaluate(out, device="cpu")
    assert evaluate(out, device="cpu", split="train").figures
    assert evaluate(out, device="cpu", recipe=out / "recipe.yaml").figures  # on purpose


def test_a_checkpoint_knows_its_run_from_within(
    run: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(run[0], tmp_path / "run"))
    (out / "images.json").write_text(json.dumps({"test": "others"}))
    monkeypatch.chdir(out / run[1]["checkpoint"])
    with pytest.raises(LeadlineError, match="digits holds other test images than"):
        evaluate(".", device="cpu")


def test_a_run_of_an_earlier_version_had_its_drop_path_elsewhere(run: tuple[Path, dict[str, Any]]) -> None:
    saved = find_checkpoint(run[0], "last")
    assert saved is not None
    tree = saved.state["recipe"]
    earlier = {**tree, "model": {**tree["model"], "drop_path": 0.1}, "regularise": tree["regularise"]}
    found = parse_recipe(recipe_of({"recipe": earlier}))
    assert found == parse_recipe({**tree, "regularise": {**tree["regularise"], "drop_path": 0.1}})


def test_what_is_no_checkpoint(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(LeadlineError, match="holds no whole checkpoint"):
        evaluate(tmp_path)
    with pytest.raises(LeadlineError, match="unknown which 'first'"):
        evaluate(run[0], which="first")
    with pytest.raises(LeadlineError, match="unknown split 'dev'"):
        evaluate(run[0], split="dev", device="cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot be written"):
        evaluate(run[0], device="cpu", out=tmp_path / "file")


def test_averaged_weights_are_evaluated_from_their_own_folder(run: tuple[Path, dict[str, Any]]) -> None:
    out, summary = run
    averages = evaluate(out / summary["checkpoint"] / "ema", device="cpu")
    assert averages.figures == {"accuracy": summary["test_accuracy"], "loss": summary["test_loss"]}
    assert averages.step == summary["steps"]


def test_a_model_that_no_task_takes(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    leadline.create_model("bert_base", depth=1, dim=8, heads=1, vocab_size=9).save(tmp_path / "bert")
    with pytest.raises(LeadlineError, match="holds a model of the family 'bert', which cannot be evaluated; give a"):
        evaluate(tmp_path / "bert", recipe=run[0] / "recipe.yaml", device="cpu")
    (tmp_path / "bert" / "config.json").write_text("{")
    with pytest.raises(LeadlineError, match=r"config.json cannot be read .* it is damaged"):
        evaluate(tmp_path / "bert", device="cpu")


def test_a_cured_model_is_evaluated_by_the_recipe_of_its_run(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Cured back to the strengths that it was trained with, it has the run's figures."""
    out, recipe = run[0], run[0] / "recipe.yaml"
    cure_folder(out, tmp_path / "other", alpha=0.1, alpha_prime=0.1)
    cure_folder(tmp_path / "other", tmp_path / "back", alpha=0.5, alpha_prime=0.5)
    before = evaluate(out, device="cpu").figures
    assert evaluate(tmp_path / "other", recipe=recipe, device="cpu").figures != before
    assert evaluate(tmp_path / "back", recipe=recipe, device="cpu").figures == before
    found = CliRunner().invoke(app, ["evaluate", str(tmp_path / "back"), "--recipe", str(recipe), "--device", "cpu"])
    assert found.stdout.startswith(f"test: accuracy {before['accuracy']:.4g}, loss {before['loss']:.4g} (")
    with pytest.raises(LeadlineError, match="holds a model without its run; give the recipe"):
        evaluate(tmp_path / "back", device="cpu")
    with pytest.raises(LeadlineError, match="has the data 'text'; this model takes images"):
        evaluate(tmp_path / "back", recipe=RECIPES / "smoke_text.yaml", device="cpu")
    leadline.create_model("vit_tiny", depth=1, num_classes=3, image_size=8, patch_size=4).save(tmp_path / "three")
    with pytest.raises(LeadlineError, match="has num_classes 3 and the recipe's data 10"):
        evaluate(tmp_path / "three", recipe=recipe, device="cpu")
    leadline.create_model("vit_tiny", depth=1, num_classes=10, image_size=8, patch_size=4).save(tmp_path / "colour")
    with pytest.raises(LeadlineError, match="has channels 3 and the recipe's data 1"):
        evaluate(tmp_path / "colour", recipe=recipe, device="cpu")
