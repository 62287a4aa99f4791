"""With weights copied over, ours equals transformers' and timm's, layer by layer."""

import pytest
import timm
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import leadline as ll

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
dtypes = st.sampled_from(list(TOLERANCE))
paddings = st.sampled_from(["none", "left", "right"])
widths = st.sampled_from([(8, 1), (12, 3), (24, 4)])


def liven(model):
    """Biases, norms and tokens that start at 0 or 1 would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def padded_mask(kind, B=3, N=7):
    mask = torch.ones(B, N, dtype=torch.bool)
    if kind == "left":
        mask[0, :3] = mask[1, :1] = False
    elif kind == "right":
        mask[0, 4:] = mask[1, 6:] = False
    return mask


def hidden_states(model, *args, **kwargs):
    """The output, and what leaves every block."""
    seen = []
    hooks = [block.register_forward_hook(lambda *call: seen.append(call[2][0])) for block in model.blocks]
    output = model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return output, seen


def compare(pairs, dtype):
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype == dtype
        assert (ours - theirs).abs().max() <= TOLERANCE[dtype]


@settings(max_examples=12)
@given(widths, st.integers(1, 3), dtypes, paddings, st.sampled_from(["gelu_new", "relu", "gelu"]), st.booleans())
def test_gpt2(width, depth, dtype, padding, activation, tied):
    dim, heads = width
    config = transformers.GPT2Config(
        n_layer=depth, n_embd=dim, n_head=heads, n_inner=dim + 5, vocab_size=31, n_positions=9,
        activation_function=activation, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = liven(transformers.GPT2LMHeadModel(config).to(dtype))
    ours = ll.convert(theirs)
    ids, mask = torch.randint(31, (3, 7)), padded_mask(padding)
    want = theirs(ids, attention_mask=mask.long(), output_hidden_states=True)
    logits, states = hidden_states(ours, ids, mask)
    final = ours.norm(states[-1])
    compare([(logits[mask], want.logits[mask]), (final[mask], want.hidden_states[-1][mask])], dtype)
    compare([(a[mask], b[mask]) for a, b in zip(states[:-1], want.hidden_states[1:-1], strict=True)], dtype)


@settings(max_examples=12)
@given(widths, st.integers(1, 3), dtypes, paddings, st.sampled_from(["gelu", "relu"]))
def test_bert(width, depth, dtype, padding, activation):
    dim, heads = width
    config = transformers.BertConfig(
        num_hidden_layers=depth, hidden_size=dim, num_attention_heads=heads, intermediate_size=dim + 5,
        vocab_size=31, max_position_embeddings=9, hidden_act=activation,
    )  # fmt: skip
    theirs = liven(transformers.BertModel(config).to(dtype))
    ids, mask, types = torch.randint(31, (3, 7)), padded_mask(padding), torch.randint(2, (3, 7))
    want = theirs(ids, attention_mask=mask.long(), token_type_ids=types, output_hidden_states=True)
    last, states = hidden_states(ll.convert(theirs), ids, mask, types=types)
    compare([(last[mask], want.last_hidden_state[mask])], dtype)
    compare([(a[mask], b[mask]) for a, b in zip(states, want.hidden_states[1:], strict=True)], dtype)


@settings(max_examples=12)
@given(widths, st.integers(1, 3), dtypes, st.booleans(), st.booleans())
def test_vit(width, depth, dtype, headless, qkv_bias):
    dim, heads = width
    config = transformers.ViTConfig(
        num_hidden_layers=depth, hidden_size=dim, num_attention_heads=heads, intermediate_size=dim + 5,
        image_size=12, patch_size=4, num_labels=5, qkv_bias=qkv_bias,
    )  # fmt: skip
    kind = transformers.ViTModel if headless else transformers.ViTForImageClassification
    theirs = liven(kind(config).to(dtype))
    pixels = torch.randn(2, 3, 12, 12, dtype=dtype)
    want = theirs(pixels, output_hidden_states=True)
    ours = ll.convert(theirs)
    output, states = hidden_states(ours, pixels)
    compare([(output, want.last_hidden_state[:, 0] if headless else want.logits)], dtype)
    compare(zip(states, want.hidden_states[1:], strict=True), dtype)


@settings(max_examples=12)
@given(
    widths,
    st.integers(1, 3),
    dtypes,
    st.sampled_from([("token", True), ("avg", True), ("avg", False), ("max", False)]),
    st.booleans(),
    st.sampled_from([0, 5]),
)
def test_timm_vit(width, depth, dtype, pool, qkv_bias, classes):
    dim, heads = width
    theirs = timm.models.VisionTransformer(
        img_size=12, patch_size=4, embed_dim=dim, depth=depth, num_heads=heads, num_classes=classes,
        mlp_ratio=1.5, global_pool=pool[0], class_token=pool[1], qkv_bias=qkv_bias,
    )  # fmt: skip
    theirs = liven(theirs.to(dtype))
    pixels = torch.randn(2, 3, 12, 12, dtype=dtype)
    output, states = hidden_states(ll.convert(theirs), pixels)
    want = theirs.forward_intermediates(pixels, output_fmt="NLC", intermediates_only=True)
    compare([(output, theirs(pixels))], dtype)
    compare([(a[:, theirs.num_prefix_tokens :], b) for a, b in zip(states, want, strict=True)], dtype)


def test_a_registered_timm_model():
    theirs = liven(timm.create_model("vit_tiny_patch16_224"))
    pixels = torch.randn(1, 3, 224, 224)
    assert (ll.convert(theirs)(pixels) - theirs(pixels)).abs().max() <= 1e-4


def small_gpt2(**options):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0, **options)
    )


def test_options_ride_along_and_weights_are_copies():
    theirs = small_gpt2().double().train()
    ours = ll.convert(theirs, attention="hopfield", learnable_alpha="layer", de_escalation=0.5)
    assert ours.training
    assert ours.config.dropout == 0.1
    assert ours.blocks[0].attention.alpha.parameter.dtype == torch.float64
    assert ours.blocks[0].attention.alpha() == 0.5
    with torch.no_grad():
        theirs.transformer.wte.weight.zero_()
    assert ours.token.weight.abs().sum() > 0


def test_zero_strength_changes_nothing():
    theirs = liven(small_gpt2().double())
    ids = torch.randint(11, (2, 6))
    zero = ll.convert(theirs, attention="hopfield", alpha=0.0, alpha_prime=0.0)
    assert torch.equal(zero(ids), ll.convert(theirs)(ids))
    assert not torch.allclose(ll.convert(theirs, attention="hopfield")(ids), zero(ids))


@pytest.mark.parametrize(
    ("model", "overrides", "part"),
    [
        (lambda: nn.Linear(2, 2), {}, "torch.nn.modules.linear.Linear cannot be converted; allowed: "),
        (lambda: small_gpt2(scale_attn_by_inverse_layer_idx=True), {}, "scale_attn_by_inverse_layer_idx=True"),
        (lambda: small_gpt2(activation_function="tanh"), {}, "the activation is 'tanh'"),
        (small_gpt2, {"depth": 3}, "lacks blocks.2.attention.qkv.weight"),
        (small_gpt2, {"dim": 10}, "has token.weight of shape (11, 8) instead of (11, 10)"),
        (small_gpt2, {"norm": "post"}, "has norm.weight, for which this model has no place"),
        (small_gpt2, {"widht": 3}, "unknown option of gpt2 models 'widht'"),
        (
            lambda: timm.create_model("vit_tiny_patch16_224", depth=1, init_values=1e-5),
            {},
            "no place for (blocks.0.ls1",
        ),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, qk_norm=True), {}, "no place for (blocks.0.attn.q"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, pos_embed="none"), {}, "has no weight pos_embed"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(32, 64)), {}, "square_images=False"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, global_pool="map"), {}, "pools by 'map'"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, act_layer=nn.SiLU), {}, "activation is SiLU"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, act_layer=nn.ReLU), {"ffn": 7}, "instead of"),
    ],
)
def test_a_mismatch_is_one_clear_line(model, overrides, part):
    with pytest.raises(ll.LeadlineError) as error:
        ll.convert(model(), **overrides)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=15)
@given(
    st.sampled_from([(8, 1, 1, 8), (12, 3, 1, 4), (24, 4, 2, 8)]),
    st.integers(1, 3),
    dtypes,
    paddings,
    st.booleans(),
    st.booleans(),
    st.sampled_from(
        [
            {"rope_type": "default", "rope_theta": 500.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ]
    ),
)
def test_llama(width, depth, dtype, padding, tied, bias, rope):
    dim, heads, kv_heads, head_dim = width
    config = transformers.LlamaConfig(
        num_hidden_layers=depth, hidden_size=dim, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, intermediate_size=dim + 5, vocab_size=31, max_position_embeddings=128,
        attention_bias=bias, mlp_bias=bias, tie_word_embeddings=tied, rope_parameters=dict(rope),
    )  # fmt: skip
    theirs = liven(transformers.LlamaForCausalLM(config).to(dtype))
    ours = ll.convert(theirs)
    ids, mask = torch.randint(31, (3, 7)), padded_mask(padding)
    want = theirs(ids, attention_mask=mask.long(), output_hidden_states=True)
    logits, states = hidden_states(ours, ids, mask)
    states[-1] = ours.norm(states[-1])
    # transformers computes its RMSNorm and its rotary angles in float32, whatever the model's dtype
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6}[dtype]
    assert (logits - want.logits)[mask].abs().max() <= tolerance
    for ours_state, their_state in zip(states, want.hidden_states[1:], strict=True):
        assert (ours_state - their_state)[mask].abs().max() <= tolerance
    bare = ll.convert(theirs.model)
    assert (bare.encode(ids, mask) - want.hidden_states[-1])[mask].abs().max() <= tolerance


def test_llama_generates_as_transformers_does():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20,
        vocab_size=31, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = liven(transformers.LlamaForCausalLM(config))
    ids, mask = torch.randint(31, (3, 7)), padded_mask("left")
    want = theirs.generate(ids, attention_mask=mask.long(), max_new_tokens=12, do_sample=False)
    assert torch.equal(ll.convert(theirs).generate(ids, 12, mask=mask), want)


@settings(max_examples=12)
@given(widths, st.integers(1, 4), dtypes, paddings, st.sampled_from(["gelu_new", "relu"]))
def test_albert(width, depth, dtype, padding, activation):
    dim, heads = width
    config = transformers.AlbertConfig(
        num_hidden_layers=depth, hidden_size=dim, num_attention_heads=heads, intermediate_size=dim + 5,
        embedding_size=6, vocab_size=31, max_position_embeddings=9, hidden_act=activation,
    )  # fmt: skip
    theirs = liven(transformers.AlbertModel(config).to(dtype))
    ids, mask, types = torch.randint(31, (3, 7)), padded_mask(padding), torch.randint(2, (3, 7))
    want = theirs(ids, attention_mask=mask.long(), token_type_ids=types, output_hidden_states=True)
    ours = ll.convert(theirs)
    assert len(ours.blocks) == 1
    last, states = hidden_states(ours, ids, mask, types=types)
    compare([(last[mask], want.last_hidden_state[mask])], dtype)
    compare([(a[mask], b[mask]) for a, b in zip(states, want.hidden_states[1:], strict=True)], dtype)


@settings(max_examples=12)
@given(
    widths,
    st.integers(1, 3),
    dtypes,
    st.sampled_from(["DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"]),
)
def test_deit(width, depth, dtype, kind):
    dim, heads = width
    config = transformers.DeiTConfig(
        num_hidden_layers=depth, hidden_size=dim, num_attention_heads=heads, intermediate_size=dim + 5,
        image_size=12, patch_size=4, num_labels=5,
    )  # fmt: skip
    theirs = liven(getattr(transformers, kind)(config).to(dtype))
    pixels = torch.randn(2, 3, 12, 12, dtype=dtype)
    want = theirs(pixels, output_hidden_states=True)
    output, states = hidden_states(ll.convert(theirs), pixels)
    compare([(output, want.last_hidden_state[:, 0] if kind == "DeiTModel" else want.logits)], dtype)
    compare(zip(states, want.hidden_states[1:], strict=True), dtype)


@settings(max_examples=8)
@given(widths, st.integers(1, 3), dtypes)
def test_timm_deit(width, depth, dtype):
    dim, heads = width
    theirs = timm.models.deit.VisionTransformerDistilled(
        img_size=12, patch_size=4, embed_dim=dim, depth=depth, num_heads=heads, num_classes=5, mlp_ratio=1.5
    )
    theirs = liven(theirs.to(dtype))
    pixels = torch.randn(2, 3, 12, 12, dtype=dtype)
    output, states = hidden_states(ll.convert(theirs), pixels)
    want = theirs.forward_intermediates(pixels, output_fmt="NLC", intermediates_only=True)
    compare([(output, theirs(pixels))], dtype)
    compare([(a[:, 2:], b) for a, b in zip(states, want, strict=True)], dtype)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_registered_timm_deits(name):
    theirs = liven(timm.create_model(name))
    pixels = torch.randn(1, 3, 224, 224)
    assert (ll.convert(theirs)(pixels) - theirs(pixels)).abs().max() <= 1e-4


def small_llama(**options):
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 9,
        "vocab_size": 11,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **options))


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (lambda: small_llama(mlp_bias=True), "mlp_bias=True"),
        (lambda: small_llama(hidden_act="gelu"), "hidden_act='gelu'"),
        (
            lambda: small_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "unknown rope_type 'dynamic'",
        ),
        (
            lambda: transformers.AlbertModel(
                transformers.AlbertConfig(hidden_size=8, num_attention_heads=2, num_hidden_groups=2, vocab_size=11)
            ),
            "num_hidden_groups=2",
        ),
        (lambda: timm.create_model("deit3_small_patch16_224", depth=1), "no place for (blocks.0.ls1"),
    ],
)
def test_an_unsupported_variant_is_one_clear_line(model, part):
    with pytest.raises(ll.LeadlineError) as error:
        ll.convert(model())
    assert part in str(error.value)
    assert "\n" not in str(error.value)
