"""`leadline probe` and `leadline cure` as a user meets them."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import leadline as ll
from leadline import cli
from leadline.cli import app
from leadline.cli.console import progress_bars

transformers = pytest.importorskip("transformers")

MODELS = """
import torch
from transformers import BertConfig, BertModel

SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)

def small():
    return BertModel(BertConfig(**SMALL)), torch.randint(60, (2, 9))

def bare():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.randn(2, 5, 4)

def wrong():
    return small()[0], torch.randn(2, 9)

def broken():
    return {}["nothing"]
"""


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def models(tmp_path):
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    return file


def test_a_report_and_its_page_beside_an_earlier_one(models, tmp_path):
    assert isinstance(ll.DepthReport.from_json(run("probe", f"{models}:small", "--json").stdout), ll.DepthReport)
    first = run("probe", f"{models}:small", "--out", tmp_path / "a.json")
    assert first.exit_code == 0
    assert "layer by layer" in first.stdout
    assert "Leave it alone" in first.stdout
    second = run("probe", f"{models}:small", "--before", tmp_path / "a.json", "--out", tmp_path / "b.html")
    assert second.exit_code == 0
    assert "Before / after" in (tmp_path / "b.html").read_text()
    nowhere = run("probe", f"{models}:small", "--before", tmp_path / "a.json")
    assert str(nowhere.exception).endswith("name that file by --out")


def test_blocks_by_name(models):
    done = run("probe", f"{models}:small", "--blocks", "encoder.layer.0", "--blocks", "encoder.layer.2", "--json")
    assert [layer["name"] for layer in json.loads(done.stdout)["layers"]] == [
        "input",
        "encoder.layer.0",
        "encoder.layer.2",
    ]
    result = run("probe", f"{models}:bare", "--blocks", "*", "--json")
    assert [layer["name"] for layer in json.loads(result.stdout)["layers"]] == ["input", "0", "1"]


def test_a_folder_is_cured_in_the_layers_named(models, tmp_path):
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "plain")
    done = run("cure", tmp_path / "plain", "--alpha", ".5", "--layer", 0, "--layer", 2, "--out", tmp_path / "cured")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "cured" / "config.json").read_text())["leadline"]["layers"] == [0, 2]
    assert run("probe", "--pretrained", tmp_path / "cured", "--json").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe"], "no model is given"),
        (["probe", "bertt"], "unknown model 'bertt'"),
        (["probe", "timm:vit_bse_patch16_224"], "did you mean vit_base_patch16_224"),
        (["probe", "bert", "--out", "x.doc"], "must end in .html"),
        (["probe", "bert", "--out", "none/x.html"], "create it first"),
        (["probe", "bert", "--before", "none.json"], "none.json cannot be read"),
        (["probe", "bert", "--pretrained", "."], "(it has no config.json) nor a checkpoint of a run"),
        (["probe", "models.py:bare"], "no blocks found in Sequential"),
        (["probe", "models.py:wrong"], "fails on this batch, (2, 9) of float32: Expected tensor"),
        (["probe", "models.py:broken"], "broken in models.py failed: KeyError 'nothing'"),
        (["probe", "models.py:small", "--blocks", "layers.*"], "names no module of BertModel"),
        (["cure", ".", "--alpha", ".5", "--out", "new"], "(it has no config.json) nor a checkpoint of a run"),
        (["cure", ".", "--out", "new"], "no strength is given"),
        (["cure", ".", "--alpha", "1.5", "--out", "new"], "alpha is 1.5"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, models, monkeypatch, capsys):
    monkeypatch.chdir(models.parent)
    monkeypatch.setattr(sys, "argv", ["leadline", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    output = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in output
    assert output.count("\n") == 1
    assert not (models.parent / "new").exists()


def test_progress_is_for_terminals():
    for terminal, silent, shown in ((True, False, True), (True, True, False), (False, False, False)):
        out = io.StringIO()
        with progress_bars(Console(file=out, force_terminal=terminal), silent=silent) as progress:
            progress("measuring", 3, 12)
            progress("trying cures", 1, None)
        assert ("trying cures, block 1" in out.getvalue()) == shown
        assert bool(out.getvalue()) == shown


def test_a_report_that_cannot_be_read_is_one_line(tmp_path):
    from leadline.report import read_report

    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ll.LeadlineError, match="this is no report"):
        read_report(tmp_path / "x.json")
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    report = ll.probe(torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8), trials=False)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ll.LeadlineError, match="it is a folder"):
        report.save(tmp_path / "folder.json")


def test_the_worked_case_of_entropy_collapse_still_is_one():
    case = Path(ll.__file__).parents[1] / "docs" / "cases" / "unscaled.py"
    verdict = json.loads(run("probe", f"{case}:make_model", "--depth", 2, "--json").stdout)["verdict"]
    assert verdict["kind"] == "entropy collapse"
    assert verdict["recommendation"] == {"alpha_prime": 0.5}


def test_a_folder_may_be_named_alone(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=40, n_positions=16)
    transformers.GPT2Model(config).save_pretrained(tmp_path / "folder")
    result = CliRunner().invoke(app, ["probe", str(tmp_path / "folder")])
    assert result.exit_code == 0, result.output
    assert "Measured on two samples of ours" in result.output


def test_depth_use_on_the_command_line(models, tmp_path):
    result = run("probe", f"{models}:small", "--depth-use", "--out", tmp_path / "depth.csv", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["depth_use"]["unit"] == "cosine"
    assert all(layer["removal"] is not None for layer in report["layers"][1:])
    rows = (tmp_path / "depth.csv").read_text().splitlines()
    assert rows[0].startswith("layer,name,similarity,similarity_robust,")
    assert len(rows) == 5
