"""Verdicts follow from numbers, and only cures that improve the number are recommended."""

import math

import pytest

from leadline.report import LayerData, Trial
from leadline.report.verdict import _n, fitted_rate, judge, with_trials


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
    assert verdict.text.startswith("Leave it alone: the tokens do not collapse. The entropy of attention was not")
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


def test_numbers_read_as_people_write_them():
    assert [_n(value) for value in (0.5, 0.9998, 1.0, -3.7e-7, 0.0, None)] == [".5", ".9998", "1", "0", "0", "?"]
