"""What a cure refuses, in one line, leaving the model as it was; and what strength 0 means."""

import copy

import cure_zoo as zoo
import pytest
import timm
import torch
import transformers as T
from torch import nn

import leadline as ll
from leadline.curing import cure, uncure
from leadline.errors import LeadlineError

EVERY = (*zoo.TEXT_MODELS, *zoo.IMAGE_MODELS, zoo.mistral)


def refused(model, match, **strengths):
    before = zoo.fingerprint(model)
    with pytest.raises(LeadlineError, match=match) as error:
        cure(model, **strengths)
    assert "\n" not in str(error.value)
    assert zoo.same(before, zoo.fingerprint(model))


@pytest.mark.parametrize("make", EVERY)
def test_strength_zero_is_the_identity(make):
    model, inputs = make(), zoo.inputs_for(make)
    before, want = zoo.fingerprint(model), zoo.result(model, inputs)
    cure(model, alpha=0, alpha_prime=0.0, de_escalation=0)
    after = zoo.fingerprint(model)
    assert torch.equal(zoo.result(model, inputs), want)
    assert (after["hooks"], after["attention"], after["config"]) == tuple(
        before[part] for part in ("hooks", "attention", "config")
    )
    assert zoo.same(before, zoo.fingerprint(uncure(model)))


@pytest.mark.parametrize("make", EVERY)
def test_uncure_restores_everything(make):
    model, inputs = make(), zoo.inputs_for(make)
    before, want = zoo.fingerprint(model), zoo.result(model, inputs)
    for strengths in ({"alpha": 0.3}, {"alpha_prime": 0.4}, {"de_escalation": 0.5}):
        cure(model, **strengths)
        assert not torch.equal(zoo.result(model, inputs), want)
        assert torch.equal(zoo.result(uncure(model), inputs), want)
        assert zoo.same(before, zoo.fingerprint(model))


def test_the_attention_function_changes_only_for_carried_scores():
    for make in (zoo.gpt2, zoo.bert):
        model = cure(make(attn_implementation="eager"), alpha=0.5, de_escalation=0.5)
        assert model.config._attn_implementation == "eager"
        assert cure(uncure(model), alpha_prime=0.5).config._attn_implementation == "leadline"
        assert uncure(model).config._attn_implementation == "eager"


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.timm_vit])
def test_bad_strengths(make):
    model = make()
    refused(model, "no strength is given")
    refused(model, r"alpha is 1; it must lie in \[0, 1\)", alpha=1)
    refused(model, "alpha_prime is -0.1", alpha_prime=-0.1)
    refused(model, r"de_escalation is 1.5; it must lie in \[0, 1\]", de_escalation=1.5)
    refused(model, "alpha is nan", alpha=float("nan"))
    refused(model, "alpha is 'half'; it must be a number", alpha="half")
    refused(model, "alpha is True", alpha=True)
    refused(model, "did you mean 'block-end'", de_escalation=0.5, de_escalation_at="block_end")
    refused(model, "unknown start", alpha_prime=0.5, start="one")
    refused(model, "layers has 4; this model's layers are the integers 0 to 3", alpha=0.5, layers=[0, 4])
    refused(model, "layers is empty", alpha=0.5, layers=[])


@pytest.mark.parametrize("make", EVERY)
def test_a_second_cure(make):
    model, inputs = cure(make(), alpha=0.3), zoo.inputs_for(make)
    want = zoo.result(model, inputs)
    refused(model, r"is cured already; call leadline\.uncure\(model\) first", alpha_prime=0.5)
    assert torch.equal(zoo.result(model, inputs), want)
    uncure(model)
    with pytest.raises(LeadlineError, match="is not cured"):
        uncure(model)


def small(**options):
    return {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 31,
        **options,
    }  # fmt: skip


def test_architectures():
    grouped = {"num_key_value_heads": 1, "head_dim": 8}
    refused(nn.Linear(2, 2), "Linear cannot be cured; known are our own models", alpha=0.5)
    refused(nn.TransformerEncoderLayer(8, 2), "TransformerEncoderLayer cannot be cured", alpha=0.5)
    refused(T.Gemma2ForCausalLM(T.Gemma2Config(**small(**grouped))), "soft-caps its scores", alpha=0.5)
    refused(T.GptOssModel(T.GptOssConfig(**small(**grouped, num_local_experts=2))), "attention sinks", alpha=0.5)
    refused(T.T5Model(T.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16)), "cross-attention", alpha=0.5)
    halves = T.BertConfig(**small()), T.BertConfig(**small())
    both = T.EncoderDecoderModel(T.EncoderDecoderConfig.from_encoder_decoder_configs(*halves))
    refused(both, "2 stacks of layers", alpha=0.5)
    refused(both.decoder, "has cross-attention", alpha=0.5)
    assert cure(both.encoder, alpha=0.5) is both.encoder
    parallel = {"block_fn": timm.models.vision_transformer.ParallelScalingBlock}
    refused(zoo.timm_vit(**parallel), "is built of ParallelScalingBlock", alpha=0.5)


def test_a_mix_of_full_and_sliding_attention():
    """Key lengths differ once a cache is longer than the window. Layers of one kind can be cured."""
    config = T.Qwen2Config(**zoo.DECODER, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    model = zoo.liven(T.Qwen2ForCausalLM(config))
    refused(model, "mixes full_attention and sliding_attention", alpha_prime=0.5)
    ids = torch.randint(3, 31, (2, 6))
    for options in ({"alpha": 0.5, "de_escalation": 0.5}, {"alpha_prime": 0.5, "layers": [2, 3]}):
        cured = cure(copy.deepcopy(model), **options)
        texts = [cured.generate(ids, max_new_tokens=8, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*texts)
    mixed = T.DynamicCache(config=config)  # a model that does not say so is caught when it happens
    model.config.layer_types = ["full_attention"] * 4
    cure(model, alpha_prime=0.5)
    model(ids, past_key_values=mixed)
    with pytest.raises(LeadlineError, match="layer 2 has 4 keys and layer 1 has 7"):
        model(ids[:, :1], past_key_values=mixed)


def test_options_that_do_not_go_together():
    refused(
        zoo.vit(hidden_dropout_prob=0.1), "hidden_dropout_prob=0.1", de_escalation=0.5, de_escalation_at="ffn-input"
    )
    pooled = zoo.timm_vit(global_pool="avg", class_token=False)
    refused(pooled, "pools by the mean and de_escalation is 1", de_escalation=1)
    eager = zoo.gpt2(attn_implementation="eager", output_attentions=True)
    refused(eager, "output_attentions=True", alpha_prime=0.5)
    with pytest.raises(LeadlineError, match="takes the mean of all its tokens"):
        cure(zoo.timm_vit(), de_escalation=0.5)(torch.randn(1, 3, 12, 12), is_causal=True)
    with pytest.raises(LeadlineError, match=r"give a torch\.nn\.Module"):
        cure("gpt2", alpha=0.5)


def test_another_attention_function_does_not_slip_in():
    model, inputs = cure(zoo.gpt2(), alpha_prime=0.5), zoo.inputs_for(zoo.gpt2)
    model.set_attn_implementation("eager")
    with pytest.raises(LeadlineError, match="was changed to 'eager', which carries no scores"):
        model(**inputs)
    model.set_attn_implementation("leadline")
    assert torch.isfinite(zoo.result(model, inputs)).all()


def test_parts_of_a_cured_model_do_not_run_alone():
    x = torch.randn(1, 7, 12)
    with pytest.raises(LeadlineError, match="call the model as a whole"):
        cure(zoo.gpt2(), alpha_prime=0.5).transformer.h[1](x)
    with pytest.raises(LeadlineError, match="ran by itself"):
        cure(zoo.timm_vit(), alpha_prime=0.5).blocks[1](x)


def test_our_own_models():
    options = {"dim": 12, "heads": 3, "depth": 2, "vocab_size": 31, "max_tokens": 9}
    refused(ll.create_model("gpt2_small", **options), "our own models have one strength", alpha=0.5, layers=[0])
    learned = ll.create_model("gpt2_small", **options, attention="hopfield", learnable_alpha="layer")
    refused(learned, "learns its strengths itself", alpha=0.5)
    pooled = ll.create_model("vit_tiny", dim=12, heads=3, depth=2, image_size=16, patch_size=8, pool="mean")
    refused(pooled, "the head sees nothing", de_escalation=1)
    half = ll.create_model("gpt2_small", **options).train()
    half.blocks[1].mlp.eval()
    cure(half, de_escalation=0.5)
    assert half.blocks[0].de_escalation.training
    assert not half.blocks[1].mlp.training  # a part that is held in evaluation stays so
    cured = cure(ll.create_model("gpt2_small", **options), alpha=0.5)
    refused(cured, "uncure", alpha=0.5)
