"""Verdicts follow from numbers, and recommend only what moved them."""

import math

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.curing import cure as cure_model
from leadline.curing import uncure
from leadline.errors import LeadlineError
from leadline.metrics import token_similarity
from leadline.probing import probe, trials
from leadline.report import LayerData, Trial
from leadline.report.verdict import fitted_rate, judge, with_trials

transformers = pytest.importorskip("transformers")


def layers(odds, **changes):
    """Layers whose similarity has these odds t_sim / t_div."""
    return [
        LayerData(
            index=i,
            name=str(i),
            similarity=o / (1 + o),
            diversity=1 / (1 + o),
            cosine=o / (1 + o),
            norm=1.0,
            effective_rank=10.0,
            **{name: value[i] for name, value in changes.items()},
        )
        for i, o in enumerate(odds)
    ]


def test_the_rate_of_a_known_growth():
    figures = layers([0.1 * 1.5**i for i in range(20)], gain=[None] + [math.sqrt(0.5)] * 19)
    verdict = judge(figures)
    assert verdict.rate == pytest.approx(1.5)
    assert verdict.expected_rate == pytest.approx(1.5)
    assert verdict.kind == "collapse"
    assert verdict.passes == {".5": 6, ".9": 12, ".99": 18}
    assert verdict.collapse_depth == 18
    assert "passing .5 at layer 6, .9 at layer 12, .99 at layer 18" in verdict.text
    assert "1 + gain^2 = 1.5" in verdict.text


def test_where_it_leads_when_it_goes_on():
    verdict = judge(layers([0.1 * 1.2**i for i in range(9)]))
    assert verdict.kind == "no collapse"
    assert verdict.text.startswith("Leave it alone: nothing collapses here.")
    exact = math.log(99 / 0.1) / math.log(1.2)  # 0.1 * 1.2^L = 99
    assert verdict.collapse_depth == pytest.approx(exact)
    assert verdict.text.endswith(
        "Its present depth is no trouble: by the trend of its last half, a model of the same kind would pass .99 only "
        f"if it were made about {exact:.0f} layers deep."
    )
    steep = judge(layers([6 * 400.0 ** (i - 8) for i in range(9)]))
    assert steep.kind == "no collapse"
    assert 8 < steep.collapse_depth < 8.5
    assert "about 9 layers deep" in steep.text  # deeper than it is, whatever the rounding
    falling = judge(layers([0.9**i for i in range(9)]))
    assert falling.collapse_depth is None
    assert falling.rate == pytest.approx(0.9)
    assert falling.recommendation is None


def test_no_prediction_from_few_layers_nor_of_what_is_far():
    growth = [0.1 * 1.2**i for i in range(9)]
    assert judge(layers(growth[:8])).collapse_depth is None
    assert judge(layers(growth)).collapse_depth is not None
    slow = judge(layers([0.1 * 1.05**i for i in range(9)]))  # 141 layers, from 8
    assert slow.collapse_depth is None
    assert "layers deep" not in slow.text


def test_rounding_at_the_floor_is_not_fitted():
    grown = [0.1 * 3**i for i in range(12)] + [1e7 * (1 + 0.3 * (i % 2)) for i in range(20)]
    assert fitted_rate(layers(grown)) == pytest.approx(3)


def test_tokens_alike_from_the_start_are_not_the_work_of_depth():
    verdict = judge(layers([19.0] * 6))
    assert verdict.kind == "no collapse"
    assert "alike from the start" in verdict.text


def test_rank_collapse_without_similarity():
    figures = layers([0.01] * 5)
    for layer, rank in zip(figures, [9.0, 5.0, 3.0, 1.8, 1.2], strict=True):
        layer.effective_rank = rank
    verdict = judge(figures)
    assert verdict.kind == "collapse"
    assert verdict.rank_collapse
    assert "Effective rank falls from 9.0 to 1.2" in verdict.text


def test_entropy_collapse_by_numbers():
    entropy = [None] + [[0.05, 0.1]] * 4
    uniform = [None] + [math.log(50)] * 4
    verdict = judge(layers([0.2] * 5, entropy=entropy, entropy_uniform=uniform))
    assert verdict.kind == "entropy collapse"
    assert verdict.entropy_collapse == [1, 2, 3, 4]
    spread = judge(layers([0.2] * 5, entropy=[None] + [[3.0, 3.5]] * 4, entropy_uniform=uniform))
    assert spread.kind == "no collapse"


def collapsed():
    return layers([0.1 * 2**i for i in range(12)])


def tried(name, last, **cure):
    return Trial(name, cure, [0.1, last], False)


def test_only_what_moved_the_number_is_recommended():
    before = tried("as it is", 0.995)
    candidates = [
        tried("alpha .5", 0.99, alpha=0.5),
        tried("alpha' .5", 0.995, alpha_prime=0.5),
        tried("tau .1", 0.999, de_escalation=0.1),
    ]
    verdict = with_trials(judge(collapsed()), collapsed(), candidates, before)
    assert verdict.recommendation is None
    assert "None of them helps here, so none is recommended" in verdict.text
    assert "alpha' .5 .995 (does nothing for it)" in verdict.text


def test_of_those_that_help_alike_the_mildest_is_recommended():
    before = tried("as it is", 0.995)
    candidates = [
        tried("alpha .5", 0.6, alpha=0.5),
        tried("tau .1", 0.08, de_escalation=0.1),
        tried("tau .5", 0.01, de_escalation=0.5),
    ]
    verdict = with_trials(judge(collapsed()), collapsed(), candidates, before)
    assert verdict.recommendation == {"de_escalation": 0.1}
    assert [trial.helps for trial in verdict.trials] == [True, True, True]
    assert "leadline.cure(model, de_escalation=.1)" in verdict.text
    assert verdict.before == before.similarity


# on models


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


def test_a_deep_bert_is_tried_and_told_what_helps():
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
    from contextlib import contextmanager

    @contextmanager
    def broken(model, **strengths):
        if "alpha" not in strengths:
            raise LeadlineError("not this one")
        weight = model.encoder.layer[3].output.dense.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        yield model
        with torch.no_grad():
            weight.copy_(kept)

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
