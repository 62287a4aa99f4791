"""A slice of benchmarks/zoo.py: the truth against what the libraries hand out, and the probe against the truth."""

import functools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.zoo import models_of, run
from benchmarks.zoo_models import comparison
from benchmarks.zoo_models.case import call, read_towers
from benchmarks.zoo_models.page import page
from benchmarks.zoo_models.truth import as_tokens, cosine, entropy, measure, similarity

SLICE = {
    "transformers": [
        *("albert", "bert", "clip", "deberta-v2", "gpt2", "gpt_oss", "llama", "pixtral", "squeezebert", "swin", "t5"),
        *("vitdet", "whisper", "xlm", "xlnet"),
    ],
    "timm": [
        *("coat_lite_tiny", "deit_tiny_distilled_patch16_224", "levit_conv_128s", "samvit_base_patch16_224"),
        *("swin_tiny_patch4_window7_224", "tnt_s_patch16_224", "twins_svt_small"),
    ],
    "torch": [
        *("encoder, sequence first", "one-token blocks", "own blocks, channel first", "own blocks, channel last"),
        *("own stages, channel first", "paired streams", "two towers"),
    ],
}
CASES = [pytest.param(library, name, id=f"{library} {name}") for library in SLICE for name in SLICE[library]]

# What the probe refuses, and what it says to pass. It is right about all others.
KNOWN_REFUSED = {
    ("transformers", "pixtral"): "layout=",  # the images of a batch stand in one row
    ("transformers", "squeezebert"): "blocks=",  # its blocks are never called as modules
    ("transformers", "xlm"): "blocks=",  # no module is a block
    ("timm", "tnt_s_patch16_224"): "layout=",  # pixels and patches
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other over such small products
    yield
    torch.set_num_threads(threads)


@functools.cache
def measured(library, name):
    pytest.importorskip(library)
    case = models_of(library).case(name)
    model, inputs = case.make()
    return model, inputs, measure(case, model, inputs)


@pytest.mark.parametrize(("library", "name"), CASES)
def test_the_probe_is_right_or_refuses(library, name):
    pytest.importorskip(library)
    row = comparison.try_case(models_of(library).case(name))
    assert {row.cure_alpha, row.cure_alpha_prime, row.cure_tau} <= {"ok", "refused"}, row.cure_reason
    if (library, name) in KNOWN_REFUSED:
        assert row.probe == "refused", "the probe accepts it now: take this type out of KNOWN_REFUSED"
        assert KNOWN_REFUSED[library, name] in row.reason
    else:
        assert row.probe == "ok", row.reason


@pytest.mark.parametrize(("library", "name"), CASES)
def test_a_model_is_made_alike_twice(library, name):
    model, inputs, truths = measured(library, name)
    again, same = models_of(library).case(name).make()
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    for one, other in zip(*(x.values() if isinstance(x, dict) else [x] for x in (inputs, same)), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for truth in truths:
        assert sum(truth.points[-1].leaving.tokens.shape[:2]) > 3  # samples and tokens
        changes = [(point.entering, point.leaving) for point in truth.points]
        assert all(x.tokens.shape != y.tokens.shape or not torch.equal(x.tokens, y.tokens) for x, y in changes)


@pytest.mark.parametrize(
    "name", ["bert", "deberta-v2", "gpt2", "llama", "squeezebert", "xlm", "xlnet", "t5", "whisper"]
)
def test_the_streams_are_the_hidden_states(name):
    model, inputs, truths = measured("transformers", name)
    with torch.no_grad():
        output = call(model, {**inputs, "output_hidden_states": True})
    names = ("encoder_hidden_states", "decoder_hidden_states") if len(truths) > 1 else ("hidden_states",)
    for truth, attribute in zip(truths, names, strict=True):
        states = output[attribute]
        if name == "xlnet":  # handed out batch first, run sequence first
            assert states[0].shape[0] == 3
        assert len(states) == len(truth.points) + 1
        for state, point in zip(states, truth.points, strict=False):  # the last state may be normed
            torch.testing.assert_close(point.entering.tokens, state)


def test_the_streams_of_both_towers_are_the_hidden_states():
    model, inputs, truths = measured("transformers", "clip")
    with torch.no_grad():
        output = call(model, {**inputs, "output_hidden_states": True})
    for truth, part in zip(truths, (output.vision_model_output, output.text_model_output), strict=True):
        for state, point in zip(part.hidden_states, truth.points, strict=False):
            torch.testing.assert_close(point.entering.tokens, state)


def test_each_block_takes_what_the_one_before_gives():
    for name in ("bert", "t5", "albert", "xlnet"):
        for truth in measured("transformers", name)[2]:
            for before, after in zip(truth.points, truth.points[1:], strict=False):
                torch.testing.assert_close(before.leaving.tokens, after.entering.tokens)


def test_channel_first_and_last_are_twins():
    first, last = (measured("torch", f"own blocks, channel {which}")[2][0] for which in ("first", "last"))
    for x, y in zip(first.points, last.points, strict=True):
        assert x.leaving.similarity == pytest.approx(y.leaving.similarity, abs=1e-6)


def test_entropies_are_those_of_the_attentions_handed_out():
    transformers = pytest.importorskip("transformers")
    model, inputs, (truth,) = measured("transformers", "bert")
    eager = transformers.BertModel._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attentions = eager(**inputs, output_attentions=True).attentions
    assert len(attentions) == len(truth.points)
    for P, point in zip(attentions, truth.points, strict=True):
        assert point.entropy == pytest.approx(float(torch.special.entr(P).sum(-1).mean()), abs=1e-5)


def test_definitions():
    X = torch.randn(2, 5, 4, dtype=torch.float64)
    n, pi = 5, torch.full((5, 5), 0.2, dtype=torch.float64)
    torch.testing.assert_close(similarity(X), (pi @ X).square().sum((1, 2)) / X.square().sum((1, 2)))
    pairs = [torch.nn.functional.cosine_similarity(X[:, i], X[:, j], dim=-1) for i in range(n) for j in range(i)]
    torch.testing.assert_close(cosine(X), torch.stack(pairs).mean(0))
    wide = torch.randn(2, 600, 4, dtype=torch.float64)
    unit = torch.nn.functional.normalize(wide, dim=-1)
    mean = ((unit @ unit.mT).sum((1, 2)) - 600) / (600 * 599)
    torch.testing.assert_close(cosine(wide), mean)
    assert math.isnan(similarity(X[:, :1])[0])
    assert math.isnan(cosine(X[:, :1])[0])
    assert entropy(torch.full((1, 1, 4, 4), 0.25)) == pytest.approx(math.log(4))
    assert entropy(torch.full((1, 1, 4, 4), 0.2)) is None  # a sink takes the rest
    assert entropy(torch.full((1, 2, 4, 4), 0.25)) is None  # two heads that are one: their mean, repeated


def test_layouts():
    tokens = torch.randn(3, 6, 4)
    assert torch.equal(as_tokens(tokens.transpose(0, 1), "nbd"), tokens)
    assert torch.equal(as_tokens(tokens.transpose(1, 2), "bdn"), tokens)
    assert torch.equal(as_tokens(tokens.mT.unflatten(2, (2, 3)), "bchw"), tokens)
    assert torch.equal(as_tokens(tokens.unflatten(1, (2, 3)), "bhwc"), tokens)
    assert torch.equal(as_tokens(tokens.unflatten(1, (2, 3)).flatten(0, 1), "(bg)nd"), tokens)
    assert torch.equal(as_tokens(tokens.flatten(0, 1), "(bn)d"), tokens)
    assert torch.equal(as_tokens(tokens.flatten(0, 1)[None], "1(bn)d"), tokens)
    assert torch.equal(as_tokens(tokens, "bchw/bnd[:2]"), tokens[:, :2])
    assert as_tokens(torch.randn(3, 6, 2, 4), "bnsd").shape == (3, 6, 8)
    assert as_tokens(torch.randn(2, 3, 6, 4), "sbnd").shape == (3, 6, 8)
    with pytest.raises(ValueError, match="does not fit"):
        as_tokens(tokens[:2], "bnd")


def test_towers_are_read():
    model = torch.nn.ModuleDict(
        {
            "stages": torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.Identity()] * 2) for _ in range(2)),
            "head": torch.nn.ModuleList([torch.nn.Identity()]),
        }
    )
    first, second, head = read_towers("bchw@1:stages.#.*%s# | head.*?=tail.*<stages.0", model)
    assert (first.blocks, second.blocks) == ("stages.0.*", "stages.1.*")
    assert (first.layout, first.stream, first.group, first.required) == ("bchw", 1, "s0", True)
    assert (head.layout, head.required, head.alias, head.source) == ("bnd", False, "tail.*", "stages.0")
    with pytest.raises(LookupError, match="no module"):
        read_towers("layers.*", model)


def report_of(truths, change=lambda layer: layer):
    """A report as the probe gives it, with one part per tower and the figures of the truth."""

    class Layer:
        def __init__(self, name, stream, entropy=None):
            self.name, self.similarity, self.cosine = name, stream.similarity, stream.cosine
            self.entropy = None if entropy is None else [entropy]

    class Part:
        def __init__(self, truth):
            layers = [Layer("input", truth.points[0].entering)]
            self.layers = [
                change(layer) for layer in [*layers, *(Layer(p.name, p.leaving, p.entropy) for p in truth.points)]
            ]

    parts = [Part(truth) for truth in truths]
    left_out = "vision_model.encoder.layers is left out"
    return SimpleNamespace(parts=parts, layers=parts[0].layers, measured=left_out, verdict=None)


def test_a_report_is_judged():
    truths = measured("transformers", "clip")[2]
    row = comparison.Row("transformers", "clip")
    assert comparison.compare(row, report_of(truths), truths) == []
    assert (row.measured, row.max_error) == (6, 0.0)
    assert comparison.compare(row, report_of(truths[1:]), truths) == []  # it says what it left out
    (fault,) = comparison.compare(row, report_of(truths[:1]), truths)
    assert fault == "text_model.encoder.layers is not measured, and the report does not say so"

    def raise_third(layer):
        if layer.name == "text_model.encoder.layers.1":
            layer.similarity += 0.01
        return layer

    (fault,) = comparison.compare(row, report_of(truths, raise_third), truths)
    assert fault.startswith("similarity of text_model.encoder.layers.1 is")

    def rename(layer):
        layer.name = layer.name.replace("layers.1", "layers.1.self_attn")
        return layer

    assert "is measured and is no block" in comparison.compare(row, report_of(truths, rename), truths)[0]


def test_a_cure_that_does_nothing_is_wrong(monkeypatch):
    import leadline as ll

    model, inputs, _ = measured("transformers", "bert")
    monkeypatch.setattr(ll, "cure", lambda model, **strengths: model, raising=False)
    monkeypatch.setattr(ll, "uncure", lambda model: model, raising=False)
    assert comparison._try_cure(model, inputs, {"alpha": 0.1}) == ("wrong", "the outputs are unchanged")


def test_a_model_that_hangs_costs_one_row():
    rows, not_built = run([("torch", "own blocks"), ("torch", "no such model")], jobs=1, limit=60)
    assert [row["type"] for row in rows] == ["own blocks"]
    assert not_built[0]["type"] == "no such model"
    (row,) = run([("torch", "own blocks")], jobs=1, limit=0)[0]
    assert (row["probe"], row["reason"]) == ("crash", "no answer within 0 s")


def test_page():
    row = comparison.Row("torch", "own blocks", probe="refused", reason="no | blocks").as_dict()
    result = {
        "command": "python benchmarks/zoo.py",
        "environment": {"versions": {"torch": "2"}, "hardware": "a processor"},
        "tolerances": {"similarity": 1e-4, "entropy": 1e-3},
        "rows": [row],
        "not_built": [],
    }
    text = page(result)
    assert "| torch | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "no / blocks" in text
