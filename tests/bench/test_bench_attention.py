"""The bench on a CPU at small sizes: what its rows hold, and that its float64 reference is right."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from leadline.bench import bench_attention, chains, measure, run
from leadline.bench.chains import Shape
from leadline.cli import app
from leadline.errors import LeadlineError

FIELDS = {"forward_ms", "total_ms", "ratio_to_flash", "extra_gib", "error", "grad_error", "flash_error"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(
        chains, "CPU_SHAPES", {"vit_base": Shape(3, 2, 2, 20, False), "causal": Shape(2, 1, 2, 9, True)}
    )
    monkeypatch.setattr(run, "REPEATS", 2)
    monkeypatch.setattr(measure, "ROWS", 7)
    measure._in_float64.cache_clear()


def test_rows_errors_and_progress(small):
    heard = []
    methods = ("flash", "leadline", "eager", "sdpa_bias")
    results = bench_attention(methods=methods, device="cpu", on_row=lambda *row: heard.append(row))
    assert {"hardware", "versions", "command", "commands", "rows", "biased_rows", "model_rows"} == set(results)
    assert [row["method"] for row in results["rows"]] == [*methods, *methods]
    for row in (*results["rows"], *results["biased_rows"]):
        assert set(row) >= FIELDS
        assert "failed" not in row
        assert 0 < row["error"] < 1e-5  # in float32: flash and the others all compute what float64 says
        assert 0 < row["grad_error"] < 1e-5
    assert [done for _, _, done, _ in heard] == list(range(1, 17))
    assert {total for *_, total in heard} == {16}
    assert set(results["rows"][1]["by_score_std"]) == {"1", "4", "16"}


def test_a_method_that_fails_is_a_row_with_the_reason(small, monkeypatch):
    def broken(layers, causal):
        raise RuntimeError("no kernel\nfor this")

    methods = chains.hopfield_methods("auto") | {"flex": broken}
    monkeypatch.setattr(chains, "hopfield_methods", lambda backend: methods)
    rows = bench_attention(("carried",), ("causal",), ("flex",), "cpu")["rows"]
    assert rows[1]["failed"] == "RuntimeError: no kernel"
    assert rows[1]["total_ms"] is None


def test_scores_have_the_asked_deviation():
    q, k, _ = chains.draw(Shape(1, 4, 4, 200, False), "cpu", torch.float32, std=4.0)[0]
    assert abs((q @ k.mT / 8).std() - 4) < 0.1


def test_flex_computes_the_same():
    """FlexAttention itself, uncompiled: the methods' arithmetic, whether or not this machine can compile it."""
    chains._compiled_flex[:] = [flex_attention]
    try:
        detached = lambda layers: [[x.detach() for x in layer] for layer in layers]  # noqa: E731
        layers = detached(chains.draw(Shape(3, 1, 2, 16, True), "cpu", torch.float32))
        with torch.no_grad():
            methods = chains.hopfield_methods("auto")
            for one, other in zip(methods["flex"](layers, True), methods["eager"](layers, True), strict=True):
                assert torch.allclose(one, other, atol=1e-5)
            layers = detached(chains.draw(Shape(2, 1, 2, 16, True), "cpu", torch.float32, bias=True))
            methods = chains.biased_methods("auto")
            for one, other in zip(methods["flex"](layers, True), methods["sdpa_bias"](layers, True), strict=True):
                assert torch.allclose(one, other, atol=1e-5)
    finally:
        chains._compiled_flex.clear()


def test_flex_is_not_asked_for_what_breaks_the_gpu():
    q, k, v = (torch.zeros(1, 2, 2**15, 8) for _ in range(3))
    state = torch.zeros(1).expand(1, 2, 2**15, 2**15)
    with pytest.raises(RuntimeError, match=r"a captured tensor of 2.1e\+09 elements"):
        chains._flex_call(q, k, v, state, True, 1.0)


def test_the_command_writes_json_and_a_picture(small, tmp_path):
    out = tmp_path / "deep" / "bench.json"
    arguments = ["bench", "attention", "--shape", "vit_base", "--method", "leadline", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(out.read_text())
    assert out.with_suffix(".png").stat().st_size > 5000


def test_suites_that_are_not_asked_for_stay(small, tmp_path):
    out = tmp_path / "bench.json"
    first = bench_attention(("carried",), ("causal",), ("flash",), "cpu", "first", out)
    both = bench_attention(("biased",), ("causal",), ("flash",), "cpu", "second", out)
    assert both["rows"] == first["rows"]
    assert len(both["biased_rows"]) == 1
    assert both["commands"] == {"carried": "first", "biased": "second"}
    assert both["command"] == "first"
    out.write_text(json.dumps({**both, "hardware": "another"}))
    assert bench_attention(("biased",), ("causal",), ("flash",), "cpu", "third", out)["rows"] == []


def test_unknown_names_are_refused():
    for given, words in (
        ({"shapes": ("vit_huge",)}, "vit_huge"),
        ({"methods": ("flsh",)}, "flsh"),
        ({"suites": ("all",)}, "all"),
        ({"device": "tpu"}, "tpu"),
    ):
        with pytest.raises(LeadlineError, match=words):
            bench_attention(**{"device": "cpu", **given})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_said():
    with pytest.raises(LeadlineError, match="no GPU here; give 'cpu' or nothing"):
        bench_attention(device="cuda")


def test_plain_flash_is_torchs_own():
    layers = chains.draw(Shape(1, 1, 2, 9, True), "cpu", torch.float32)
    (out,) = chains.hopfield_methods("auto")["flash"](layers, True)
    assert torch.equal(out, F.scaled_dot_product_attention(*layers[0], is_causal=True))
