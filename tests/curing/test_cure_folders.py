"""Cured models on disk."""

import json

import cure_zoo as zoo
import pytest
import torch
import transformers as T
from typer.testing import CliRunner

import leadline as ll
from leadline.cli import app
from leadline.curing import cure, cure_folder, is_cured_folder, load_cured, uncure
from leadline.errors import LeadlineError

ALL = {"alpha": 0.3, "alpha_prime": 0.6, "de_escalation": 0.7}
MAKERS = (*zoo.TEXT_MODELS, zoo.mistral, zoo.vit, zoo.deit)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", MAKERS)
def test_saved_and_loaded_bit_for_bit(make, attention, tmp_path):
    for i, strengths in enumerate(
        (ALL, {"alpha": 0.4}, {"de_escalation": 0.5, "de_escalation_at": "ffn-input", "layers": [1, 3]})
    ):
        model, inputs = make(attn_implementation=attention), zoo.inputs_for(make)
        cure(model, **strengths).save_pretrained(tmp_path / str(i))
        assert is_cured_folder(tmp_path / str(i))
        loaded = load_cured(tmp_path / str(i))
        assert type(loaded) is type(model)
        assert not loaded.training
        assert torch.equal(zoo.result(loaded, inputs), zoo.result(model, inputs))
        assert torch.equal(zoo.result(uncure(loaded), inputs), zoo.result(uncure(model), inputs))


def test_half_precision_and_shards(tmp_path):
    model, inputs = cure(zoo.gpt2().bfloat16(), **ALL), zoo.inputs_for(zoo.gpt2)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_cured(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(zoo.result(loaded, inputs), zoo.result(model, inputs))
    assert load_cured(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("strengths", [ALL, {"alpha": 0.4}, {"de_escalation": 0.5}], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_plain_transformers_stops(make, strengths, tmp_path):
    model = cure(make(), **strengths)
    model.save_pretrained(tmp_path)
    for kind in (type(model), T.AutoModel):
        for options in ({}, {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}):
            with pytest.raises(ValueError, match=r"leadline\.load"):
                kind.from_pretrained(tmp_path, **options)


def test_the_attention_function_stops_it_too(tmp_path):
    """The second barrier: without the first, the model needs a function that runs only with its state."""
    model = cure(zoo.gpt2(), alpha_prime=0.5)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["fusion_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(LeadlineError, match="no state reached it"):
        T.GPT2LMHeadModel.from_pretrained(tmp_path)(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize("strengths", [{"alpha": 0.4}, {"alpha_prime": 0.5}, {"de_escalation": 0.5}], ids=str)
def test_a_transformers_without_fusions_stops_too(strengths, tmp_path, monkeypatch):
    """One that passes over the unknown fusion, in a process that has not imported us, lacks the attention function."""
    model = cure(zoo.gpt2(), **strengths)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.fusion_mapping.register_fusion_patches", lambda *arguments: None)
    known = {name: T.AttentionInterface()[name] for name in T.AttentionInterface() if name != "leadline"}
    monkeypatch.setattr(T.AttentionInterface, "_global_mapping", known)
    for kind in (type(model), T.AutoModelForCausalLM):
        with pytest.raises(ValueError, match='attn_implementation="leadline"` is not supported'):
            kind.from_pretrained(tmp_path)


def test_uncured_models_are_saved_plainly(tmp_path):
    model, inputs = zoo.gpt2(), zoo.inputs_for(zoo.gpt2)
    before = model.config.to_dict()
    want = zoo.result(model, inputs)
    cure(model, **ALL).save_pretrained(tmp_path / "cured")
    uncure(model).save_pretrained(tmp_path / "plain")
    assert not is_cured_folder(tmp_path / "plain")
    saved = model.config.to_dict()
    assert {name: saved[name] for name in before if name not in ("dtype", "architectures")} == {
        name: value for name, value in before.items() if name not in ("dtype", "architectures")
    }
    assert torch.equal(zoo.result(T.GPT2LMHeadModel.from_pretrained(tmp_path / "plain"), inputs), want)
    cure(model, alpha=0).save_pretrained(tmp_path / "zero")
    assert torch.equal(zoo.result(T.GPT2LMHeadModel.from_pretrained(tmp_path / "zero"), inputs), want)


def test_two_models_of_one_configuration_do_not_disturb_each_other():
    config = T.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=31)
    one, other = T.GPT2LMHeadModel(config).eval(), T.GPT2LMHeadModel(config).eval()
    inputs = zoo.inputs_for(zoo.gpt2)
    want = zoo.result(other, inputs)
    cure(one, **ALL)
    assert torch.equal(zoo.result(other, inputs), want)
    assert not hasattr(other.config, "leadline")
    assert one.config is one.transformer.config is one.transformer.h[1].attn.config


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.bert, zoo.vit])
def test_cure_folder(make, tmp_path):
    model, inputs = make(), zoo.inputs_for(make)
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    out = cure_folder(tmp_path / "plain", tmp_path / "cured", **ALL)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert torch.equal(zoo.result(load_cured(out), inputs), zoo.result(cure(model, **ALL), inputs))
    with pytest.raises(LeadlineError, match=r"cured already.*uncure"):
        cure_folder(out, tmp_path / "again", alpha=0.5)
    assert not (tmp_path / "again").exists()


def test_cure_folder_of_our_own_model(tmp_path):
    model = zoo.liven(ll.create_model("gpt2_small", dim=8, heads=2, depth=2, vocab_size=31, max_tokens=9))
    model.save(tmp_path / "plain")
    cure_folder(tmp_path / "plain", tmp_path / "cured", **ALL)
    ids = torch.randint(31, (2, 7))
    assert not is_cured_folder(tmp_path / "cured")  # leadline.load reads it as any model of ours
    assert torch.equal(ll.load(tmp_path / "cured")(ids), cure(model, **ALL)(ids))


def test_cure_folder_leaves_what_is_not_given(tmp_path):
    options = {"dim": 8, "heads": 2, "depth": 2, "vocab_size": 31, "max_tokens": 9, "attention": "hopfield"}
    ll.create_model("gpt2_small", **options, start="scores").save(tmp_path / "plain")
    assert ll.load(cure_folder(tmp_path / "plain", tmp_path / "cured", alpha=0.2)).config.start == "scores"


@pytest.mark.parametrize("ours", [True, False])
def test_a_cure_that_finds_no_room_is_one_line_and_leaves_nothing(ours, tmp_path, monkeypatch):
    if ours:
        ll.create_model("gpt2_small", dim=8, heads=2, depth=2, vocab_size=31, max_tokens=9).save(tmp_path / "plain")
    else:
        zoo.gpt2().save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy2", full)
        with pytest.raises(LeadlineError, match=r"cured cannot be written \(No space left on device\); give another"):
            cure_folder(tmp_path / "plain", tmp_path / "cured", **ALL)
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match=r"cannot be written \(Not a directory\)"):
        cure_folder(tmp_path / "plain", tmp_path / "file" / "x", **ALL)
    cure_folder(tmp_path / "plain", tmp_path / "cured", **ALL)


def test_a_cure_that_our_model_has_already_is_refused(tmp_path):
    small = {"depth": 1, "dim": 16, "heads": 2, "image_size": 16, "patch_size": 8}
    ll.create_model("vit_tiny", attention="hopfield", **small).save(tmp_path / "cured")  # .5 and .5 unless given
    with pytest.raises(ll.LeadlineError, match=r"has alpha 0.5, alpha_prime 0.5, start zero already; give a strength"):
        cure_folder(tmp_path / "cured", tmp_path / "again", alpha=0.5)
    assert not (tmp_path / "again").exists()
    assert ll.load(cure_folder(tmp_path / "cured", tmp_path / "other", alpha=0.2)).config.alpha == 0.2


def test_another_tau_stays_at_the_place_that_the_model_has(tmp_path):
    sizes = {"depth": 1, "dim": 16, "heads": 2, "vocab_size": 20, "max_tokens": 8}
    ll.create_model("gpt2_small", **sizes, de_escalation=1.0, de_escalation_at="ffn-input").save(tmp_path / "own")
    with pytest.raises(ll.LeadlineError, match=r"de_escalation 1.0, at ffn-input already"):
        cure_folder(tmp_path / "own", tmp_path / "same", de_escalation=1.0)
    config = ll.load(cure_folder(tmp_path / "own", tmp_path / "less", de_escalation=0.5)).config
    assert (config.de_escalation, config.de_escalation_at) == (0.5, "ffn-input")
    words = ["cure", str(tmp_path / "own"), "--de-escalation", ".5", "--de-escalation-at", "block-end", "--out"]
    assert CliRunner().invoke(app, [*words, str(tmp_path / "moved")]).exit_code == 0
    assert ll.load(tmp_path / "moved").config.de_escalation_at == "block-end"


def damaged(tmp_path, **changes):
    zoo.gpt2().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return tmp_path


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_folders_that_are_no_checkpoint(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[1]")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{not json")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    cases = {
        tmp_path / "nowhere": "is not a folder",
        tmp_path / "empty": "holds neither a model (it has no config.json) nor a checkpoint of a run",
        tmp_path / "list": "holds a list",
        tmp_path / "text": "is not JSON",
        tmp_path / "bare": "cannot be loaded",
        damaged(tmp_path / "anonymous", architectures=None): "names no model_type and architectures",
        damaged(
            tmp_path / "future", architectures=["GPT9LMHeadModel"]
        ): "the class 'GPT9LMHeadModel', which this transformers",
    }
    for folder, message in cases.items():
        with pytest.raises(LeadlineError) as error:
            cure_folder(folder, out, alpha=0.5)
        assert message in one_line(error)
        with pytest.raises(LeadlineError) as error:
            load_cured(folder)
        one_line(error)
        assert not is_cured_folder(folder)
        assert not out.exists()


def test_other_bad_folders(tmp_path):
    good = damaged(tmp_path / "good")
    with pytest.raises(LeadlineError, match="not an empty folder"):
        cure_folder(good, good, alpha=0.5)
    with pytest.raises(LeadlineError, match="no strength is given"):
        cure_folder(good, tmp_path / "out")
    with pytest.raises(LeadlineError, match="holds no cured model"):
        load_cured(good)
    with pytest.raises(LeadlineError, match="lacks alpha, alpha_prime"):
        load_cured(damaged(tmp_path / "old", leadline={"version": "0"}))
    (good / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(LeadlineError, match="cannot be loaded"):
        cure_folder(good, tmp_path / "out", alpha=0.5)
    assert not (tmp_path / "out").exists()
