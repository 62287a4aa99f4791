"""The command line as a user meets it, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leadline
from leadline import demo, errors
from leadline.data import load_digits


def leadline_command(*words, cwd=None):
    return subprocess.run([sys.executable, "-m", "leadline", *words], capture_output=True, text=True, cwd=cwd)


def test_version_and_help():
    assert leadline_command("--version").stdout == f"leadline {leadline.__version__}\n"
    done = leadline_command("demo", "--help")
    assert done.returncode == 0
    assert "Example: leadline demo" in done.stdout


def test_help_does_not_load_torch():
    code = "import sys, leadline, leadline.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_lazy_names_are_all_there():
    for name in leadline.__all__:
        assert getattr(leadline, name) is not None
    assert set(leadline.__all__) <= set(dir(leadline))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        leadline.nothing  # noqa: B018


def test_models_lists_what_can_be_built():
    listed = json.loads(leadline_command("models", "--json").stdout)
    assert list(listed) == leadline.list_models()
    assert "vit_tiny" in leadline_command("models").stdout


def test_it_runs_from_a_bare_checkout():
    root = Path(leadline.__file__).parents[1]
    assert leadline_command("--version", cwd=root).returncode == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["demmo"], "No such command 'demmo'"),
        (["demo", "--seed", "one"], "--seed"),
        (["demo", "--out", "/dev/null/x"], "give a folder to write to"),
    ],
)
def test_bad_input_exits_2_without_a_traceback(words, part):
    done = leadline_command(*words)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(leadline.LeadlineError, match=r"needs sklearn.*pip install 'leadline\[data\]'"):
        load_digits()
    assert errors.need("json", "data") is json


def test_digits_are_split_once_and_for_all():
    train, test = load_digits(seed=3)
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.min() == 0
    assert train.images.max() == 1
    again, _ = load_digits(seed=3)
    assert torch.equal(train.images, again.images)
    assert torch.equal(train.labels, again.labels)
    pixels = {tuple(image.flatten().tolist()) for image in train.images}
    assert sum(tuple(image.flatten().tolist()) in pixels for image in test.images) < 5  # the set repeats a few


def test_a_small_demo_from_end_to_end(tmp_path, monkeypatch, capsys):
    for name, value in {"DEPTH": 3, "EPOCHS": 1, "BATCH": 700, "WARM_UP": 1, "RATES": (1e-4, 1e-3)}.items():
        monkeypatch.setattr(demo, name, value)
    result = demo.run(tmp_path / "out", as_json=True)
    saved = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert saved == result == json.loads(capsys.readouterr().out)
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert list(result["similarity"]) == list(demo.CURES)
    assert all(len(curve) == 4 for curve in result["similarity"].values())
    plain, tau = result["similarity"]["plain"], result["similarity"]["tau .1"]
    assert plain[0] == tau[0]
    assert plain[-1] > tau[-1]
    assert list(result["arms"]) == ["standard", "alpha only", "alpha' only", "both"]


def test_the_conclusion_follows_from_the_numbers():
    def conclude(*accuracy):
        return demo.conclude(dict(zip(demo.ARMS, accuracy, strict=True)), 360)

    assert "is alpha (" in conclude(60, 90, 60, 90)
    assert "is alpha' (" in conclude(60, 60, 90, 90)
    assert "is alpha and alpha' (" in conclude(50, 70, 70, 90)
    assert "Neither" in conclude(90, 91, 89, 90)
    assert "Neither" in conclude(90, 80, 90, 80)
    assert demo.first_above([0.1, 0.6, 0.4, 0.95], 0.5) == 1
    assert demo.first_above([0.1], 0.5) is None


def test_cure_a_folder_and_load_it_again(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    folders = str(tmp_path / "plain"), "--out", str(tmp_path / "cured")
    done = leadline_command("cure", *folders, "--alpha", ".5", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "cured")}
    model = leadline.load(tmp_path / "cured")
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "plain").eval()
    ids = torch.randint(11, (2, 5))
    want = leadline.convert(plain, attention="hopfield", alpha=0.5, alpha_prime=0.0)(ids)
    assert torch.allclose(model(ids).logits, want, atol=1e-4)
    assert torch.equal(leadline.uncure(model)(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["cure", "nowhere", "--alpha", ".5", "--out", "x"], "nowhere is not a folder"),
        (["cure", ".", "--out", "x"], "no strength is given"),
        (["cure", ".", "--alpha", "2", "--out", "x"], "alpha is 2.0; it must lie in [0, 1)"),
    ],
)
def test_a_bad_cure_exits_2(words, part, tmp_path):
    done = leadline_command(*words)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
