"""Verdicts on models: the cures that a probe tries, and which of them it recommends."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.curing import cure as cure_model
from leadline.curing import uncure
from leadline.errors import LeadlineError
from leadline.metrics import token_similarity
from leadline.probing import probe, trials

transformers = pytest.importorskip("transformers")


def deep_bert(depth=24, **options):
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.09,
        **options,
    )
    return transformers.BertModel(config).eval()


def test_a_deep_bert_is_tried_and_the_cure_that_helps_recommended():
    model = deep_bert()
    ids = torch.randint(3, 60, (2, 16))
    report = probe(model, ids)
    verdict = report.verdict
    assert verdict.kind == "collapse"
    assert verdict.rate == pytest.approx(verdict.expected_rate, abs=0.15)
    by_name = {trial.name: trial for trial in verdict.trials}
    assert set(by_name) == set(trials.CANDIDATES)
    assert verdict.before == pytest.approx([layer.similarity for layer in report.layers], abs=1e-5)
    for name, cure in trials.CANDIDATES.items():  # each number again, by hand
        cure_model(model, **cure)
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
        uncure(model)
        truth = [token_similarity(x).mean().item() for x in hidden]
        assert by_name[name].similarity == pytest.approx(truth, abs=1e-5)
    assert not by_name["alpha' .5"].helps  # it does nothing at initialisation, and the text says so
    assert "alpha' .5" in verdict.text
    assert by_name["tau .5"].helps
    chosen = [trial for trial in verdict.trials if trial.cure == verdict.recommendation]
    assert len(chosen) == 1
    assert chosen[0].helps


def test_our_own_models_are_tried_too():
    model = ll.create_model("bert_base", depth=24, dim=64, heads=4, ffn=64, vocab_size=60, init="xavier")
    report = probe(model, torch.randint(0, 60, (2, 16)))
    assert report.verdict.kind == "collapse"
    assert all(trial.error is None for trial in report.verdict.trials)
    assert report.verdict.recommendation is not None
    assert model.config.attention == "standard"


def test_tokens_that_vanish_are_alike_and_not_nan():
    torch.manual_seed(0)
    model = ll.create_model(
        "attention_only", image_size=32, patch_size=4, num_classes=10, depth=24, init="trunc_normal"
    )
    report = probe(model.eval(), torch.randn(2, 3, 32, 32), attention=False)
    assert report.verdict.recommendation == {"alpha": 0.5}
    assert all(trial.error is None for trial in report.verdict.trials)


def test_what_a_model_has_is_not_tried_again():
    model = ll.create_model(
        "bert_base", depth=24, dim=64, heads=4, ffn=64, vocab_size=60, init="xavier", attention="hopfield", alpha=0.0
    )
    report = probe(model, torch.randint(0, 60, (2, 16)))
    errors = {trial.name: trial.error for trial in report.verdict.trials}
    assert errors == {**dict.fromkeys(trials.CANDIDATES), "alpha' .5": "the model has it already"}
    assert "alpha' .5 " not in report.verdict.text.replace("and alpha' .5", "")


def test_nothing_is_tried_where_nothing_collapses(monkeypatch):
    monkeypatch.setattr(trials, "cured", None)  # would fail if it were called
    report = probe(deep_bert(depth=2), torch.randint(3, 60, (2, 16)))
    assert report.verdict.kind == "no collapse"
    assert report.verdict.trials == []
    assert report.verdict.recommendation is None
    assert "Leave it alone" in str(report.verdict)


def test_a_model_that_cannot_be_cured_says_so():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 40, enable_nested_tensor=False)
    report = probe(model, torch.randn(2, 9, 32))
    assert report.verdict.kind == "collapse"
    assert all(trial.error and "\n" not in trial.error for trial in report.verdict.trials)
    assert report.verdict.recommendation is None
    assert "No cure could be tried" in report.verdict.text


def test_a_cure_that_makes_nan_is_not_recommended(monkeypatch):
    @contextmanager
    def broken(model, **strengths):
        if "alpha" not in strengths:
            raise LeadlineError("not this one")
        weight = model.encoder.layer[3].output.dense.weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        yield model
        with torch.no_grad():
            weight.copy_(before)

    monkeypatch.setattr(trials, "cured", broken)
    report = probe(deep_bert(), torch.randint(3, 60, (2, 16)))
    errors = {trial.name: trial.error for trial in report.verdict.trials}
    assert errors["alpha .5"] == "it makes NaN"
    assert errors["tau .1"] == "not this one"
    assert report.verdict.recommendation is None


def test_entropy_collapse_of_a_model():
    model = deep_bert(depth=3)
    with torch.no_grad():
        for block in model.encoder.layer:
            for part in (block.attention.self.query, block.attention.self.key):
                part.weight.mul_(30)
    report = probe(model, torch.randint(3, 60, (2, 16)))
    assert report.verdict.kind == "entropy collapse"
    assert report.verdict.entropy_collapse == [1, 2, 3]
    assert all(trial.entropy is not None and len(trial.entropy) == 3 for trial in report.verdict.trials)
    start = sum(sum(layer.entropy) / 4 for layer in report.layers[1:])
    for trial in report.verdict.trials:
        share = (sum(trial.entropy) - start) / (3 * math.log(16))
        assert trial.helps == (share >= 0.05)
