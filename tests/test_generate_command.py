"""``leadline generate``: a prompt in, text out, from runs and models; and ``stream_tokens`` behind it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
import yaml
from typer.testing import CliRunner

import leadline as ll
from leadline.cli import app
from leadline.data.text.store import encode_text
from leadline.data.text.tokenizers import ByteTokenizer, PairTokenizer, WordTokenizer, save_tokenizer
from leadline.models.generation import collect, stream_tokens
from leadline.training.evaluate import evaluate
from leadline.training.perplexity import perplexity
from leadline.training.writing import _decoded, open_language_model, write

RECIPES = Path(__file__).parents[1] / "recipes"
TEXT = "Größe der Tiefe, 水深 und mehr.\n" * 30
SIZES = {"depth": 2, "dim": 16, "heads": 2, "max_tokens": 24}


def build(name="gpt2_small", vocab_size=256, **options):
    torch.manual_seed(0)
    extra = {"ffn": 24, "cutoffs": (60,), "memory_length": 500} if name.startswith("transformer_xl") else {}
    model = ll.create_model(name, **{**SIZES, **extra, "vocab_size": vocab_size, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def saved(folder, tokenizer=None, **options):
    tokenizer = tokenizer or ByteTokenizer()
    build(vocab_size=tokenizer.vocab_size, **options).save(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("name", ["gpt2_small", "transformer_xl_base"])
@pytest.mark.parametrize("temperature", [0, 20])
def test_ids_that_no_token_has_are_not_written(tmp_path, name, temperature):
    """A vocabulary filled up to a round number: here most of it."""
    build(name, vocab_size=2000).save(tmp_path)
    save_tokenizer(ByteTokenizer(), tmp_path)
    model, tokenizer = open_language_model(tmp_path, "cpu")
    ids = torch.tensor(tokenizer.encode("lead").astype("int64"))[None]
    free = model.generate(ids, 20, temperature=temperature, generator=torch.Generator().manual_seed(0))
    assert (free >= tokenizer.vocab_size).any() or temperature == 0
    options = {"temperature": temperature, "generator": torch.Generator().manual_seed(0), "vocabulary": 256}
    told = torch.cat(list(stream_tokens(model, ids, 20, **options)), 1)[0].tolist()
    assert max(told) < tokenizer.vocab_size
    options = {"temperature": temperature, "generator": torch.Generator().manual_seed(0)}
    assert "lead" + "".join(write(model, tokenizer, "lead", 20, **options)) == tokenizer.decode(
        [*ids[0].tolist(), *told]
    )


@pytest.mark.parametrize("name", ["gpt2_small", "llama", "transformer_xl_base"])
def test_writes_what_the_model_generates(tmp_path, name):
    extra = {"kv_heads": 1, "ffn": 20} if name == "llama" else {}
    saved(tmp_path, name=name, **extra)
    model, tokenizer = open_language_model(tmp_path, "cpu")
    prompt = "The lead"
    ids = torch.tensor(tokenizer.encode(prompt).astype("int64"))[None]
    want = tokenizer.decode(model.generate(ids, 12)[0].tolist())
    for arguments in ((), ("--no-cache",)):
        assert run(tmp_path, prompt, "--tokens", 12, "--device", "cpu", *arguments).stdout == f"{want}\n"
    answer = json.loads(run(tmp_path, prompt, "--tokens", 12, "--json").stdout)
    assert answer["prompt"] + answer["text"] == want
    assert answer["tokens"] == 12


def test_samples_by_seed(tmp_path):
    saved(tmp_path)
    options = (tmp_path, "The lead", "--temperature", 1, "--top-k", 40, "--top-p", 0.9, "--json", "--device", "cpu")
    first, again, other = (json.loads(run(*options, "--seed", seed).stdout)["text"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), PairTokenizer.train([TEXT], 300), WordTokenizer.train([TEXT])], ids=lambda t: t.kind
)
def test_pieces_are_whole_characters_and_make_up_the_text(tokenizer):
    """Whatever the model says, here the text itself byte by byte, comes out as it is read, in whole characters."""
    ids = tokenizer.encode(TEXT).astype("int64")

    class Parrot(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.at = build().config, 8
            self.positions, self.weight = build().positions, torch.nn.Parameter(torch.zeros(1))
            self.positions.limit = None

        def forward(self, fresh, mask=None, *, positions=None, cache=None):
            self.at += 1
            logits = torch.zeros(1, 1, tokenizer.vocab_size)
            logits[0, 0, ids[self.at - 1]] = 1
            return logits

    prompt = tokenizer.decode(ids[:8].tolist())
    pieces = list(write(Parrot(), tokenizer, prompt, len(ids) - 8))
    assert prompt + "".join(pieces) == tokenizer.decode(ids.tolist())
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > len(TEXT) / 20  # it streams


@pytest.mark.parametrize("count", [1, 3, 5, 12])
def test_bytes_that_are_no_text_do_not_spoil_what_follows(count):
    broken, cut = b"\xff" * count, b"\xf0\x9f" * count
    content = b"ok " + broken + "水深 \N{ANCHOR}\N{WAVING HAND SIGN}".encode() + cut + b" end\xe6"
    stream = (torch.tensor([[byte]]) for byte in content)
    pieces = list(_decoded(stream, ByteTokenizer(), list(b"x")))
    assert "".join(pieces) == content.decode(errors="replace")
    assert len(pieces) > 10


def test_a_tokenizer_that_falls_back_to_bytes_streams_whole_characters():
    """LLaMA's kind: a row of byte tokens is read as a whole, and while it is cut none of it is text."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "d": 257, "<unk>": 258}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PairTokenizer(inner)
    text = "d 水深水深水深 d \N{ANCHOR}\N{WAVING HAND SIGN} d"
    ids = tokenizer.encode(text).tolist()
    pieces = list(_decoded((torch.tensor([[i]]) for i in ids[1:]), tokenizer, ids[:1]))
    assert "".join(pieces) == text[1:]
    assert len(pieces) == len(text) - 1


def test_a_prompt_that_is_too_long_is_told(tmp_path):
    saved(tmp_path)
    prompt = "by the mark five, by the deep six"
    with pytest.warns(UserWarning, match="the prompt has 33 tokens; the model sees the last 24 of them"):
        answer = run(tmp_path, prompt, "--tokens", 3, "--device", "cpu")
    assert answer.stdout.startswith(prompt)
    assert answer.stdout[len(prompt) :] == run(tmp_path, prompt[-24:], "--tokens", 3, "--device", "cpu").stdout[24:]


def test_goes_on_beyond_the_positions_it_has():
    model = build()
    ids = torch.randint(256, (1, 20))
    cached, plain = (collect(model, ids, 40, cache=cache) for cache in (True, False))
    assert cached.shape == (1, 60)
    assert torch.equal(cached, plain)
    within = model.generate(ids, 5)
    assert torch.equal(cached[:, :25], within)


def test_one_token_at_a_time_with_the_cache():
    """After the prompt the model is given single tokens."""
    model, seen = build(), []
    model.token.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    assert len(list(stream_tokens(model, torch.randint(256, (2, 6)), 7))) == 7
    assert seen == [6, 1, 1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A few steps of real training on text: the folder of the run, its summary beside it."""
    from leadline.training import parse_recipe, train

    place = tmp_path_factory.mktemp("trained")
    data = place / "data"
    data.mkdir()
    for split in ("train", "valid", "test"):
        (data / f"{split}.txt").write_text(TEXT)
    text = {"name": "text", "path": str(data), "tokenizer": "byte", "tokens": 16, "cache": str(place / "cache")}
    tree = {
        "model": {"name": "gpt2_small", "depth": 1, "dim": 8, "heads": 2},
        "data": text,
        "length": "4 steps",
        "batch": {"size": 2},
        "device": "cpu",
        "regularise": {"ema": 0.5},
        "out": str(place / "run"),
    }
    return place / "run", train(parse_recipe(tree))


@pytest.mark.parametrize("of_the_run", [True, False], ids=["run", "checkpoint"])
def test_a_cured_run_still_writes(trained, of_the_run, tmp_path):
    """The tokenizer lies in the folder of the run; a cure takes it along."""
    source, summary = trained
    source = source if of_the_run else source / summary["checkpoint"]
    words = ["cure", source, "--alpha", 0.5, "--alpha-prime", 0.3, "--out", tmp_path / "cured"]
    assert CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False).exit_code == 0
    plain = open_language_model(source, "cpu")[0] if of_the_run else ll.load(source)
    want = ll.cure(plain, alpha=0.5, alpha_prime=0.3).generate(torch.tensor([list(b"Tiefe")]), 6)
    said = run(tmp_path / "cured", "Tiefe", "--tokens", 6, "--device", "cpu")
    assert said.exit_code == 0
    assert said.stdout == ByteTokenizer().decode(want[0].tolist()) + "\n"


def test_a_model_without_its_run_is_evaluated_by_a_recipe(trained, tmp_path):
    source, _ = trained
    open_language_model(source, "cpu")[0].save(tmp_path)
    save_tokenizer(ByteTokenizer(), tmp_path)
    with pytest.raises(ll.LeadlineError, match=r"does not know its text; give .* by --data, or its --recipe"):
        evaluate(tmp_path, device="cpu")
    with pytest.raises(ll.LeadlineError, match="has the data 'digits'; this model takes text"):
        evaluate(tmp_path, device="cpu", recipe=RECIPES / "smoke_digits.yaml")
    again = evaluate(tmp_path, device="cpu", recipe=source / "recipe.yaml")
    assert again.figures == evaluate(source, device="cpu").figures


def test_another_text_in_the_place_of_its_own(trained, tmp_path, monkeypatch):
    """A relative path, read in another folder."""
    from leadline.training import parse_recipe, train

    tree = yaml.safe_load((trained[0] / "recipe.yaml").read_text())
    for place in ("a", "b"):
        shutil.copytree(tree["data"]["path"], tmp_path / place / "text")
    (tmp_path / "b" / "text" / "test.txt").write_text("another text\n" * 30)
    out = tmp_path / "run"
    monkeypatch.chdir(tmp_path / "a")
    train(parse_recipe({**tree, "data": {**tree["data"], "path": "text"}, "out": str(out)}))
    assert evaluate(out, device="cpu").figures
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ll.LeadlineError, match=r"^text holds other test text than .*run began with; give"):
        evaluate(out, device="cpu")
    assert evaluate(out, device="cpu", data="text").figures


def test_a_run_a_checkpoint_and_a_model_of_transformers(trained, tmp_path):
    folder, summary = trained
    found = [run(place, "The", "--tokens", 5).stdout for place in (folder, folder / summary["checkpoint"])]
    assert found[0] == found[1]
    found = evaluate(folder, device="cpu", out=tmp_path / "evaluation")
    assert found.checkpoint == folder / summary["checkpoint"] / "ema"
    assert found.figures["loss"] == pytest.approx(summary["test_loss"], abs=1e-6)  # the averaged weights
    assert found.figures["bytes"] == len(TEXT.encode())
    assert {file.name for file in found.files} == {"evaluation.json", "report.html", "report.json", "violins.png"}

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=300, n_positions=16)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    tokenizer = PairTokenizer.train([TEXT], 300)
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner).save_pretrained(tmp_path / "theirs")
    model, read = open_language_model(tmp_path / "theirs", "cpu")
    ids = torch.tensor(read.encode("Tiefe").astype("int64"))[None]
    want = theirs.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert run(tmp_path / "theirs", "Tiefe", "--tokens", 5, "--json").exit_code == 0
    assert torch.equal(model.generate(ids, 5), want)


def test_what_a_terminal_cannot_show_is_a_question_mark(tmp_path):
    saved(tmp_path)
    command = [sys.executable, "-m", "leadline", "generate", str(tmp_path), "深さ", "--tokens", "1", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"??")


def test_evaluates_on_another_text_with_its_own_tokenizer(tmp_path, monkeypatch):
    """A vocabulary of the training text, perplexity of a folder that has no training text, as WikiText at hand."""
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    saved(tmp_path / "model", WordTokenizer.train([TEXT]))
    other = tmp_path / "wiki"
    other.mkdir()
    for split in ("valid", "test"):
        (other / f"wiki.{split}.tokens").write_text(f" {split} der Tiefe , <unk> \n" * 20)
    arguments = ["evaluate", tmp_path / "model", "--data", other, "--split", "valid", "--stride", 8, "--json"]
    answer = json.loads(CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout)
    assert answer["words"] == 120
    assert answer["unknown_words"] == pytest.approx(3 / 6)  # "valid", "," and "Tiefe", of which only "Tiefe," is known
    assert answer["word_perplexity"] == pytest.approx(answer["perplexity"])
    model, tokenizer = open_language_model(tmp_path / "model", "cpu")
    text = encode_text((other / "wiki.valid.tokens").read_text(), tokenizer)
    assert answer["loss"] == pytest.approx(perplexity(model, text, tokenizer, stride=8)["loss"], rel=1e-6)
    with pytest.raises(ll.LeadlineError, match="give a file or folder of it by --data"):
        evaluate(tmp_path / "model", device="cpu")


def test_a_text_that_is_not_there_is_told_with_what_to_give(trained, tmp_path):
    model = saved(tmp_path / "model")
    (tmp_path / "wiki.valid.tokens").write_text(TEXT)
    with pytest.raises(ll.LeadlineError, match="has no test text, only valid; give --split valid, or other text"):
        evaluate(model, data=tmp_path / "wiki.valid.tokens", device="cpu")
    assert evaluate(model, data=tmp_path / "wiki.valid.tokens", split="valid", device="cpu").figures["loss"] > 0
    shutil.copytree(trained[0], tmp_path / "run")
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    recipe["data"]["path"] = str(tmp_path / "gone")
    (tmp_path / "gone.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ll.LeadlineError, match=r"gone, where this model's text was, does not exist; give --data or"):
        evaluate(tmp_path / "run", recipe=tmp_path / "gone.yaml", device="cpu")


def test_what_a_model_cannot_do_is_said_before_anything_is_shown(tmp_path):
    saved(tmp_path, attention="hopfield", scheme="forward-forward")
    answer = CliRunner().invoke(app, ["generate", str(tmp_path), "The lead", "--tokens", "3", "--device", "cpu"])
    assert isinstance(answer.exception, ll.LeadlineError)
    assert "generate with cache=False (--no-cache)" in str(answer.exception)
    assert answer.stdout == ""
    assert run(tmp_path, "The lead", "--tokens", 3, "--device", "cpu", "--no-cache").stdout.startswith("The lead")


def test_a_text_without_splits_is_said_to_be_cut_and_a_short_window_takes_a_shorter_stride(tmp_path, monkeypatch):
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notes.md").write_text(TEXT)
    saved(tmp_path / "model")
    found = evaluate(tmp_path / "model", data=tmp_path / "notes.md", device="cpu", context=1)
    assert found.figures["bytes"] < len(TEXT.encode()) / 10
    assert found.figures["tokens"] > found.report.settings["tokens"] == 2  # of the text, and of what was probed
    (note,) = found.notes
    assert note.endswith("names no split: this is its part for test; to score all of it call it test.txt")
    recipe = tmp_path / "recipe.yaml"
    settings = f"{{name: text, path: {tmp_path / 'notes.md'}, tokenizer: byte, tokens: 24, stride: 12}}"
    recipe.write_text(f"model: {{name: gpt2_small}}\ndata: {settings}\nlength: 1 steps\n")
    own = evaluate(tmp_path / "model", recipe=recipe, device="cpu", context=6)
    assert own.figures == evaluate(tmp_path / "model", recipe=recipe, device="cpu", context=6, stride=6).figures
    assert own.notes == []


def test_memory_may_be_longer_in_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    saved(tmp_path / "xl", name="transformer_xl_base", memory_length=4)
    (tmp_path / "test.txt").write_text(TEXT[:200])
    options = {"data": tmp_path / "test.txt", "device": "cpu", "context": 8}
    short, long, lanes = (
        evaluate(tmp_path / "xl", **options, **more).figures["loss"] for more in ({}, {"memory": 64}, {"lanes": 3})
    )
    assert len({short, long, lanes}) == 3


@pytest.mark.parametrize(
    ("prepare", "part"),
    [
        (lambda p: p / "nowhere", "is not a folder; give the folder of a model or of a run"),
        (lambda p: p, "holds neither a model (it has no config.json) nor a checkpoint of a run"),
        (lambda p: (build().save(p), p)[1], "put the model's tokenizer there"),
        (
            lambda p: (ll.create_model("vit_tiny", depth=1).save(p), p)[1],
            "holds a vit model, which does not write text",
        ),
        (lambda p: (saved(p), build(vocab_size=9).save(p), p)[2], "they do not belong together"),
        (lambda p: ((p / "config.json").write_text("{"), p)[1], "config.json cannot be read"),
        (lambda p: ((p / "config.json").write_text("[]"), p)[1], "config.json holds a list; a model's is a mapping"),
        (lambda p: ((p / "config.json").write_text("{}"), p)[1], "cannot be loaded by transformers"),
    ],
)
def test_bad_folders_are_one_clear_line(tmp_path, prepare, part):
    with pytest.raises(ll.LeadlineError) as error:
        run(prepare(tmp_path), "The")
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_requests_are_one_clear_line(tmp_path):
    saved(tmp_path)
    for arguments, part in (
        (("", "--tokens", 3), "the prompt is empty"),
        (("The", "--tokens", 0), "--tokens is 0; it must be at least 1"),
        (("The", "--temperature", -1), "temperature is -1"),
        (("The", "--temperature", "nan"), "temperature is nan; it must be 0"),
        (("The", "--temperature", "inf"), "temperature is inf"),
        (("The", "--temperature", 1e-45), "temperature is 1e-45"),
        (("The", "--temperature", 1, "--top-k", 0), "top_k is 0; it must be at least 1"),
        (("The", "--top-k", 3), "top_k is 3 and temperature 0, which"),
        (("The", "--temperature", 1, "--seed", 2**64), "--seed is 18446744073709551616; it must fit into 64 bits"),
        (("The", "--temperature", 1, "--top-k", -4), "top_k is -4"),
        (("no UTF-8: \udcff",), "the prompt is not UTF-8"),
    ):
        with pytest.raises(ll.LeadlineError, match=part):
            run(tmp_path, *arguments)
    with pytest.raises(ll.LeadlineError, match="the prompt is not UTF-8"):
        CliRunner().invoke(app, ["generate", str(tmp_path), "-"], input=b"\xff\xfe", catch_exceptions=False)
    with pytest.raises(ll.LeadlineError, match="only Transformer-XL has a memory"):
        evaluate(tmp_path, data=tmp_path, memory=3, device="cpu")
    with pytest.raises(ll.LeadlineError, match=r"context is 1000000; the model has positions for \d+ tokens"):
        evaluate(tmp_path, data=tmp_path, context=1000000, device="cpu")
    ll.create_model("vit_tiny", depth=1).save(tmp_path / "images")
    with pytest.raises(ll.LeadlineError, match=r"stride given, but .* holds no language model"):
        evaluate(tmp_path / "images", stride=3, device="cpu")


def test_numbers_for_evaluation_are_checked_and_a_view_of_the_future_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "test.txt"
    text.write_text(TEXT[:200])
    saved(tmp_path / "xl", name="transformer_xl_base", de_escalation=1.0, de_escalation_form="leaky")
    options = ["evaluate", str(tmp_path / "xl"), "--data", str(text), "--device", "cpu"]
    for option, value, least in (("lanes", -2, 1), ("memory", -5, 0), ("stride", 0, 1), ("context", -3, 1)):
        with pytest.raises(ll.LeadlineError, match=rf"^{option} is {value}; it must be at least {least}$"):
            CliRunner().invoke(app, [*options, f"--{option}", str(value)], catch_exceptions=False)
    said = CliRunner().invoke(app, [*options, "--memory", "0"], catch_exceptions=False)
    assert "perplexity" in said.stdout
    assert f"tokens {len(TEXT[:200].encode())}, words" in said.stdout  # a count in full, not 2.8e+02
    assert "sees the tokens that it predicts: its figures are no perplexity" in said.stderr
    answer = json.loads(CliRunner().invoke(app, [*options, "--json"], catch_exceptions=False).stdout)
    assert "no perplexity" in answer["notes"][0]
    saved(tmp_path / "causal", name="transformer_xl_base", de_escalation=1.0)
    assert evaluate(tmp_path / "causal", data=text, device="cpu").notes == []


def test_a_cured_model_of_transformers_and_a_wrong_share_are_refused(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    ll.cure(model, alpha=0.5)
    model.save_pretrained(tmp_path / "cured")
    with pytest.raises(ll.LeadlineError, match="holds a cured GPT2LMHeadModel; use it in Python"):
        open_language_model(tmp_path / "cured")
    ours = ll.create_model("gpt2_small", depth=1, dim=8, heads=2, vocab_size=40, max_tokens=16)
    with pytest.raises(ll.LeadlineError, match=r"top_p is 3.0; it must lie in \(0, 1\]"):
        stream_tokens(ours, torch.zeros(1, 2, dtype=torch.long), 2, top_p=3.0)
