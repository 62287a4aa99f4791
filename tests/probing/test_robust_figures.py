"""Robust figures of a probe against definitions in float64, and planted massive tokens, channels and sinks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leadline as ll
from leadline.probing import probe

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4}
ids = torch.randint(3, 97, (3, 24), generator=torch.Generator().manual_seed(1))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, initializer_range=0.2)).eval()


def streams(model, ids):
    """The input of the first block and the output of each, by hooks of our own."""
    seen, hooks = [], []
    blocks = model.model.layers
    hooks.append(blocks[0].register_forward_pre_hook(lambda m, a: seen.append(a[0].double())))
    hooks += [block.register_forward_hook(lambda m, a, o: seen.append(o.double())) for block in blocks]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def cosine_of_pairs(X, channels=()):
    """Mean cosine over pairs of tokens of X (n, d), with some channels set to 0."""
    X = X.clone()
    X[:, list(channels)] = 0
    U = F.normalize(X, dim=-1)
    n = len(X)
    return ((U @ U.T).sum().item() - n) / (n * n - n)


def plant(model, layer: int, token: int | None = None, channel: int | None = None, size: float = 1e4) -> None:
    """Make block ``layer`` (from 1) add to one token, or to one channel of all tokens."""

    def add(module, args, output):
        output = output.clone()
        if token is not None:
            output[:, token, 5] += size
        if channel is not None:
            output[..., channel] += size
        return output

    model.model.layers[layer - 1].register_forward_hook(add)


@pytest.mark.parametrize("planted", [False, True])
def test_figures_are_their_definitions(planted):
    model = llama()
    if planted:
        plant(model, 2, token=0)
        plant(model, 3, channel=7, size=1e3)
    hidden = streams(model, ids)
    report = probe(model, ids)
    for layer, X in zip(report.layers, hidden, strict=True):
        wide = [7] if planted and layer.index >= 3 else []
        expected = sum(cosine_of_pairs(x, wide) for x in X) / 3
        assert layer.similarity_robust == pytest.approx(expected, abs=1e-5)
        assert layer.tokens == 24
        units = F.normalize(X, dim=-1)
        pairs = [(units[a] @ units[b].T).mean().item() for a, b in ((0, 1), (0, 2), (1, 2))]
        assert layer.cosine_samples == pytest.approx(sum(pairs) / 3, abs=1e-5)
    for before, after, layer in zip(hidden, hidden[1:], report.layers[1:], strict=False):
        cosines = F.cosine_similarity(before, after, dim=-1)
        assert layer.influence == pytest.approx(1 - cosines.mean().item(), abs=1e-5)
        assert layer.angle == pytest.approx((cosines.clamp(-1, 1).arccos() / math.pi).mean().item(), abs=1e-4)
    for layer, X, block in zip(report.layers, hidden, model.model.layers, strict=False):
        normed = block.input_layernorm(X.float()).double()
        share = 24 * normed.mean(1).square().sum(-1) / normed.square().sum((1, 2))
        assert layer.similarity_normed == pytest.approx(share.mean().item(), abs=1e-5)
    assert report.layers[-1].similarity_normed is None


def test_a_planted_token_is_named_and_moves_the_raw_figure_alone():
    model = llama()
    hidden = streams(model, ids)
    plant(model, 2, token=0)
    report = probe(model, ids)
    for layer in report.layers:
        assert [token.index for token in layer.massive_tokens] == ([0] if layer.index >= 2 else [])
    lengths = hidden[2].norm(dim=-1)
    top = report.layers[2].massive_tokens[0]
    assert top.samples == 1
    assert top.share == pytest.approx(1, abs=1e-3)
    assert top.ratio == pytest.approx((1e4 / lengths[:, 1:].median(-1).values).mean().item(), rel=0.1)
    assert report.layers[2].similarity == pytest.approx(1 / 24, abs=0.01)  # one token is all the energy
    assert report.verdict.kind == "no collapse"
    assert any("Token 0 is massive in layers 2 to 4" in note for note in report.verdict.notes)
    assert "By the rule for scalars (above 100 and 1000 times the median) in layers 2 to 4." in report.verdict.notes


def test_a_planted_channel_is_named_and_collapse_is_not_claimed():
    model = llama()
    plant(model, 2, channel=7, size=1e3)
    report = probe(model, ids)
    assert report.layers[-1].similarity > 0.99  # the raw figure alone would claim it
    assert report.verdict.kind == "no collapse"
    for layer in report.layers:
        assert [channel.index for channel in layer.massive_channels] == ([7] if layer.index >= 2 else [])
    assert "channel 7 carries up to" in report.verdict.text
    assert any(note.startswith("Channel 7 is massive in layers 2 to 4") for note in report.verdict.notes)


def test_nothing_is_named_where_nothing_was_planted():
    report = probe(llama(), ids)
    assert not any(layer.massive_tokens or layer.massive_channels or layer.massive_entries for layer in report.layers)
    assert report.verdict.notes == []


def test_tokens_that_are_long_at_the_input_were_not_made_by_a_layer():
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[2] *= 200
    long = ids.clone()
    long[:, 4] = 2
    report = probe(model, long)
    assert not any(layer.massive_tokens for layer in report.layers)


def test_positions_count_real_tokens_alone():
    model = llama()
    mask = torch.ones_like(ids)
    mask[:, :6] = 0  # padding on the left
    plant(model, 2, token=6)
    report = probe(model, {"input_ids": ids, "attention_mask": mask, "use_cache": False})
    assert [token.index for token in report.layers[2].massive_tokens] == [0]
    assert report.layers[2].tokens == 18


def test_a_planted_sink_is_found_and_no_other():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TEXT, initializer_range=0.05)).eval()
    plain = probe(model, ids)
    assert all(layer.sink_share == 0 for layer in plain.layers[1:])
    assert all(weight < 0.2 for layer in plain.layers[1:] for weight in layer.sink_weight)
    special = ids.clone()
    special[:, 3] = 1
    with torch.no_grad():  # the first head of layer 2 finds the key of token 1, by a channel that only that token has
        model.embeddings.word_embeddings.weight[:, 0] = 0
        model.embeddings.word_embeddings.weight[1, 0] = 3
        attention = model.encoder.layer[1].attention.self
        attention.query.weight[:8] = 0
        attention.query.bias[:8] = 20
        attention.key.weight[:8] = 0
        attention.key.weight[:8, 0] = 1
    report = probe(model, special)
    assert report.layers[2].sink_weight[0] > 0.5
    assert report.layers[2].sink_share == 0.25
    assert report.layers[1].sink_share == report.layers[3].sink_share == 0


def test_raw_figures_rule_where_a_report_has_no_robust_ones():
    model = llama()
    plant(model, 2, channel=7, size=1e3)
    report = probe(model, ids, trials=False)
    assert report.verdict.kind == "no collapse"
    for layer in report.layers:
        layer.similarity_robust = layer.tokens = None
        layer.massive_channels = []
    assert ll.report.verdict.judge(report.layers).kind == "collapse"
