"""Input that nobody expects ends in one line: damaged folders, pipes, closed streams, too much memory."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import leadline as ll
from leadline.cli import _out_of_memory
from leadline.curing.folders import cure_folder
from leadline.data.hub import opened_parquet
from leadline.data.text.files import open_text
from leadline.data.text.tokenizers import load_tokenizer
from leadline.errors import LeadlineError, Stopped, excerpt
from leadline.files import read_json, read_text
from leadline.models.checkpoints import check, digest, find_checkpoint
from leadline.training.run_folder import checkpoint

SMALL = {"depth": 1, "dim": 8, "heads": 1}
NESTED = "[" * 100_000


@pytest.fixture
def model(tmp_path):
    ll.create_model("vit_tiny", **SMALL).save(tmp_path / "model")
    return tmp_path / "model"


def leadline(*words, out=subprocess.PIPE, close=(), **options):
    """Run the command line in a process of its own."""
    closing = "".join(f"os.close({number});" for number in close)
    code = f"import os, sys;{closing}sys.argv = ['leadline', *{list(words)!r}];from leadline.cli import main;main()"
    return subprocess.run(
        [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, timeout=100, **options
    )


def test_messages_are_one_short_line():
    for kind in (LeadlineError, Stopped):
        text = str(kind("a\nb\r\x1b[31m\x00c" + "x" * 1_000_000))
        assert text.splitlines() == [text]
        assert text.isprintable()
        assert len(text) < 2100
    assert excerpt("x\ny") == "'x\\ny'"
    assert len(excerpt(10**5000)) < 70
    assert len(excerpt("x" * 10**6)) < 70


@pytest.mark.parametrize(
    "content", [NESTED, '{"a":' * 100_000, "null", "[1]", '"x"', "{}", '{"leadline": "x"}', b"\xff"]
)
def test_config_files_that_are_no_configuration(content, model):
    (model / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (ll.load, lambda folder: cure_folder(folder, folder.parent / "out", alpha=0.5)):
        with pytest.raises(LeadlineError):
            read(model)


def test_pipes_do_not_hang(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_text(tmp_path / "pipe")
    for name in ("config.json", "model.safetensors"):
        (model / name).unlink()
        os.mkfifo(model / name)
        with pytest.raises(LeadlineError):
            ll.load(model)
    (tmp_path / "set").mkdir()
    os.mkfifo(tmp_path / "set" / "train.parquet")
    with pytest.raises(LeadlineError, match="no regular file"), opened_parquet(tmp_path / "set" / "train.parquet"):
        pass


def test_json_of_many_levels_and_large_files(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(NESTED)
    with pytest.raises(ValueError, match="lists in lists"):
        read_json(file)
    with pytest.raises(OSError, match="larger than"):
        read_text(file, most=1000)
    (tmp_path / "tokenizer.json").write_text(NESTED)
    with pytest.raises(LeadlineError, match="is not JSON"):
        load_tokenizer(tmp_path)


def write_checkpoint(out, state):
    return checkpoint.save(out, 3, lambda folder: (folder / "state.json").write_text(json.dumps(state)))


@pytest.mark.parametrize("state", [[], "x", None, {"score": "high"}, {"score": [1]}, {"score": True}])
def test_state_of_another_type_is_damage(state, tmp_path):
    folder = write_checkpoint(tmp_path, state)
    with pytest.raises(LeadlineError, match="no mapping with a number"):
        check(folder)
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize("step", ["3", None, 1.5, -1, True, [3]])
def test_a_manifest_with_another_step_is_damage(step, tmp_path):
    folder = write_checkpoint(tmp_path, {"score": 1})
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "step": step}))
    with pytest.raises(LeadlineError, match="no whole number"):
        check(folder)


def test_damaged_weights_whose_manifest_agrees(tmp_path):
    folder = write_checkpoint(tmp_path, {"score": 1})
    (folder / "optimizer.safetensors").write_bytes(b"\xff" * 100)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["optimizer.safetensors"] = {"size": 100, "sha256": digest(folder / "optimizer.safetensors")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LeadlineError, match=r"optimizer\.safetensors cannot be read"):
        check(folder).tensors("optimizer")


def test_parquet_that_is_no_text(tmp_path):
    column = pa.array([b"\xff\xfe", b"ok"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "train.parquet")
    with pytest.raises(LeadlineError, match="cannot be read as parquet"):
        list(open_text(tmp_path).blocks("train"))
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    for place in range(len(content) - 200, len(content) - 8, 7):
        flipped = bytearray(content)
        flipped[place] ^= 0xFF
        (tmp_path / "train.parquet").write_bytes(flipped)
        with pytest.raises(LeadlineError):
            list(open_text(tmp_path).blocks("train"))


def test_a_bomb_of_text_is_read_in_bounded_memory(tmp_path):
    import lzma

    with lzma.open(tmp_path / "train.txt.xz", "wb") as file:
        for _ in range(256):
            file.write(b"a" * (1 << 20))
    code = (
        "import resource; from leadline.data.text.files import open_text\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nbefore = peak()\n"
        f"total = sum(len(block) for block in open_text({str(tmp_path)!r}).blocks('train'))\n"
        "assert total == 1 << 28, total\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128 << 10  # KiB, for 256 MiB of text on one line


@pytest.mark.parametrize("close", [(), (1,), (0, 1, 2)])
def test_closed_and_full_output(close):
    assert leadline("models", close=close).returncode == 0
    with open("/dev/full", "w") as full:
        done = leadline("models", out=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("leadline: No space left on device")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_too_little_memory_is_one_line(tmp_path):
    file = tmp_path / "huge.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(1 << 17, 1 << 17)\n")
    limit = 6 << 30
    done = leadline(
        "probe", f"{file}:build", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    )
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1
    assert _out_of_memory(MemoryError())
    assert _out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"))
    assert not _out_of_memory(RuntimeError("shapes do not fit"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 10**9}, "depth is 1000000000; it must be at most 2,000"),
        ({"dim": 2**63}, "it must be at most 2,147,483,647"),
        ({"dim": 1 << 20, "heads": 1}, "GB of weights and .* of memory are free"),
        ({"dim": 2**31 - 1, "heads": 1}, "larger than any memory"),
        ({"depth": "\n" * 10**6}, "wrong type"),
    ],
)
def test_sizes_beyond_sense_are_refused_at_once(options, words):
    began = time.monotonic()
    with pytest.raises(LeadlineError, match=words) as error:
        ll.create_model("vit_tiny", **options)
    assert len(str(error.value)) < 500
    assert time.monotonic() - began < 5


def test_a_killed_cure_blocks_nothing(model, tmp_path):
    code = (
        "import os, signal, leadline as ll\nfrom leadline.curing.folders import cure_folder\n"
        "from leadline.models.base import Model\nsave = Model.save\n"
        "def killed(self, folder, weights=None):\n    save(self, folder)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Model.save = killed\ncure_folder({str(model)!r}, {str(tmp_path / 'out')!r}, alpha=.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    before = os.umask(0o022)
    try:
        cure_folder(model, tmp_path / "out", alpha=0.5)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == {0o644}


def test_a_cure_of_strength_0_writes_nothing(tmp_path):
    import transformers

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16, "n_positions": 8}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(LeadlineError, match="every strength is 0, which does nothing; nothing is written"):
        cure_folder(tmp_path / "gpt2", tmp_path / "out", alpha=0)
    assert not (tmp_path / "out").exists()


def test_blocks_that_are_no_names():
    with pytest.raises(LeadlineError, match=r"blocks is 0\.5; give names"):
        ll.probe(ll.create_model("vit_tiny", **SMALL), torch.zeros(1, 3, 224, 224), blocks=0.5)


@pytest.mark.parametrize("name", ["escalation_rate", "energy_ratios", "mixing_gains", "omega"])
def test_metrics_of_other_samples_are_refused(name):
    with pytest.raises(LeadlineError, match="they must have the same samples"):
        getattr(ll.metrics, name)(torch.randn(2, 4, 4), torch.randn(3, 4, 4))


@pytest.mark.parametrize("A", [torch.ones(2, 3, 3, dtype=torch.long), torch.ones(2, 3, 4), torch.ones(3)])
def test_spectral_radius_of_other_matrices_is_refused(A):
    with pytest.raises(LeadlineError, match=r"^A "):
        ll.metrics.spectral_radius(A)


Q = torch.randn(2, 2, 3, 4)


@pytest.mark.parametrize("operator", [ll.ops.hopfield_attention, ll.ops.standard_attention])
@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ((Q, Q, Q.to(torch.int64)), {}, "must be floating point tensors"),
        ((Q.to(torch.complex64),) * 3, {}, "must be floating point tensors"),
        ((Q[:, :0], Q[:, :0], Q[:, :0]), {}, "at least one head"),
        ((Q, Q, Q), {"mask": torch.ones(2, 1, 3, 5) > 0}, r"mask has shape .*broadcast to \(2, 2, 3, 3\)"),
        ((Q, Q, Q), {"mask": torch.ones(3, 3, dtype=torch.long)}, "mask is torch.int64; it must be floating point or"),
    ],
)
def test_attention_over_what_does_not_fit_is_refused(operator, inputs, options, words):
    with pytest.raises(LeadlineError, match=words):
        operator(*inputs, **options)


def test_attention_of_mixed_dtypes_and_bias():
    with pytest.raises(LeadlineError, match=r"q is torch\.float32 and v torch\.float64"):
        ll.ops.standard_attention(Q, Q, Q.double())
    with pytest.raises(LeadlineError, match="bias has shape"):
        ll.ops.hopfield_attention(Q, Q, Q, bias=torch.zeros(3, 2, 3, 3))
    mask = torch.randn(3, 3, dtype=torch.float64)
    want = ll.ops.hopfield_attention(Q, Q, Q, alpha_prime=0.0, mask=mask)[0]
    torch.testing.assert_close(ll.ops.standard_attention(Q, Q, Q, mask=mask), want.float(), atol=1e-6, rtol=1e-5)


def test_kernels_without_a_gpu_go_to_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    got, _ = ll.ops.hopfield_attention(Q, Q, Q, backend="fused")
    assert torch.equal(got, ll.ops.hopfield_attention(Q, Q, Q, backend="reference")[0])
