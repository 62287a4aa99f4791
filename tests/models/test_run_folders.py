"""Load, probe, cure and generate take the best checkpoint of a training run whose folder they get."""

import json

import pytest
import torch

import leadline as ll
from leadline.curing import cure_folder
from leadline.data.text.tokenizers import ByteTokenizer, save_tokenizer
from leadline.models.checkpoints import STATE
from leadline.models.io import model_folder
from leadline.probing import open_model
from leadline.training.run_folder import checkpoint
from leadline.training.writing import open_language_model

SIZES = {"depth": 1, "dim": 8, "heads": 2, "vocab_size": 256, "max_tokens": 16}


def build(seed):
    torch.manual_seed(seed)
    return ll.create_model("gpt2_small", **SIZES)


def run_of(out, steps, averages=False):
    """A run with a checkpoint per step; the one before the last is the best by its evaluation."""
    for step in steps:

        def write(folder, step=step):
            build(step).save(folder)
            (folder / STATE).write_text(json.dumps({"score": step if step < steps[-1] else -1}))
            if averages:
                build(100 + step).save(folder / "ema")

        checkpoint.save(out, step, write)
    save_tokenizer(ByteTokenizer(), out)
    return out


def is_model(model, seed):
    return torch.equal(model.token.weight, build(seed).token.weight)


READERS = {
    "load": lambda folder, tmp_path: ll.load(folder),
    "probe": lambda folder, tmp_path: open_model(str(folder))[0],
    "probe --pretrained": lambda folder, tmp_path: open_model(pretrained=folder)[0],
    "cure": lambda folder, tmp_path: ll.load(cure_folder(folder, tmp_path / "cured", alpha=0.5)),
    "generate": lambda folder, tmp_path: open_language_model(folder, "cpu")[0],
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_the_best_whole_checkpoint_of_a_run(read, tmp_path):
    run = run_of(tmp_path / "run", (1, 2, 3, 4))
    (run / "step-000003" / "model.safetensors").write_bytes(b"cut short")
    assert is_model(read(run, tmp_path), 2)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_damaged_checkpoint_that_is_named_is_refused(read, tmp_path):
    file = run_of(tmp_path / "run", (1, 2)) / "step-000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ll.LeadlineError, match=r"model.safetensors is not what was written"):
        read(file.parent, tmp_path)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_averaged_weights_stand_for_a_run(read, tmp_path):
    assert is_model(read(run_of(tmp_path / "run", (1, 2), averages=True), tmp_path), 101)


def test_a_checkpoint_is_loaded_as_it_is_and_the_last_may_be_asked_for(tmp_path):
    run = run_of(tmp_path, (1, 2), averages=True)
    assert is_model(ll.load(run / "step-000002"), 2)
    assert model_folder(run, "last") == run / "step-000002" / "ema"
    assert is_model(open_language_model(run, "cpu", "last")[0], 102)


@pytest.mark.parametrize("place", [".", "step-000002", "step-000002/ema"])
def test_the_tokenizer_is_found_above(place, tmp_path, monkeypatch):
    """The folder above is searched, and a cure copies the tokenizer."""
    run = run_of(tmp_path / "run", (1, 2), averages=True)
    monkeypatch.chdir(run / place)
    assert open_language_model(".", "cpu")[1].kind == "byte"
    cure_folder(".", tmp_path / "cured", alpha=0.5)
    assert (tmp_path / "cured" / "tokenizer.json").read_text() == (run / "tokenizer.json").read_text()


def nothing(folder):
    folder.mkdir()


def damaged(folder):
    run_of(folder, (1, 2))
    for step in (1, 2):
        (folder / f"step-00000{step}" / "config.json").unlink()


def foreign(folder):
    def write(place):
        (place / STATE).write_text("{}")

    checkpoint.save(folder, 1, write)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("prepare", "part"),
    [
        (nothing, "(it has no config.json) nor a checkpoint of a run; give the folder of a model or of a run"),
        (damaged, "holds damaged checkpoints only; give"),
        (foreign, "has no config.json: its model is not ours"),
    ],
)
def test_folders_that_are_neither_are_one_line(read, prepare, part, tmp_path):
    prepare(tmp_path / "given")
    with pytest.raises(ll.LeadlineError) as error:
        read(tmp_path / "given", tmp_path)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cured").exists()
