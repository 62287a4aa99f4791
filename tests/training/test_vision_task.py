"""The task of image classification inside the engine: what it fills in, its loss, its evaluation, resuming."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leadline.data.images.digits import load_digits
from leadline.errors import LeadlineError
from leadline.training.evaluate import evaluate
from leadline.training.loop import train
from leadline.training.recipe import parse_recipe
from leadline.training.tasks import build_task

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")
MODEL = {"name": "vit_tiny", "depth": 1, "dim": 16, "heads": 2, "patch_size": 4, "pool": "max"}


def recipe(**sections: Any) -> Any:
    return parse_recipe({"model": MODEL, "data": {"name": "digits"}, "length": 1, "batch": {"size": 64}, **sections})


def test_the_model_fits_the_data() -> None:
    config = build_task(recipe(), CPU).make_model().config
    assert (config.num_classes, config.image_size, config.channels) == (10, 8, 1)
    resized = build_task(recipe(data={"name": "digits", "image_size": 12}), CPU)
    assert resized.make_model().config.image_size == 12
    assert resized.probe_inputs().shape == (16, 1, 12, 12)
    with pytest.raises(LeadlineError, match=r"model\.num_classes is 7 and the data's 10"):
        build_task(recipe(model={**MODEL, "num_classes": 7}), CPU).make_model()
    with pytest.raises(LeadlineError, match=r"data\.mean has 3 numbers"):
        build_task(recipe(data={"name": "digits", "mean": [0.5] * 3}), CPU)
    with pytest.raises(LeadlineError, match="model is gpt2_small, which takes no images; give one such as vit_tiny"):
        build_task(recipe(model={"name": "gpt2_small"}), CPU).make_model()
    for wrong in ({"name": "digits", "path": "x"}, {"name": "cifar10", "store": "workers"}):
        with pytest.raises(LeadlineError, match="leave"):
            recipe(data=wrong)


class Fixed(nn.Module):
    """Logits from the mean of an image: a model whose evaluation can be done by hand."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        mean = pixels.mean((1, 2, 3))
        return torch.stack([-((mean - i / 10) ** 2) * 30 for i in range(10)], dim=-1)


def test_evaluation_is_over_the_whole_split() -> None:
    task = build_task(recipe(data={"name": "digits", "valid": 0.1}), CPU)
    train_set, test_set = load_digits()
    model = Fixed().train()
    for split, (images, labels) in {"test": test_set, "train": train_set, "valid": train_set}.items():
        if split != "test":
            members = task.members[split]  # type: ignore[attr-defined]
            images, labels = images[members], labels[members]
        logits = model((images - 0.3049) / 0.3758)
        found = task.evaluate(model, split)
        assert found["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item(), abs=2e-3)
        assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-3)
    assert model.training
    held = task.describe()
    assert (held["train_images"], held["valid_images"], held["test_images"]) == (1293, 144, 360)
    with pytest.raises(LeadlineError, match="unknown split 'dev'"):
        task.evaluate(model, "dev")
    assert task.watched == "valid"
    without = build_task(recipe(), CPU)
    assert without.watched == "test"
    with pytest.raises(LeadlineError, match=r"split is 'valid' and data\.valid is 0"):
        without.evaluate(model, "valid")


def test_a_run_says_which_split_it_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for held, split in ((0.0, "test"), (0.1, "valid")):
        settings: dict[str, Any] = {"data": {"name": "digits", "valid": held}, "length": "2 steps", "evaluate": 1}
        summary = train(recipe(**settings, out=str(tmp_path / split)))
        assert f"{split}: accuracy" in capsys.readouterr().err
        assert summary["best"]["split"] == split
        assert ("valid_accuracy" in summary) == (split == "valid")
        assert 0 <= summary["test_accuracy"] <= 1


def test_loss_smooths_and_takes_soft_labels() -> None:
    task = build_task(recipe(regularise={"smoothing": 0.2}), CPU)
    batch = task.batches(0)
    model = task.make_model()
    loss, metrics, carry = task.loss(model, batch, None)
    logits = model(batch["pixels"])
    soft = torch.full((64, 10), 0.02).scatter_add(1, batch["labels"][:, None], torch.full((64, 1), 0.8))
    expected = -(soft * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, expected)
    assert carry is None
    assert metrics["accuracy"] == (logits.argmax(-1) == batch["labels"]).float().mean()
    again, metrics, _ = task.loss(model, {"pixels": batch["pixels"], "labels": soft}, None)
    torch.testing.assert_close(again, expected)
    assert metrics == {}


@pytest.mark.parametrize("limit", [None, 200])
def test_limit(limit: int | None) -> None:
    task = build_task(recipe(data={"name": "digits", "limit": limit, "valid": 0.25}), CPU)
    members = task.members  # type: ignore[attr-defined]
    count = limit or 1437
    assert sorted(torch.cat(list(members.values())).tolist()) == list(range(count))
    assert len(members["valid"]) == round(count / 4)
    assert task.batches.steps_per_epoch == (count - round(count / 4)) // 64


def test_a_limit_and_a_probe_of_a_folder_see_every_class(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label, name in enumerate(("a", "b", "c")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(12):
                image = Image.new("RGB", (8, 8), (80 * label, 0, 0))
                image.save(tmp_path / split / name / f"{i}.png")
    data = {"name": "folder", "path": str(tmp_path), "store": "memory", "image_size": 8, "limit": 18, "valid": 0.01}
    task = build_task(recipe(data={**data, "cache": str(tmp_path / "cache")}, batch={"size": 4}), CPU)
    members = task.members  # type: ignore[attr-defined]
    assert len(members["valid"]) == 1  # never none where some were asked for
    assert len({*members["train"].tolist()} | {*members["valid"].tolist()}) == 18
    assert {int(i) // 12 for i in members["train"]} == {0, 1, 2}
    data = {**data, "limit": 4, "valid": 0, "cache": str(tmp_path / "cache")}
    few = build_task(recipe(data=data, batch={"size": 4}), CPU).members  # type: ignore[attr-defined]
    assert sorted(int(i) // 12 for i in few["train"]) == [0, 0, 1, 2]
    assert len(task.samples(6).flatten(1).mean(1).unique()) == 3  # type: ignore[attr-defined]


def write_images(folder: Path) -> None:
    """Two classes that differ in colour, in the hub's layout of CIFAR-10, and the same as a folder."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", 64), ("test", 16)):
        labels = [i % 2 for i in range(count)]
        pixels = generator.integers(0, 100, (count, 32, 32, 3), dtype=np.uint8)
        encoded = []
        for i, label in enumerate(labels):
            pixels[i, :, :, label] += 150
            file = folder / "folder" / split / "ab"[label] / f"{i:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[i]).save(file)
            encoded.append({"bytes": file.read_bytes(), "path": None})
        (folder / "hub").mkdir(exist_ok=True)
        table = pa.table({"img": encoded, "label": pa.array(labels, pa.int64())})
        pq.write_table(table, folder / "hub" / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize(
    "data",
    [
        {"name": "cifar10", "path": "hub"},
        {"name": "folder", "path": "folder", "image_size": 24, "workers": 1},
        {"name": "folder", "path": "folder", "image_size": 24, "store": "memory"},
    ],
    ids=["parquet", "workers", "memory"],
)
def test_trains_on_files_and_goes_on_bit_for_bit(tmp_path: Path, data: dict[str, Any]) -> None:
    """Everything on: what is resumed in the middle ends as what ran through, and it learns the colours."""
    write_images(tmp_path)
    pytest.importorskip("timm")
    tree = {
        "model": {**MODEL, "patch_size": 8},
        "data": {**data, "path": str(tmp_path / data["path"]), "cache": str(tmp_path / "cache")},
        "batch": {"size": 16, "accumulate": 2},
        "optimizer": {"lr": 5e-3},
        "augment": {"flip": True, "crop": "resized", "scale": [0.5, 1.0], "rand_augment": "rand-m9-n1", "erase": 0.2,
                    "mixup": 0.2, "cutmix": 1.0, "mix_prob": 0.5},
        "schedule": {"name": "constant"},
        "evaluate": "4 epochs",
        "checkpoint": {"every": "4 epochs"},
    }  # fmt: skip
    whole = train(parse_recipe({**tree, "length": 8, "out": str(tmp_path / "whole")}))
    first = train(parse_recipe({**tree, "length": 4, "out": str(tmp_path / "parts")}))
    resumed = train(parse_recipe({**tree, "length": 8, "out": str(tmp_path / "parts")}))
    assert (first["steps"], resumed["steps"]) == (16, 32)
    assert resumed["test_loss"] == whole["test_loss"]
    weights = [(tmp_path / run / "step-000032" / "model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert whole["test_accuracy"] >= 0.9


def test_a_run_on_a_folder_keeps_its_classes(tmp_path: Path) -> None:
    """A run that goes on needs the images it began with; its evaluation needs test images alone, of its classes."""
    write_images(tmp_path)
    data = {"name": "folder", "path": str(tmp_path / "folder"), "image_size": 16, "cache": str(tmp_path / "cache")}
    tree = {"model": {**MODEL, "patch_size": 8}, "data": data, "batch": {"size": 16}, "out": str(tmp_path / "run")}
    before = train(parse_recipe({**tree, "length": 1}))["test_accuracy"]
    new = tmp_path / "new"
    shutil.copytree(tmp_path / "folder" / "test" / "b", new / "test" / "b")
    found = evaluate(tmp_path / "run", data=new, device="cpu", out=tmp_path / "found")
    everything = evaluate(tmp_path / "run", device="cpu")
    assert everything.figures["accuracy"] == before
    right = [evaluate(tmp_path / "run", data=at, device="cpu").figures["accuracy"] for at in (new, half(tmp_path, "a"))]
    assert sum(right) / 2 == pytest.approx(before)  # "b" is the second class here too, though it comes first
    assert json.loads((tmp_path / "found" / "evaluation.json").read_text())["data"] == str(new) == found.data
    (new / "test" / "b").rename(new / "test" / "zebra")
    shutil.copy(tmp_path / "run" / "recipe.yaml", tmp_path / "copied.yaml")
    for recipe_file in (None, tmp_path / "copied.yaml"):
        with pytest.raises(LeadlineError, match=r"zebra is no class that was trained \(a, b\)"):
            evaluate(tmp_path / "run", data=new, recipe=recipe_file, device="cpu")
    copied = shutil.copytree(sorted((tmp_path / "run").glob("step-*"))[-1], tmp_path / "alone")
    assert evaluate(copied, device="cpu").notes == [
        f"the classes of the training are unknown; those of {tmp_path / 'folder'} are taken, in their order"
    ]
    with pytest.raises(LeadlineError, match=r"new has no folder train"):
        evaluate(tmp_path / "run", data=new, split="train", device="cpu")
    (tmp_path / "folder" / "train" / "a" / "00.png").unlink()
    with pytest.raises(LeadlineError, match=r"began with other images: train of .*folder differ; give the images it"):
        train(parse_recipe({**tree, "length": 2}))


def test_a_refused_run_writes_nothing(tmp_path: Path) -> None:
    tree = {"model": MODEL, "data": {"name": "digits"}, "batch": {"size": 64}, "length": "2 steps"}
    train(parse_recipe({**tree, "out": str(tmp_path / "run")}))
    (tmp_path / "run" / "images.json").unlink()  # a run from before they were written down
    with pytest.raises(LeadlineError, match="holds a run of another recipe"):
        train(parse_recipe({**tree, "seed": 1, "out": str(tmp_path / "run")}))
    assert not (tmp_path / "run" / "images.json").exists()
    with pytest.raises(LeadlineError, match="take 5"):
        train(parse_recipe({**tree, "schedule": {"warmup": "5 steps"}, "out": str(tmp_path / "other")}))
    assert not (tmp_path / "other").exists()


def test_images_may_be_mended_until_there_is_a_checkpoint(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for i in range(12):
            at = tmp_path / "folder" / split / "ab"[i % 2]
            at.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)).save(at / f"{i:02}.png")
    spoilt = tmp_path / "folder" / "train" / "a" / "00.png"
    good = spoilt.read_bytes()
    spoilt.write_bytes(good[:40])
    data = {"name": "folder", "path": str(tmp_path / "folder"), "image_size": 8, "workers": 0}
    tree = {"model": MODEL, "data": data, "batch": {"size": 12}, "length": "1 steps", "out": str(tmp_path / "run")}
    with pytest.raises(LeadlineError, match=r"00.png is no image that can be decoded .* remove it before a run begins"):
        train(parse_recipe(tree))
    spoilt.unlink()
    for name in ("new.png", "more.png"):
        (spoilt.parent / name).write_bytes(good)
    assert train(parse_recipe(tree))["steps"] == 1
    (spoilt.parent / "new.png").unlink()
    with pytest.raises(LeadlineError, match="began with other images"):
        train(parse_recipe({**tree, "length": "2 steps"}))


@pytest.mark.parametrize(("number", "advice"), [(28, "make room there and run the same command"), (13, "give another")])
def test_a_folder_that_cannot_be_written_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(LeadlineError, match=rf"run cannot be used \({os.strerror(number)}\); {advice}"):
        train(recipe(out=str(tmp_path / "run")))


def half(folder: Path, name: str) -> Path:
    shutil.copytree(folder / "folder" / "test" / name, folder / "half" / "test" / name)
    return folder / "half"
