"""The strengths of a cure: those in force, a change of them, what is saved, and the makes that hold them."""

import copy
import io
import json
from dataclasses import asdict

import cure_zoo as zoo
import pytest
import torch
import transformers as T

import leadline as ll
from leadline.curing import Strengths, cure, load_cured, uncure
from leadline.curing.entry import find_make, set_strengths, strengths
from leadline.errors import LeadlineError

ALL = {"alpha": 0.3, "alpha_prime": 0.6, "de_escalation": 0.7}
OURS = {"dim": 12, "heads": 3, "depth": 2, "vocab_size": 31, "max_tokens": 9}


@pytest.mark.parametrize("make", zoo.TEXT_MODELS + zoo.IMAGE_MODELS)
def test_strengths_in_force(make):
    """Defaults stand where nothing was given, and layers are numbered from 0."""
    model = cure(make(), alpha=0.3, de_escalation=1, layers=[-1, 0, 0])
    want = {"alpha": 0.3, "alpha_prime": 0.0, "de_escalation": 1.0, "de_escalation_at": "block-end", "start": "zero"}
    assert asdict(strengths(model)) == {**want, "layers": [0, 3]}
    given = Strengths(**ALL, de_escalation_at="ffn-input", start="scores")
    assert strengths(cure(uncure(model), **asdict(given))) == given
    set_strengths(model, 0.1, 0.2)
    assert strengths(model) == Strengths(**{**asdict(given), "alpha": 0.1, "alpha_prime": 0.2})


def test_strengths_in_force_of_our_own_model():
    model = cure(ll.create_model("gpt2_small", **OURS, attention="hopfield", start="scores"), alpha=0.2)
    assert strengths(model) == Strengths(alpha=0.2, alpha_prime=0.5, de_escalation=0.0, start="scores")
    set_strengths(model, 0.1, 0.0)
    assert strengths(model) == Strengths(alpha=0.1, alpha_prime=0.0, de_escalation=0.0, start="scores")
    assert [block.attention.alpha.value for block in model.blocks] == [0.1, 0.1]
    assert strengths(cure(uncure(model), de_escalation=0.5)).de_escalation_at == "block-end"


def test_a_model_that_is_not_cured_has_no_strengths():
    for ask in (strengths, lambda model: set_strengths(model, 0.1, 0.1)):
        with pytest.raises(LeadlineError, match=r"GPT2LMHeadModel is not cured; call leadline\.cure\(model, \.\.\.\)"):
            ask(zoo.gpt2())


def test_the_entry_in_a_saved_configuration(tmp_path):
    """Its names and values are a file format: folders that were saved before must load."""
    model = cure(zoo.gpt2(attn_implementation="eager"), **ALL, layers=[1, 2])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["leadline"] == {
        "version": ll.__version__,
        "alpha": 0.3,
        "alpha_prime": 0.6,
        "de_escalation": 0.7,
        "de_escalation_at": "block-end",
        "start": "zero",
        "layers": [1, 2],
        "attn_implementation": "eager",
    }
    assert strengths(load_cured(tmp_path)) == strengths(model)


def test_load_takes_a_cured_folder(tmp_path):
    model, inputs = cure(zoo.gpt2(), **ALL), zoo.inputs_for(zoo.gpt2)
    model.save_pretrained(tmp_path)
    loaded = ll.load(tmp_path)
    assert not loaded.training
    assert torch.equal(zoo.result(loaded, inputs), zoo.result(model, inputs))


def test_copies_and_pickles_of_our_own_models_are_cured_models_of_their_own():
    model, ids = zoo.liven(ll.create_model("gpt2_small", **OURS)), torch.randint(31, (2, 7))
    plain = model(ids)
    cured = cure(model, **ALL)(ids)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(ids), cured)
        assert torch.equal(uncure(twin)(ids), plain)
        assert torch.equal(model(ids), cured)


def test_the_make_of_a_model():
    own = ll.create_model("gpt2_small", **OURS)
    models = {"ours": own, "timm": zoo.timm_vit(), "huggingface.install": zoo.gpt2()}
    for name, model in models.items():
        make, part = find_make(torch.nn.Sequential(model))
        assert make.__name__ == f"leadline.curing.makes.{name}"
        assert part is (model.transformer if name == "huggingface.install" else model)


def test_a_model_of_timm_that_transformers_wraps_is_refused():
    """It would be saved without its cure."""
    wrapped = T.TimmWrapperModel(T.TimmWrapperConfig(architecture="vit_tiny_patch16_224"))
    assert any("timm" in type(module).__module__ for module in wrapped.modules())
    with pytest.raises(LeadlineError, match="TimmWrapperModel cannot be cured; known are our own models, timm's"):
        cure(wrapped, alpha=0.5)
