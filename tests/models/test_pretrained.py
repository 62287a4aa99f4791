"""Folders of transformers: none of their code runs, nothing is asked, and no weight may be missing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import leadline
from leadline.curing.folders import cure_folder
from leadline.errors import LeadlineError
from leadline.probing import open_model
from leadline.training import writing

SIZES = {"vocab_size": 64, "max_position_embeddings": 32}
BERT = {**SIZES, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {**SIZES, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}


def saved(folder, kind, config):
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture
def bert(tmp_path):
    return saved(tmp_path / "bert", transformers.BertForMaskedLM, transformers.BertConfig(**BERT))


@pytest.fixture
def gpt2(tmp_path):
    return saved(tmp_path / "gpt2", transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2))


@pytest.fixture
def cured(gpt2, tmp_path):
    return cure_folder(gpt2, tmp_path / "cured", alpha=0.5)


def change(folder, edit):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


READERS = {
    "probe": lambda folder: open_model(str(folder)),
    "cure": lambda folder: cure_folder(folder, folder.parent / "out", alpha=0.5),
    "load": leadline.load,
    "generate": writing._model,
}
LAST = "encoder.layer.1.output.dense.weight"
DAMAGES = {
    "missing": (lambda t, n: t.pop(n), "lacks .*{}"),
    "mis-shaped": (lambda t, n: t.update({n: torch.zeros(3, 5)}), r"has .*{} of shape \(3, 5\) instead of"),
    "unexpected": (lambda t, n: t.update({"extra.weight": torch.zeros(2)}), r"has no place for extra\.weight"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("reader", "model"), [("probe", "bert"), ("probe", "gpt2"), ("cure", "bert"), ("cure", "gpt2"),
                                               ("generate", "gpt2"), ("load", "cured")])  # fmt: skip
def test_damaged_weights_are_named(reader, model, damage, request, capfd):
    folder = request.getfixturevalue(model)
    name = f"bert.{LAST}" if model == "bert" else "transformer.h.1.mlp.c_fc.weight"
    edit, words = DAMAGES[damage]
    change(folder, lambda tensors: edit(tensors, name))
    pattern = words.format(re.escape(name.partition(".")[2]))
    with pytest.raises(LeadlineError, match=pattern) as error:
        READERS[reader](folder)
    assert "\n" not in str(error.value)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_heads_may_be_left_out_and_poolers_added(bert, gpt2, tmp_path):
    model, _ = open_model(str(bert))  # BertModel adds a pooler and has no place for the head
    assert type(model) is transformers.BertModel
    change(bert, lambda tensors: tensors.update({"cls.seq_relationship.weight": torch.zeros(2, 16)}))
    open_model(str(bert))  # a head of BertForPreTraining, as in the first BERTs
    cure_folder(bert, tmp_path / "cured", alpha=0.5)
    writing._model(gpt2)
    config = transformers.LlamaConfig(
        **SIZES, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    bare = saved(tmp_path / "bare", transformers.LlamaModel, config)
    open_model(str(bare))
    with pytest.raises(LeadlineError, match=r"lacks lm_head\.weight"):  # a language model cannot write without it
        writing._model(bare)


def describe(folder, **entries):
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


def evil(folder, kind="bert"):
    """Let a folder name Python code beside it, for its configuration, its model and its tokenizer."""
    (folder / "evil.py").write_text(EVIL)
    classes = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"), "evil.Evil")
    describe(folder, auto_map=classes, model_type=kind)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\na\n")
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


CALLS = {
    "probe": "from leadline.probing import open_model; open_model({!r})",
    "cure": "from leadline.curing.folders import cure_folder; cure_folder({!r}, {!r} + '-out', alpha=.5)",
    "generate": "from leadline.training import writing; writing._model(__import__('pathlib').Path({!r}))",
}


@pytest.mark.parametrize("kind", ["bert", "gpt2", "unknown"])
def test_no_code_of_a_folder_runs_and_nothing_is_asked(kind, request, tmp_path):
    folder = request.getfixturevalue("gpt2" if kind == "gpt2" else "bert")
    evil(folder, kind)
    code = "\n".join(
        f"try:\n    {call.format(str(folder), str(folder))}\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
        for call in CALLS.values()
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], input="y\n" * 9, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "ran").exists()
    assert not list((tmp_path / "home").rglob("evil.py"))  # nor was it copied to be run
    assert "y/N" not in done.stdout + done.stderr
    if kind == "unknown":
        lines = done.stdout.splitlines()
        assert len(lines) == 3
        assert all(line.startswith("LeadlineError") and "never runs" in line for line in lines), lines


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_kernel_of_the_hub_is_loaded(name, gpt2, cured):
    describe(gpt2, **{name: "someone/kernel"})
    for reader in ("probe", "cure", "generate"):
        with pytest.raises(LeadlineError, match=r"code of the hub .*'someone/kernel'"):
            READERS[reader](gpt2)
    entry = json.loads((cured / "config.json").read_text())["leadline"]
    describe(cured, leadline={**entry, "attn_implementation": "someone/kernel"})
    with pytest.raises(LeadlineError, match="code of the hub"):
        leadline.load(cured)


def test_every_call_of_transformers_refuses_foreign_code():
    calls = []
    for file in Path(leadline.__file__).parent.rglob("*.py"):
        text = file.read_text()
        for match in re.finditer(r"(?<![\"`\w.])[\w.]+\.(from_pretrained|from_config)\(", text):
            line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            if ">>>" not in line and "`" not in line:
                end = text.index("\n\n", match.start())
                calls.append((file.name, "trust_remote_code=False" in text[match.start() : end]))
    assert len(calls) >= 5
    assert all(safe for _, safe in calls), calls


@pytest.mark.parametrize("names", [[1], "BertModel", {}, [], ["os"], ["PreTrainedConfig"], ["\n" * 5000], [None]])
def test_wrong_architectures_are_one_line(names, bert):
    describe(bert, architectures=names)
    with pytest.raises(LeadlineError) as error:
        READERS["cure"](bert)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500
