"""Models and example inputs from one word."""

import json

import pytest
import torch

import leadline as ll
from leadline.data.text.tokenizers import ByteTokenizer, save_tokenizer
from leadline.errors import LeadlineError
from leadline.probing import open_model, probe, sources

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(sources, "TOKENS", 8)


@pytest.fixture
def _narrow(monkeypatch):
    """transformers' defaults are base sizes; the tests keep their types and shrink their widths."""
    build = transformers.AutoConfig.for_model

    def narrow(kind):
        config = build(kind)
        config.hidden_size, config.num_attention_heads = 32, 4
        if hasattr(config, "intermediate_size"):
            config.intermediate_size = 48
        return config

    monkeypatch.setattr(transformers.AutoConfig, "for_model", narrow)


@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert", "BertModel"),
        ("gpt2", "GPT2Model"),
        ("albert", "AlbertModel"),
        ("roberta", "RobertaModel"),
        ("vit", "ViTModel"),
    ],
)
def test_types_of_transformers(name, kind):
    model, inputs = open_model(name, depth=2)
    assert type(model).__name__ == kind
    again, same = open_model(name, depth=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(inputs[key], same[key]) for key in inputs)
    assert len(probe(model, inputs, trials=False).layers) == 3
    first = next(iter(inputs.values()))
    assert first.shape == ((2, 3, 224, 224) if name == "vit" else (2, 8))


def test_default_widths_are_those_of_transformers(monkeypatch):
    model, _ = open_model("bert", depth=1)
    assert model.config.hidden_size == transformers.BertConfig().hidden_size


def test_types_too_large_to_build_by_default():
    with pytest.raises(LeadlineError, match=r"mistral has 7\.\d billion parameters"):
        open_model("mistral")


def test_depth_is_never_ignored(monkeypatch):
    with pytest.raises(LeadlineError, match="swin has 12 blocks whatever its depth"):
        open_model("swin", depth=5)
    monkeypatch.setattr(sources, "_TOO_LARGE", 0)
    with pytest.raises(LeadlineError, match="give a smaller depth"):  # refused before it is built
        open_model("bert", depth=3)


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    open_model("vit_tiny", depth=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["vit_tiny", "gpt2_small", "bert_base"])
def test_our_own_names(name):
    model, inputs = open_model(name, depth=1)
    assert isinstance(model, ll.models.Model)
    assert len(probe(model, inputs, trials=False).layers) == 2


def test_timm_names():
    model, inputs = open_model("timm:vit_tiny_patch16_224", depth=1)
    assert inputs.shape == (2, 3, 224, 224)
    assert inputs.std((1, 2, 3)).tolist() == pytest.approx(
        [1, 1], abs=1e-4
    )  # three channels of one image count as more numbers
    assert len(model.blocks) == 1
    with pytest.raises(LeadlineError, match="did you mean vit_tiny_patch16_224 or "):
        open_model("timm:vit_tiny_patch16_225")
    with pytest.raises(LeadlineError, match="did you mean vit_tiny_patch16_224 or "):
        open_model("timm:vit_tiny")
    with pytest.raises(LeadlineError, match="takes no depth"):
        open_model("timm:resnet18", depth=3)


def test_a_function_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nimport leadline as ll\n"
        "def make(depth=2):\n    return ll.create_model('vit_tiny', depth=depth, image_size=32)\n"
        "def both():\n    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)\n"
        "    return torch.nn.TransformerEncoder(layer, 2), torch.ones(1, 3, 8)\n"
        "def bare():\n    return both()[0]\n"
        "def wrong():\n    return 3\n"
    )
    model, inputs = open_model(f"{file}:make", depth=3)
    assert len(model.blocks) == 3
    assert inputs.shape == (2, 3, 32, 32)
    assert open_model(f"{file}:both")[1].shape == (1, 3, 8)
    for spec, message in [
        (f"{file}:makes", "did you mean 'make'"),
        (f"{file}:wrong", "returns int"),
        (f"{file}:bare", "cannot make inputs for TransformerEncoder"),
        (f"{tmp_path / 'no.py'}:make", "names no function in a file"),
        (str(file), "names no function in a file"),
    ]:
        with pytest.raises(LeadlineError, match=message):
            open_model(spec)
    with pytest.raises(LeadlineError, match="takes no depth"):
        open_model(f"{file}:both", depth=2)


def test_folders_with_weights(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model, inputs = open_model("gpt2", pretrained=tmp_path / "theirs")
    assert torch.equal(model.wte.weight, theirs.transformer.wte.weight)
    assert inputs["input_ids"].max() < 60
    ours = ll.create_model("gpt2_small", depth=1, dim=32, heads=4, vocab_size=60)
    ours.save(tmp_path / "ours")
    model, _ = open_model(pretrained=tmp_path / "ours")
    assert torch.equal(model.token.weight, ours.token.weight)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for spec, folder, message in [
        ("bert", "theirs", "holds a model of type 'gpt2', not 'bert'"),
        ("gpt2", "nowhere", "is not a folder"),
        ("gpt2", "broken", "cannot be loaded by transformers"),
    ]:
        with pytest.raises(LeadlineError, match=message) as caught:
            open_model(spec, pretrained=tmp_path / folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(LeadlineError, match=r"depth is 3 and .*theirs is a checkpoint, which has its own"):
        open_model("gpt2", depth=3, pretrained=tmp_path / "theirs")


def test_our_own_models_read_our_text_too(tmp_path):
    words = []
    ll.create_model("gpt2_small", depth=1, dim=8, heads=2, vocab_size=256, max_tokens=32).save(tmp_path)
    assert open_model(str(tmp_path), say=words.append)[1].shape == (2, sources.TOKENS)
    tokenizer = ByteTokenizer()
    save_tokenizer(tokenizer, tmp_path)
    _, ids = open_model(str(tmp_path), say=words.append)
    assert [tokenizer.decode(row.tolist()) for row in ids] == [text[: sources.TOKENS] for text in sources.TEXT]
    open_model("vit_tiny", depth=1, say=words.append)
    assert words == ["token ids drawn at random", "a page of text, by its own tokenizer", "handwritten digits"]


def test_a_folder_with_a_tokenizer_reads_our_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted({word.strip(".,") for text in sources.TEXT for word in text.split()})
    table = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path)
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(table), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
        )
    )
    model.save_pretrained(tmp_path)
    model, inputs = open_model("bert", pretrained=tmp_path)
    assert fast.decode(inputs["input_ids"][0]).startswith("A lead line is a length of rope")
    assert set(inputs) <= {"input_ids", "attention_mask", "token_type_ids"}
    assert len(probe(model, inputs, trials=False).layers) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: open_model("berd"), "unknown model 'berd'.*did you mean 'bert'"),
        (lambda: open_model("runs/nowhere"), "runs/nowhere is no folder; give that of a checkpoint or of a run"),
        (lambda: open_model(), "no model is given"),
        (lambda: open_model("bert", depth=0), "depth is 0"),
    ],
)
def test_bad_words(call, message):
    with pytest.raises(LeadlineError, match=message):
        call()


def test_a_config_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(LeadlineError, match=r"is no checkpoint: it has no readable config\.json"):
        open_model(str(tmp_path))
