"""A cured model equals ours with the same weights and strengths, or a computation by hand."""

import copy
import sys
from dataclasses import replace

import cure_zoo as zoo
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as T

import leadline as ll
from leadline.curing import cure, uncure

STRENGTHS = [
    {"alpha": 0.5, "alpha_prime": 0.6},
    {"alpha": 0.3},
    {"alpha_prime": 0.7},
    {"alpha_prime": 0.7, "start": "scores"},
    {"de_escalation": 0.4},
    {"alpha": 0.3, "alpha_prime": 0.5, "de_escalation": 0.8, "de_escalation_at": "ffn-input"},
    {"alpha": 0.3, "alpha_prime": 0.5, "de_escalation": 1.0, "de_escalation_at": "attention-input"},
]


def ours_with(theirs, strengths):
    zeros = {"alpha": 0.0, "alpha_prime": 0.0}
    return ll.convert(theirs, attention="hopfield", **{**zeros, **strengths})


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
@pytest.mark.parametrize("make", zoo.TEXT_MODELS + zoo.IMAGE_MODELS)
def test_equals_convert(make, strengths):
    for padding in ("left", "right") if make in zoo.TEXT_MODELS else ("none",):
        theirs = make()
        ours, inputs = ours_with(theirs, strengths), zoo.inputs_for(make, padding)
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"].bool()
            want = ours(inputs["input_ids"], mask)[mask]
        else:
            want = ours(*inputs.values())
        before = zoo.result(theirs, inputs)
        got = zoo.result(cure(theirs, **strengths), inputs)
        assert (got - want).abs().max() <= 1e-4
        assert (got - before).abs().max() > 1e-3
        assert torch.equal(zoo.result(uncure(theirs), inputs), before)


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.bert, zoo.vit, zoo.timm_vit])
def test_layers_left_out_are_plain(make):
    """Layer 3 starts without carried scores, since the layer before it is not cured."""
    theirs, inputs = make(), zoo.inputs_for(make)
    ours = ours_with(theirs, {"alpha": 0.4, "alpha_prime": 0.6})
    for i in (0, 2):
        ours.blocks[i].attention.alpha.value = ours.blocks[i].attention.alpha_prime.value = 0.0
    mask = inputs.get("attention_mask")
    want = ours(*inputs.values()) if mask is None else ours(inputs["input_ids"], mask.bool())[mask.bool()]
    cure(theirs, alpha=0.4, alpha_prime=0.6, layers=[1, -1])
    assert (zoo.result(theirs, inputs) - want).abs().max() <= 1e-4


def test_albert_counts_its_calls():
    """The layers of ALBERT are one module; a cure of some of them must count the calls."""
    theirs, inputs = zoo.albert(), zoo.inputs_for(zoo.albert)
    ours = ours_with(theirs, {"alpha": 0.4, "alpha_prime": 0.6})
    x, _ = ours.embed(inputs["input_ids"])
    plain = copy.deepcopy(ours.blocks[0])
    plain.attention.alpha.value = plain.attention.alpha_prime.value = 0.0
    state, mask = None, inputs["attention_mask"].bool()
    for i in range(4):
        x, state = (ours.blocks[0] if i in (1, 2) else plain)(x, state, mask)
    cure(theirs, alpha=0.4, alpha_prime=0.6, layers=[1, 2])
    assert (zoo.result(theirs, inputs) - x[mask]).abs().max() <= 1e-4


LITERAL = {
    "Mistral": (T.MistralForCausalLM, T.MistralConfig(**zoo.DECODER, sliding_window=3)),
    "Mixtral": (T.MixtralForCausalLM, T.MixtralConfig(**zoo.DECODER, num_local_experts=3, sliding_window=None)),
    "Qwen2": (T.Qwen2ForCausalLM, T.Qwen2Config(**zoo.DECODER)),
    "Qwen3": (T.Qwen3ForCausalLM, T.Qwen3Config(**zoo.DECODER, head_dim=8)),
    "Gemma": (T.GemmaForCausalLM, T.GemmaConfig(**zoo.DECODER, head_dim=8)),
    "Roberta": (T.RobertaForMaskedLM, T.RobertaConfig(**zoo.ENCODER, max_position_embeddings=12)),
    "XLMRoberta": (T.XLMRobertaForTokenClassification, T.XLMRobertaConfig(**zoo.ENCODER, max_position_embeddings=12)),
    "Electra": (T.ElectraForSequenceClassification, T.ElectraConfig(**zoo.ENCODER, embedding_size=6)),
    "Bert": (T.BertForMaskedLM, T.BertConfig(**zoo.ENCODER)),
}


def literal(model, monkeypatch, alpha, alpha_prime):
    """The same strengths by hand, on transformers' eager attention: a remembered score matrix, and wrapped modules."""
    model.set_attn_implementation("eager")
    base, remembered = model.base_model, []

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        before = remembered[-1] if remembered else 0.0
        remembered.append(alpha_prime * before + (1 - alpha_prime) * scaling * query @ key.mT)
        masked = remembered[-1] if attention_mask is None else remembered[-1] + attention_mask
        return (masked.softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setattr(sys.modules[type(base).__module__], "eager_attention_forward", attend)
    for block in base.layers if hasattr(base, "layers") else base.encoder.layer:
        if hasattr(block, "self_attn"):

            def run(hidden_states, plain=block.self_attn.forward, **kwargs):
                y, weights = plain(hidden_states=hidden_states, **kwargs)
                return alpha * hidden_states + (1 - alpha) * y, weights

            block.self_attn.forward = run
        else:

            def join(branch, x, part=block.attention.output):
                y = alpha * x + (1 - alpha) * part.dense(branch)
                return F.layer_norm(x + y, y.shape[-1:], part.LayerNorm.weight, part.LayerNorm.bias, part.LayerNorm.eps)

            block.attention.output.forward = join
    return model


@pytest.mark.parametrize("name", LITERAL)
def test_equals_a_literal_computation(name, monkeypatch):
    kind, config = LITERAL[name]
    model = zoo.liven(kind(config))
    inputs = zoo.inputs_for(zoo.gpt2, "right" if name == "Electra" else "left")
    if name == "Electra":

        def value(m):
            return m(**inputs).logits  # fmt: skip
    else:

        def value(m):
            return zoo.result(m, inputs)  # fmt: skip

    hand = literal(copy.deepcopy(model), monkeypatch, 0.3, 0.6)
    before, want = value(model), value(hand)
    cure(model, alpha=0.3, alpha_prime=0.6)
    assert (value(model) - want).abs().max() <= 1e-4
    assert (value(model) - before).abs().max() > 1e-3


def test_a_sliding_window_is_honoured():
    """With a window of 2, each layer moves information one place on: token 1 reaches token 5 after 4 layers."""
    model = cure(zoo.mistral(sliding_window=2, num_hidden_layers=4), alpha=0.3, alpha_prime=0.6)
    ids = torch.randint(3, 31, (1, 9))
    other = ids.clone()
    other[0, 1] = (ids[0, 1] + 1 - 3) % 28 + 3
    moved = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
    assert torch.all(moved[[0, 6, 7, 8]] == 0)
    assert torch.all(moved[1:6] > 0)


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama, zoo.bert, zoo.albert, zoo.vit])
def test_weights_and_hidden_states_are_those_of_the_cured_model(make):
    inputs, model = zoo.inputs_for(make), make()
    model(**inputs, output_hidden_states=True)  # transformers hangs its recorders before the cure
    ours = ours_with(model, {"alpha": 0.3, "alpha_prime": 0.6, "de_escalation": 0.5})
    cure(model, alpha=0.3, alpha_prime=0.6, de_escalation=0.5)
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    mask = inputs.get("attention_mask", torch.ones(2, 10)).bool()
    hands = []
    hooks = [block.register_forward_hook(lambda *call: hands.append(call[2])) for block in ours.blocks]
    ours(*inputs.values()) if "attention_mask" not in inputs else ours(inputs["input_ids"], mask)
    for hook in hooks:
        hook.remove()
    assert len(output.attentions) == len(hands) == 4
    for i, (x, (scores,)) in enumerate(hands):
        if i < 3 or make is zoo.vit:
            assert (output.hidden_states[i + 1] - x)[mask].abs().max() <= 1e-4
        visible = mask[:, None, None, :]
        if make in (zoo.gpt2, zoo.llama):
            visible = visible & torch.ones(7, 7, dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        rows = mask[:, None, :, None].expand_as(weights)
        assert (output.attentions[i] - weights)[rows].abs().max() <= 1e-5


def test_timm_features_go_through_the_cure():
    model = zoo.timm_vit()
    pixels = torch.randn(2, 3, 12, 12)
    ours = ours_with(model, {"alpha": 0.3, "alpha_prime": 0.6})
    seen = []
    for block in ours.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[2][0]))
    ours(pixels)
    cure(model, alpha=0.3, alpha_prime=0.6)
    for stop_early in (False, True):
        features = model.forward_intermediates(
            pixels, indices=[1, 2], output_fmt="NLC", intermediates_only=True, stop_early=stop_early
        )
        for got, want in zip(features, seen[1:3], strict=True):
            assert (got - want[:, 1:]).abs().max() <= 1e-4
    assert (model.forward_features(pixels) - ours.norm(seen[-1])).abs().max() <= 1e-4
    assert type(model.blocks[2].attn).__name__ == "CuredAttention"
    assert next(iter(model.blocks)).attn is model.blocks[0].attn
    causal = model(pixels, is_causal=True)
    assert (causal - model(pixels)).abs().max() > 1e-3


def test_timm_variants():
    pixels = torch.randn(2, 3, 32, 32)
    for options in ({"init_values": 0.5, "qk_norm": True}, {"global_pool": "avg", "class_token": False}):
        model = zoo.timm_vit(img_size=32, patch_size=16, **options)
        before = model(pixels)
        assert (cure(model, alpha=0.3, alpha_prime=0.6, de_escalation=0.5)(pixels) - before).abs().max() > 1e-3
        uncure(model)
        near = cure(model, alpha=1e-6, alpha_prime=1e-6, start="scores", de_escalation=1e-6)(pixels)
        assert (near - before).abs().max() <= 1e-4
    deit = zoo.liven(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32))
    want = ours_with(deit, {"alpha": 0.3, "alpha_prime": 0.6})(pixels)
    assert (cure(deit, alpha=0.3, alpha_prime=0.6)(pixels) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["vit_tiny", "gpt2_small", "bert_base", "albert_base", "llama"])
def test_our_own_models(name):
    options = {"dim": 12, "heads": 3, "ffn": 17, "depth": 3, "kv_heads": 3}
    options |= {"image_size": 12, "patch_size": 4} if name == "vit_tiny" else {"vocab_size": 31, "max_tokens": 9}
    strengths = {
        "alpha": 0.3,
        "alpha_prime": 0.6,
        "de_escalation": 0.5,
        "de_escalation_at": "ffn-input",
        "start": "scores",
    }
    model = zoo.liven(ll.create_model(name, **options))
    x = torch.randn(2, 3, 12, 12) if name == "vit_tiny" else torch.randint(31, (2, 7))
    want = ll.create_model(name, **options, attention="hopfield", **strengths).eval()
    want.load_state_dict(model.state_dict())
    before, config = model(x), model.config
    assert torch.equal(cure(model, **strengths)(x), want(x))
    assert model.config == want.config
    assert torch.equal(uncure(model)(x), before)
    assert model.config == config


def test_what_is_not_given_stays_as_our_own_model_has_it():
    options = {"dim": 12, "heads": 3, "depth": 2, "vocab_size": 31, "max_tokens": 9, "attention": "hopfield"}
    options |= {"start": "scores", "de_escalation": 0.5, "de_escalation_at": "attention-input"}
    model = ll.create_model("gpt2_small", **options, alpha=0.5, alpha_prime=0.5)
    had = model.config
    assert cure(model, alpha_prime=0.5, de_escalation=0.5).config == had
    uncure(model)
    changed = {"alpha": 0.2, "start": "zero", "de_escalation_at": "block-end"}
    assert cure(model, **changed).config == replace(had, **changed)
    uncure(model)
    plain = cure(model, alpha=0, alpha_prime=0, de_escalation=0).config
    assert plain.strengths == (0, 0)
    assert not plain.de_escalation
