"""Every entry at initialisation, run whole at a tiny setting, and numbers that the papers print."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from leadline import papers
from leadline.metrics import mixed_norm, second_eigenvalue
from leadline.nn.schemes import SCHEMES
from leadline.papers import ENTRIES, Entry, list_entries, summaries
from leadline.papers.hop import ablation as hop_ablation
from leadline.papers.hop import bounds as hop_bounds
from leadline.papers.hop import schemes as hop_schemes
from leadline.papers.hop import table1 as hop_table1
from leadline.papers.shared import attention_nets, runner
from leadline.papers.shared.entry import Context
from leadline.papers.shared.runner import Options
from leadline.papers.tse import fig5 as tse_fig5
from leadline.papers.tse import spectral_gap as tse_spectral_gap

VIT = {"dim": 24, "heads": 3, "image_size": 32, "patch_size": 8, "depth": 6, "count": 2}
TSE = {"n": 8, "d": 32, "heads": 4, "ffn": 32, "depth": 6, "trials": 6, "chunk": 4}
INIT = [entry for entry in ENTRIES if entry.group == "init"]
TINY: dict[str, dict[str, Any]] = {
    "hop-table1": {**VIT, "seeds": 2},
    "hop-ablation": {**VIT, "seeds": 1, "grid": [0.0, 0.5]},
    "hop-bounds": {**VIT, "width": 64},
    "hop-schemes": VIT,
    "tse-fig1": {"depth": 3, "dim": 24, "heads": 2, "ffn": 32, "vocab": 40, "samples": 2, "tokens": 8},
    "tse-fig2": {**TSE, "gains": [[0.5, 3]], "gain_trials": 2},
    "tse-fig3": TSE,
    "tse-fig4": TSE,
    "tse-fig5": {**TSE, "scan": [0.1, 0.4], "scan_trials": 2, "scan_depth": 8},
    "tse-fig8": {"n": 12, "widths": [4, 8], "samples": 10, "times": 4},
    "tse-formulas": {**TSE, "early": 3},
    "tse-spectral-gap": {"sizes": [4, 8, 32, 64], "trials": 3, "d": 64, "d_head": 8},
    "ours-depth-map": {
        "n": 8,
        "d": 16,
        "heads": 2,
        "ffn": 32,
        "depth": 12,
        "seeds": 1,
        "samples": 2,
        "map": 3,
        "placements": ["post", "pre"],
    },
}
IDS = [
    "hop-table1",
    "hop-ablation",
    "hop-bounds",
    "hop-schemes",
    "tse-fig1",
    "tse-fig2",
    "tse-fig3",
    "tse-fig4",
    "tse-fig5",
    "tse-fig8",
    "tse-formulas",
    "tse-spectral-gap",
    "ours-depth-map",
]


def tiny(entry: Entry) -> Entry:
    setting = TINY[entry.id]
    assert setting.keys() <= entry.setting.keys() | {"chunk", "trials"}
    return replace(entry, setting={**entry.setting, **setting})


def run(entry: Entry, out: Path, **options: Any) -> dict[str, Any]:
    console = Console(file=io.StringIO(), width=160)
    runner.run_entries(entry.id, out, [tiny(entry)], Options(device="cpu", console=console, embedded=True, **options))
    return summaries(entry.id, out)[0]


def test_all_entries_are_there() -> None:
    assert [entry.id for entry in INIT] == IDS
    assert list_entries() == [(entry.id, entry.title) for entry in ENTRIES]


def test_every_id_is_a_path() -> None:
    """The id of an entry names its file, and every file of hop, tse and ours is an entry."""
    folder = Path(papers.__file__).parent
    files = [path for name in ("hop", "tse", "ours") for path in (folder / name).rglob("*.py")]
    ids = ["-".join(path.relative_to(folder).with_suffix("").parts) for path in files if path.name != "__init__.py"]
    assert sorted(entry.id for entry in ENTRIES) == sorted(name.replace("_", "-") for name in ids)
    for module, entry in zip(papers.MODULES, ENTRIES, strict=True):
        assert module.replace(".", "-").replace("_", "-") == entry.id


@pytest.mark.parametrize("entry", INIT, ids=lambda entry: entry.id)
def test_entry_runs_and_repeats(entry: Entry, tmp_path: Path) -> None:
    """Tables, figures, claims and notes are there, and the same for the same seed."""
    first, again = (run(entry, tmp_path / name) for name in "ab")
    assert first["claims"] == again["claims"]
    assert first["notes"] == again["notes"]
    assert first["claims"]
    for claim in first["claims"]:
        assert set(claim) == {"name", "kind", "ours", "paper", "tolerance", "holds"}
    for file in first["files"]:
        a, b = ((tmp_path / name / entry.id / file).read_bytes() for name in "ab")
        assert a == b
        if file.endswith(".csv"):
            rows = list(csv.DictReader(io.StringIO(a.decode())))
            assert rows
            assert not any(value == "nan" for row in rows for value in row.values())
    with torch.no_grad():
        other = entry.run(Context(tiny(entry).setting, 1, torch.device("cpu"), embedded=True))
    name, rows = next(iter(other.tables.items()))
    stored = list(csv.DictReader((tmp_path / "a" / entry.id / f"{name}.csv").open()))
    assert len(stored) == len(rows)
    assert stored != [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]


def test_shape_claims_are_those_that_the_papers_make() -> None:
    """Which entries can fail the command."""
    with torch.no_grad():
        kinds = {
            entry.id: {
                claim.kind
                for claim in entry.run(Context(tiny(entry).setting, 0, torch.device("cpu"), embedded=True)).claims
            }
            for entry in INIT
            if entry.id in ("hop-table1", "tse-fig2", "tse-fig4", "tse-fig5", "tse-fig8", "ours-depth-map")
        }
    for name in ("hop-table1", "tse-fig2", "tse-fig4", "tse-fig5"):
        assert "shape" in kinds[name]
    for name in ("tse-fig8", "ours-depth-map"):
        assert kinds[name] == {"digits"}


def test_columns_share_their_weights() -> None:
    context = Context({**VIT, "depth": 2}, 0, torch.device("cpu"))
    nets = [attention_nets.network(context, 4, "xavier", *strengths) for strengths in attention_nets.COLUMNS.values()]
    for net in nets[1:]:
        for a, b in zip(nets[0].parameters(), net.parameters(), strict=True):
            assert torch.equal(a, b)
    other = attention_nets.network(context, 5, "xavier", 0.0, 0.0)
    assert not torch.equal(next(nets[0].blocks.parameters()), next(other.blocks.parameters()))


@pytest.mark.parametrize(("kind", "variance"), [("torch", 1 / 3), ("fan in", 1), ("xavier", 2 * 192 / (192 + 24))])
def test_redrawn_patches(kind: str, variance: float) -> None:
    """Only the patches change, and they have the variance that their rule says (times the fan in, 3 x 8 x 8)."""
    context = Context({**VIT, "depth": 2}, 0, torch.device("cpu"))
    plain = attention_nets.network(context, 4, "xavier", 0.0, 0.0)
    other = attention_nets.network(
        context, 4, "xavier", 0.0, 0.0, redraw=lambda net: attention_nets.redraw_patches(net, kind)
    )
    assert (192 * other.patch.weight.var()).item() == pytest.approx(variance, rel=0.08)
    changed = {
        name for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True) if not torch.equal(a, b)
    }
    assert changed == {"patch.weight"}


def test_rounding_floor_is_that_of_real_tokens() -> None:
    """The short cut for equal tokens against the metric itself, and float64 has no such floor."""
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(64, 24, generator=generator)
    mean = torch.zeros(64, 24)
    for _ in range(197):
        mean += token
    rest = (token - mean / 197).unsqueeze(1).expand(-1, 197, -1)
    expected = (mixed_norm(rest) / mixed_norm(token.unsqueeze(1).expand(-1, 197, -1))).mean().item()
    floor = hop_table1.rounding_floor(197, 24, torch.Generator().manual_seed(0))
    assert floor == pytest.approx(expected, rel=1e-4)
    assert 1e-7 < floor < 1e-5


def test_bracket() -> None:
    values = {"a": 0.1, "b": 0.3, "c": 0.7}
    assert hop_table1.bracket(values, 0.4) == "between 0.3 (b) and 0.7 (c)"
    assert hop_table1.bracket(values, 0.8).startswith("outside")


def test_table_has_the_papers_numbers() -> None:
    for column in hop_table1.PAPER.values():
        assert len(column) == 12
    assert hop_table1.PAPER["standard"][:3] == pytest.approx([0.489, 0.0773, 8.1e-4], rel=0.01)
    assert hop_table1.PAPER["both"][-1] == pytest.approx(0.397, rel=0.01)


@pytest.mark.parametrize(
    ("alpha", "prime", "expected"),
    [(0.6, 0.01, "It is alpha that"), (0.01, 0.6, "It is alpha' that"), (0.3, 0.3, "Both"), (0.01, -0.3, "Neither")],
)
def test_the_sentence_follows_from_the_numbers(alpha: float, prime: float, expected: str) -> None:
    assert hop_ablation.conclude(alpha, prime, 6).startswith(expected)
    assert f"{alpha:+.3f}" in hop_ablation.conclude(alpha, prime, 6)


def test_effects_are_means_over_the_other() -> None:
    values = torch.tensor([[0.0, 0.1], [0.5, 0.9]])  # (alpha, alpha')
    assert hop_ablation.effects(values, 0, 1) == pytest.approx((0.65, 0.25))


def test_counter_examples_are_those_of_the_specification() -> None:
    first, second, third = hop_bounds.counter_examples(16384)
    assert (first["actual"], first["printed"]) == pytest.approx((0.278, 0.141), abs=5e-4)
    assert (second["actual"], second["printed"]) == pytest.approx((3.13, 2.26), abs=5e-3)
    assert (third["actual"], third["printed"]) == pytest.approx((0.256, 0.2))
    for row in (first, second, third):
        assert row["repaired"] >= row["actual"] * (1 - 1e-12) > row["printed"]


def test_growth_of_schemes() -> None:
    assert hop_schemes.growth(torch.tensor([3.0, 1.0, 2.0, 4.0])) == pytest.approx(2.0)
    assert hop_schemes.growth(torch.tensor([1.0, 2.0, math.nan, math.nan])) == math.inf


def test_two_step_schemes_grow_by_their_root(tmp_path: Path) -> None:
    """The scores of a central hidden step obey h'' = h + 2 rho (S - h'), whose root shows once S is small beside h."""
    entry = next(entry for entry in ENTRIES if entry.id == "hop-schemes")
    setting = {**entry.setting, **VIT, "depth": 16}
    with torch.no_grad():
        measured = hop_schemes.measure(Context(setting, 0, torch.device("cpu"), embedded=True))
    assert set(measured) == set(SCHEMES)
    spread = measured["forward-central"][2]
    assert hop_schemes.growth(spread) == pytest.approx((1 + math.sqrt(5)) / 2, rel=0.01)


def test_crossing() -> None:
    assert tse_fig5.crossing([0.1, 0.2, 0.3], [0.0, 0.25, 0.75]) == pytest.approx(0.25)
    assert tse_fig5.crossing([0.1, 0.2], [0.6, 0.7]) is None


@pytest.mark.parametrize(("n", "d", "d_head"), [(32, 512, 16), (256, 64, 64), (256, 64, 8)])
def test_law_of_attention_matrices(n: int, d: int, d_head: int) -> None:
    """Few tokens, many tokens, and many tokens with narrow heads, which makes no difference."""
    context = Context({"trials": 6, "d": d, "d_head": d_head}, 0, torch.device("cpu"))
    P = tse_spectral_gap.matrices(context, "softmax attention", n, context.generator())
    assert second_eigenvalue(P).mean().item() == pytest.approx(tse_spectral_gap.attention_law(n, d), rel=0.2)


def test_fitted_power() -> None:
    assert tse_spectral_gap.power([16, 64, 256], [3 * n**-0.5 for n in (16, 64, 256)]) == pytest.approx(-0.5)
