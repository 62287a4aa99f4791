"""Language models trained by the engine: from files to a summary, resumed at the exact batch, memory included."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import leadline as ll
from leadline.data.text.tokenizers import load_tokenizer
from leadline.training import load_recipe, parse_recipe, train
from leadline.training.perplexity import LEAKY, perplexity
from leadline.training.tasks.language import LanguageTask

CPU = torch.device("cpu")
GPT = {"name": "gpt2_small", "depth": 2, "dim": 16, "heads": 2}
XL = {"name": "transformer_xl_base", "depth": 2, "dim": 16, "heads": 2, "ffn": 32, "memory_length": 24, "cutoffs": [60]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for split, count in (("train", 400), ("valid", 40), ("test", 40)):
        lines = (f"{split[0]} mark {i % 9} fathom {i % 7} by the lead , deep {(i * i) % 11}\n" for i in range(count))
        (root / f"{split}.txt").write_text("".join(lines))
    return root


def recipe(folder, out, model=GPT, **changes):
    data = {"name": "text", "path": str(folder), "tokenizer": "byte", "tokens": 16, "cache": str(folder / "cache")}
    tree = {
        "model": dict(model),
        "data": {**data, **changes.pop("data", {})},
        "length": "12 steps",
        "batch": {"size": 4, **changes.pop("batch", {})},
        "optimizer": {"lr": 3e-3},
        "schedule": {"name": "constant"},
        "evaluate": "6 steps",
        "checkpoint": {"every": "6 steps"},
        "out": str(out),
        "device": "cpu",
    }
    return parse_recipe({**tree, **changes})


def quiet():
    return Console(file=io.StringIO())


@pytest.mark.parametrize("model", [GPT, XL, {**XL, "attention": "hopfield", "de_escalation": 0.5}])
def test_a_run_from_files_to_a_summary(folder, tmp_path, model):
    changes = {"length": "60 steps", "evaluate": "60 steps", "watch": {"every": "60 steps"}}
    summary = train(recipe(folder, tmp_path, model, **changes), console=quiet())
    assert summary["test_loss"] < 4  # ln 256 = 5.5
    assert {"test_perplexity", "test_word_perplexity", "test_bits_per_byte"} <= summary.keys()
    assert summary["data"]["tokens_per_step"] == 64
    assert summary["data"]["train_bytes"] == (folder / "train.txt").stat().st_size
    assert json.loads((tmp_path / "summary.json").read_text())["test_loss"] == summary["test_loss"]
    assert (tmp_path / "probe.csv").is_file()
    saved = ll.load(tmp_path / summary["checkpoint"])
    task = LanguageTask(recipe(folder, tmp_path, model), CPU)
    if model is GPT:
        again = perplexity(saved, task.texts["test"], load_tokenizer(tmp_path), length=16)
    else:
        again = task.evaluate(saved, "test")
    assert again["loss"] == pytest.approx(summary["test_loss"], abs=1e-6)


@pytest.mark.parametrize(("model", "parts"), [(GPT, 1), (XL, 1), (XL, 2)])
def test_a_stopped_run_goes_on_at_the_exact_batch_with_its_memory(folder, tmp_path, model, parts):
    batch = {"accumulate": parts}
    train(recipe(folder, tmp_path / "whole", model, batch=batch), console=quiet())
    train(recipe(folder, tmp_path / "parts", model, batch=batch, length="6 steps"), console=quiet())
    train(recipe(folder, tmp_path / "parts", model, batch=batch), console=quiet())
    for file in ("model", "optimizer", *(["carry"] if model is XL else [])):
        whole, resumed = (
            load_file(tmp_path / run / "step-000012" / f"{file}.safetensors") for run in ("whole", "parts")
        )
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_accumulated_parts_give_the_step_of_the_whole(folder, tmp_path):
    for model in (GPT, XL):
        runs = []
        for parts in (1, 2):
            out = tmp_path / f"{model['name']}-{parts}"
            train(recipe(folder, out, model, batch={"accumulate": parts}, optimizer={"lr": 1e-4}), console=quiet())
            runs.append(load_file(out / "step-000012" / "model.safetensors"))
        assert all(torch.allclose(runs[0][name], runs[1][name], atol=1e-6) for name in runs[0])


def test_memory_is_carried_from_step_to_step(folder, tmp_path):
    task = LanguageTask(recipe(folder, tmp_path, XL), CPU)
    model = task.make_model()
    carry, losses = None, []
    for step in range(3):
        batch = task.batches(step)
        loss, _, carry = task.loss(model, batch, carry)
        losses.append(loss.item())
    assert carry[0].shape == (4, 24, 16)
    alone, _, _ = task.loss(model, task.batches(2), None)
    assert alone.item() != losses[2]


def test_vocabulary_and_positions_follow_from_the_data(folder, tmp_path):
    data = {"tokenizer": "word"}
    task = LanguageTask(recipe(folder, tmp_path / "a", data=data), CPU)
    config = task.make_model().config
    assert config.vocab_size == task.tokenizer.vocab_size < 60
    assert config.max_tokens == 16
    wide = LanguageTask(recipe(folder, tmp_path / "b", {**GPT, "vocab_size": 64, "max_tokens": 40}, data=data), CPU)
    assert (wide.make_model().config.vocab_size, wide.length) == (64, 16)
    assert wide.make_model().config.max_tokens == 40
    plain = recipe(folder, tmp_path / "c", {**GPT, "max_tokens": 20}, data={"tokens": None})
    assert LanguageTask(plain, CPU).length == 20
    assert task.probe_inputs().shape == (2, 16)
    assert torch.equal(task.samples(5)[0], torch.from_numpy(task.texts["valid"].ids[:16].astype("int64")))


def test_a_stride_is_used_in_evaluation(folder, tmp_path):
    torch.manual_seed(0)
    side_by_side = LanguageTask(recipe(folder, tmp_path / "a"), CPU)
    sliding = LanguageTask(recipe(folder, tmp_path / "b", data={"stride": 4}), CPU)
    model = side_by_side.make_model().eval()
    with torch.no_grad():
        model.positions.table.weight.normal_()
        losses = [task.evaluate(model)["loss"] for task in (side_by_side, sliding)]
    assert losses[0] != losses[1]
    assert losses[1] == perplexity(model, sliding.texts["valid"], sliding.tokenizer, stride=4)["loss"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": {"name": "vit_tiny"}}, "which does not write text; give a decoder"),
        ({"model": {**GPT, "vocab_size": 100}}, "model.vocab_size is 100; the tokenizer has 256 tokens"),
        ({"model": {**GPT, "max_tokens": 8}}, "data.tokens is 16; the model has positions for 8"),
        ({"model": XL, "regularise": {"smoothing": 0.1}}, "has no smoothed labels"),
        ({"model": XL, "data": {"stride": 4}}, "reads segment after segment"),
        ({"data": {"stride": 17}}, "data.stride is 17; it must lie between 1 and 16, the tokens of a window"),
        ({"data": {"tokenizer": "word", "vocab_size": 1}}, "vocab_size is 1; <eos> and <unk> are two words of it"),
        ({"data": {"vocab_size": 500}}, "vocab_size is 500 and tokenizer 'byte', which has its own; set it to null"),
        ({"data": {"subset": "abc"}}, "subset is 'abc', which belongs to hub; leave it out"),
        ({"data": {"column": "abc"}}, "holds no parquet, which has columns; leave it out"),
        ({"data": {"path": None}}, "give either path"),
        ({"data": {"hub": "some/set"}}, "give either path"),
        ({"data": {"name": "wikitext2", "hub": "some/set"}}, "hub and subset are wikitext2's own"),
        ({"data": {"tokens": 0}}, "data.tokens is 0"),
        ({"data": {"tokeniser": "byte"}}, "did you mean 'tokenizer'?"),
        ({"data": {"tokenizer": "letters"}}, "unknown tokenizer 'letters'"),
        ({"batch": {"size": 4000}}, "too few for"),
    ],
)
def test_bad_recipes_are_one_clear_line(folder, tmp_path, changes, part):
    with pytest.raises(ll.LeadlineError) as error:
        LanguageTask(recipe(folder, tmp_path, **changes), CPU)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_another_tokenizer_needs_another_folder(folder, tmp_path):
    LanguageTask(recipe(folder, tmp_path), CPU)  # which begins no run
    train(recipe(folder, tmp_path, data={"tokenizer": "word"}, length="2 steps"), console=quiet())
    with pytest.raises(ll.LeadlineError, match="holds a run with another tokenizer; give what it began with"):
        LanguageTask(recipe(folder, tmp_path), CPU).settle(tmp_path)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_text_of_one_token_is_found_at_once(folder, tmp_path, split):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_bytes(b"x" if name == split else (folder / f"{name}.txt").read_bytes())
    with pytest.raises(ll.LeadlineError, match=rf"{split}.txt has one token; perplexity needs at least 2"):
        LanguageTask(recipe(tmp_path, tmp_path / "out"), CPU)


def test_a_run_goes_on_with_the_text_it_began_with_wherever_it_lies(folder, tmp_path):
    out, moved = tmp_path / "out", tmp_path / "moved"
    train(recipe(folder, out, length="2 steps"), console=quiet())
    moved.mkdir()
    for split in ("train", "valid", "test"):
        (moved / f"{split}.txt.gz").write_bytes(gzip.compress((folder / f"{split}.txt").read_bytes()))
    summary = train(recipe(moved, out, length="4 steps"), console=quiet())
    assert summary["steps"] == 4
    (moved / "valid.txt.gz").write_bytes(gzip.compress(b"another text, by the mark\n" * 40))
    with pytest.raises(ll.LeadlineError, match=r"began with other text: valid of .*moved differ; give the text it"):
        train(recipe(moved, out, length="6 steps"), console=quiet())
    assert train(recipe(folder, out, length="6 steps"), console=quiet())["steps"] == 6


def test_files_left_out_are_said_and_missing_splits_found_at_once(folder, tmp_path, capsys):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes((folder / f"{split}.txt").read_bytes())
    (tmp_path / "README.md").write_text("about\n")
    for _ in range(2):
        task = LanguageTask(recipe(tmp_path, tmp_path / "out"), CPU)
    assert task.describe()["files_left_out"] == 1
    assert task.describe()["train_bytes"] == (folder / "train.txt").stat().st_size
    assert (
        capsys.readouterr().err.count("not read, since others are named after a split and these are not: README") == 1
    )
    (tmp_path / "test.txt").unlink()
    with pytest.raises(ll.LeadlineError, match="has no test text"):
        LanguageTask(recipe(tmp_path, tmp_path / "new", data={"cache": str(tmp_path / "cache")}), CPU)
    assert len(list((tmp_path / "cache").glob("text-*"))) == 3 * 2  # with their locks, and only those from before


def test_wikitext_in_a_folder_is_modelled_by_words(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(" = Lead = \n \n A <unk> lead line . \n" * 20)
    task = LanguageTask(
        recipe(tmp_path, tmp_path / "out", XL, data={"name": "wikitext2", "path": str(tmp_path), "tokenizer": None}),
        CPU,
    )
    assert task.tokenizer.kind == "word"
    assert task.tokenizer.vocab_size == 8  # = Lead A <unk> lead line . <eos>


def test_of_a_copy_of_the_hub_the_own_wikitext_is_taken(tmp_path):
    for subset, lines in (("wikitext-103-v1", 60), ("wikitext-2-v1", 40), ("wikitext-2-raw-v1", 50)):
        for split in ("train", "validation", "test"):
            (tmp_path / subset).mkdir(exist_ok=True)
            file = tmp_path / subset / f"{split}-00000-of-00001.parquet"
            pq.write_table(pa.table({"text": [" A lead line . \n"] * lines}), file)
    for name, lines in (("wikitext103", 60), ("wikitext2", 40)):
        data = {"name": name, "path": str(tmp_path), "tokenizer": None}
        task = LanguageTask(recipe(tmp_path, tmp_path / "out", XL, data=data), CPU)
        assert task.describe()["train_tokens"] == task.describe()["test_tokens"] == 5 * lines


def test_a_text_that_is_cut_by_place_is_said_to_be(folder, tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes((folder / "train.txt").read_bytes())
    LanguageTask(recipe(tmp_path / "book.txt", tmp_path / "out", data={"cache": str(tmp_path / "cache")}), CPU)
    assert "book.txt names no split: 90 % are for training" in capsys.readouterr().err.replace("\n", "")


def test_the_summary_of_a_leaky_model_says_what_its_figures_are_worth(folder, tmp_path):
    leaky = {**XL, "de_escalation": 1.0, "de_escalation_form": "leaky"}
    for model, notes in ((XL, None), (leaky, [LEAKY])):
        assert LanguageTask(recipe(folder, tmp_path / "out", model), CPU).describe().get("notes") == notes


RECIPES = sorted(
    file
    for file in (Path(__file__).parents[2] / "recipes").glob("*.yaml")
    if file.name.startswith(("gpt2", "llama", "transformer_xl", "kerneldoc", "smoke_text"))
)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_recipes_are_valid_and_their_models_can_be_built(file):
    recipe = load_recipe(file)
    vocabulary = {"vocab_size": 267_735 if recipe.model.name == "transformer_xl_base" else 50_304}
    with torch.device("meta"):
        model = ll.create_model(recipe.model.name, **{**vocabulary, **recipe.model_options()})
    size = sum(parameter.numel() for parameter in model.parameters())
    if "fig7" in file.stem:
        assert size == 200_987_338 + (820 if model.config.norm == "pre" else 0)  # a final norm
    if file.stem == "transformer_xl_base":
        assert size == 151_107_538
    if "hopfield" in file.stem:
        assert model.config.strengths == (0.5, 0.5)
        plain = load_recipe(file.with_name(f"{file.stem.removesuffix('_hopfield')}.yaml"))
        same = {name: value for name, value in plain if name not in ("model", "out")}
        assert same == {name: value for name, value in recipe if name not in ("model", "out")}


def test_the_recipes_are_all_there():
    names = {file.stem for file in RECIPES}
    assert {"gpt2_small_wikitext103", "gpt2_medium_wikitext103_hopfield", "llama_wikitext103", "kerneldoc_xl"} <= names
    assert {f"transformer_xl_fig7_{arm}" for arm in ("post", "pre", "deescalated")} <= names
