"""Probing other people's models against numbers computed by hand from what the models themselves hand out."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import leadline as ll
from leadline.probing import probe

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.1,
}
IMAGE = {name: value for name, value in TEXT.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}


def by_hand(hidden, attentions, inputs, masks=None, prefix=0):
    """Figures by layer, a sample at a time, in float64 and by their definitions.

    hidden: L + 1 of (B, n, d); attentions: L of (B, h, n, n); inputs: L of (B, n, d), what enters each attention.
    """
    layers = []
    for index, X_all in enumerate(hidden):
        rows = []
        for b, X in enumerate(np.asarray(X_all.detach().double())):
            real = np.ones(len(X), bool) if masks is None else np.asarray(masks[b])
            rows.append(_tokens_by_hand(X[real]))
            if prefix:
                rows[-1]["similarity_patches"] = _tokens_by_hand(X[prefix:])["similarity"]
            if index:
                before = np.asarray(hidden[index - 1][b].detach().double())[real]
                rows[-1]["rate"] = _tokens_by_hand(before)["diversity"] / rows[-1]["diversity"]
                P = np.asarray(attentions[index - 1][b].detach().double())[:, real][:, :, real]
                A = np.asarray(inputs[index - 1][b].detach().double())[real]
                rows[-1].update(_attention_by_hand(P, A))
        pooled = np.mean(np.concatenate([row.pop("cosines") for row in rows]))
        layers.append({name: np.mean([row[name] for row in rows], axis=0) for name in rows[0]})
        layers[-1]["cosines"] = pooled
    return layers


def _tokens_by_hand(X):
    n = len(X)
    mean = X.mean(0)
    total = (X**2).sum()
    cosines = [X[i] @ X[j] / np.linalg.norm(X[i]) / np.linalg.norm(X[j]) for i in range(n) for j in range(i)]
    s = np.linalg.svd(X, compute_uv=False)
    p = s / s.sum()
    return {
        "similarity": n * (mean @ mean) / total,
        "diversity": ((X - mean) ** 2).sum() / total,
        "cosine": np.mean(cosines),
        "cosines": np.array(cosines),
        "norm": np.linalg.norm(X, axis=1).mean(),
        "effective_rank": math.exp(-(p[p > 0] * np.log(p[p > 0])).sum()),
    }


def _attention_by_hand(P, X):
    n = P.shape[-1]
    e = np.ones(n) / math.sqrt(n)
    away = np.eye(n) - np.outer(e, e)
    entropy = [np.mean([-sum(p * math.log(p) for p in row if p > 0) for row in head]) for head in P]
    return {
        "entropy": np.array(entropy),
        "delta": np.array([np.linalg.norm(away @ head, 2) for head in P]),
        "omega": np.array([np.linalg.norm(e @ head @ away @ X) / np.linalg.norm(e @ X) for head in P]),
        "second_eigenvalue": np.array([np.sort(np.abs(np.linalg.eigvals(head)))[-2] for head in P]),
    }


def check(report, expected):
    assert len(report.layers) == len(expected)
    for layer, truth in zip(report.layers, expected, strict=True):
        for name, value in truth.items():
            got = np.array(layer.cosines.mean if name == "cosines" else getattr(layer, name))
            scale = max(1.0, np.abs(value).max())
            assert np.abs(got - value).max() <= TOLERANCE * scale, (layer.index, name, got, value)


def seen(model, names, run):
    """What goes in and out of the modules called ``names``, by hooks of our own."""
    took, gave, hooks = [], [], []
    for name in names:
        module = model.get_submodule(name)

        def hook(_, args, kwargs, output):
            took.append(args[0] if args else kwargs["hidden_states"])
            gave.append(output[0] if isinstance(output, tuple) else output)

        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        output = run()
    for hook in hooks:
        hook.remove()
    return took, gave, output


def eager(model, blocks, attention, **inputs):
    """Hidden states, attentions and attention inputs of a transformers model, as it outputs them itself."""
    names = [name for name, _ in model.named_modules() if _is_block(name, blocks)]
    model.set_attn_implementation("eager")
    run = lambda: model(**inputs, output_hidden_states=True, output_attentions=True)  # noqa: E731
    took, _, output = seen(model, [f"{name}.{attention}" for name in names], run)
    _, gave, _ = seen(model, names, run)
    model.set_attn_implementation("sdpa")
    # transformers hands out the last hidden state of some models behind their final norm
    hidden = (*output.hidden_states[: len(gave)], gave[-1])
    return hidden, output.attentions, took


def _is_block(name, blocks):
    path, _, last = name.rpartition(".")
    return path == blocks and last.isdigit()


HF: dict[str, Any] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=60, n_embd=32, n_layer=3, n_head=4, initializer_range=0.1, bos_token_id=0, eos_token_id=0
            )
        ),
        "transformer.h",
        "attn",
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **TEXT)),
        "model.layers",
        "self_attn",
    ),
    "qwen3": (
        lambda: transformers.Qwen3Model(transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, **TEXT)),
        "layers",
        "self_attn",
    ),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**TEXT)), "encoder.layer", "attention"),
    "roberta": (
        lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT)),
        "encoder.layer",
        "attention",
    ),
    "albert": (
        lambda: transformers.AlbertModel(transformers.AlbertConfig(embedding_size=16, **TEXT)),
        "encoder.albert_layer_groups.0.albert_layers",
        "attention",
    ),
    "vit": (lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGE)), "layers", "attention"),
    "deit": (lambda: transformers.DeiTModel(transformers.DeiTConfig(**IMAGE)), "layers", "attention"),
}


@pytest.mark.parametrize("name", HF)
def test_transformers_models_agree_with_their_own_outputs(name):
    build, blocks, attention = HF[name]
    model = build().eval()
    if name in ("vit", "deit"):
        inputs, prefix = {"pixel_values": torch.randn(2, 3, 32, 32)}, 1 if name == "vit" else 2
        for parameter in model.embeddings.parameters():
            if not parameter.any():  # a token of zeros has no cosine
                nn.init.normal_(parameter)
    else:
        inputs, prefix = {"input_ids": torch.randint(3, 60, (2, 11))}, 0
    expected = by_hand(*eager(model, blocks, attention, **inputs), prefix=prefix)
    report = probe(model, inputs, trials=False)
    check(report, expected)
    assert report.settings["prefix_tokens"] == prefix
    assert len(report.layers) == 4
    if name == "albert":
        assert report.layers[3].name.endswith("(call 3)")


def test_eager_attention_is_seen_as_the_fused_one_is():
    model = HF["llama"][0]().eval()
    ids = torch.randint(3, 60, (2, 11))
    fused = probe(model, ids, trials=False)
    model.set_attn_implementation("eager")
    slow = probe(model, ids, trials=False)
    for a, b in zip(fused.layers[1:], slow.layers[1:], strict=True):
        assert a.entropy == pytest.approx(b.entropy, abs=1e-6)
        assert a.second_eigenvalue == pytest.approx(b.second_eigenvalue, abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_stays_out(name, side):
    build, blocks, attention = HF[name]
    model = build().eval()
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = by_hand(*eager(model, blocks, attention, **inputs), masks=mask.bool())
    report = probe(model, inputs, trials=False)
    check(report, expected)
    assert report.settings["padding"]
    pairs = 9 * 8 // 2 + 5 * 4 // 2
    assert all(sum(layer.cosines.counts) == pairs for layer in report.layers)
    assert all(sum(head.counts) == 9 + 5 for layer in report.layers[1:] for head in layer.entropies)


@pytest.mark.parametrize(("name", "prefix"), [("vit_tiny_patch16_224", 1), ("deit_tiny_distilled_patch16_224", 2)])
def test_timm_models_agree_with_their_blocks_run_by_hand(name, prefix):
    model = timm.create_model(name, img_size=64, depth=3).eval()
    for parameter in model.parameters():  # timm's initialisation leaves attention almost uniform
        with torch.no_grad():
            parameter.mul_(2)
    images = torch.randn(2, 3, 64, 64)
    names = [f"blocks.{i}" for i in range(3)]
    took, gave, _ = seen(model, names, lambda: model(images))
    inputs, _, _ = seen(model, [f"{name}.attn" for name in names], lambda: model(images))
    report = probe(model, images, trials=False)
    attentions = []
    for i, x in enumerate(inputs):
        attn = model.blocks[i].attn
        q, k, _ = attn.qkv(x).reshape(2, x.shape[1], 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        attentions.append(((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1))
    check(report, by_hand([took[0], *gave], attentions, inputs, prefix=prefix))
    assert report.settings["prefix_tokens"] == prefix


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [None, "padding", "causal"])
def test_torch_encoder_agrees_with_its_modules(norm_first, batch_first, masked):
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 32)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    options: dict[str, Any] = {}
    if masked == "padding":
        padding[1, 6:] = True
        options["src_key_padding_mask"] = padding
    if masked == "causal":
        options["mask"] = nn.Transformer.generate_square_subsequent_mask(9)
    hidden, inputs, attentions = [x], [], []
    flip = (lambda y: y) if batch_first else (lambda y: y.transpose(0, 1))
    with torch.no_grad():
        for block in model.layers:
            before = flip(hidden[-1])
            taken = block.norm1(before) if norm_first else before
            _, weights = block.self_attn(
                taken,
                taken,
                taken,
                attn_mask=options.get("mask"),
                key_padding_mask=options.get("src_key_padding_mask"),
                average_attn_weights=False,
            )
            inputs.append(flip(taken))
            attentions.append(weights)
            after = block(
                before, src_mask=options.get("mask"), src_key_padding_mask=options.get("src_key_padding_mask")
            )
            hidden.append(flip(after))
    expected = by_hand(hidden, attentions, inputs, masks=~padding)
    report = probe(model, {"src": flip(x), **options}, trials=False)
    check(report, expected)


def test_our_models_agree_with_their_blocks_run_by_hand():
    model = ll.create_model("bert_base", depth=3, dim=32, heads=4, vocab_size=60, init="xavier").eval()
    ids = torch.randint(0, 60, (2, 11))
    hidden, inputs, attentions = [model.embed(ids)[0]], [], []
    for block in model.blocks.layers():
        inputs.append(hidden[-1])
        q, k, _ = block.attention.project(hidden[-1])
        attentions.append((q @ k.mT / math.sqrt(8)).softmax(-1))
        hidden.append(block(hidden[-1])[0])
    check(probe(model, ids, trials=False), by_hand(hidden, attentions, inputs))


@pytest.mark.parametrize("shared", [False, True])
def test_carried_scores_are_seen(shared):
    model = ll.create_model(
        "gpt2_small", depth=3, dim=32, heads=4, vocab_size=60, attention="hopfield", shared_layers=shared, init="xavier"
    ).eval()
    ids = torch.randint(0, 60, (2, 11))
    x, _ = model.positions(model.token(ids), torch.arange(11))
    hidden, inputs, attentions, state, h = [x], [], [], None, 0.0
    future = torch.ones(11, 11).triu(1).bool()
    for block in model.blocks.layers():
        inputs.append(block.norm1(hidden[-1]))
        q, k, _ = block.attention.project(inputs[-1])
        h = 0.5 * h + 0.5 * q @ k.mT / math.sqrt(8)
        attentions.append(h.masked_fill(future, -torch.inf).softmax(-1))
        y, state = block(hidden[-1], state)
        hidden.append(y)
    report = probe(model, ids, trials=False)
    check(report, by_hand(hidden, attentions, inputs))
    assert report.layers[-1].name == ("blocks.0 (call 3)" if shared else "blocks.2")


@pytest.mark.parametrize("formula", ["relu", "sigmoid", "sinkhorn"])
def test_attention_that_is_no_softmax_is_seen(formula):
    model = ll.create_model("vit_tiny", depth=2, image_size=32, attention="hopfield", alpha=0.0, alpha_prime=0.0)
    for block in model.blocks:
        block.attention.formula = formula
    images = torch.randn(1, 3, 32, 32)
    report = probe(model, images, trials=False)
    assert report.settings["attention_seen"] == 2
    block = model.eval().blocks[0]
    x = block.norm1(model.embed(images)[0])
    q, k, _ = block.attention.project(x)
    P = ll.ops.attention_weights(q @ k.mT / 8, formula=formula)
    entropy = -(P * P.clamp(min=1e-30).log()).sum(-1).mean((0, 2))
    assert report.layers[1].entropy == pytest.approx(entropy.tolist(), abs=TOLERANCE)


def test_half_precision_is_measured_in_full():
    model = HF["bert"][0]().eval()
    ids = torch.randint(3, 60, (2, 11))
    full = probe(model, ids, trials=False)
    half = probe(model.bfloat16(), ids, trials=False)
    assert half.settings["dtype"] == "bfloat16"
    for a, b in zip(full.layers, half.layers, strict=True):
        assert a.similarity == pytest.approx(b.similarity, abs=0.02)
        assert b.similarity + b.diversity == pytest.approx(1, abs=1e-6)


def test_autocast_around_the_probe_does_not_reach_its_sums():
    model = HF["bert"][0]().eval()
    ids = torch.randint(3, 60, (2, 11))
    with torch.autocast("cpu", torch.bfloat16):
        report = probe(model, ids, trials=False)
    uniform = report.layers[1].entropy_uniform
    assert uniform == pytest.approx(math.log(11))
    assert all(0 < entropy <= uniform for entropy in report.layers[1].entropy)
    assert report.layers[3].similarity + report.layers[3].diversity == pytest.approx(1, abs=1e-6)
