"""Every registered model: sizes, options, saving, and what is refused."""

import json
import math

import pytest
import torch

import leadline as ll

SMALL = {
    "vit": {"depth": 2, "dim": 12, "heads": 3, "image_size": 8, "patch_size": 4, "num_classes": 5},
    "gpt2": {"depth": 2, "dim": 12, "heads": 3, "vocab_size": 29, "max_tokens": 16},
    "bert": {"depth": 2, "dim": 12, "heads": 3, "vocab_size": 29, "max_tokens": 16},
}
SMALL |= {"llama": {**SMALL["gpt2"], "kv_heads": 1, "ffn": 20}, "albert": SMALL["bert"]}
SMALL |= {"transformer": {**SMALL["gpt2"], "ffn": 20, "cutoffs": (9, 20)}}
PUBLISHED = {  # parameters, from the model cards of timm (ImageNet-1k head) and transformers
    "vit_tiny": 5_717_416,
    "vit_small": 22_050_664,
    "vit_base": 86_567_656,
    "vit_large": 304_326_632,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "bert_base": 109_482_240 - 768 * 769,  # without the pooler
    "albert_base": 11_683_584 - 768 * 769,
    "deit_tiny": 5_910_800,
    "deit_small": 22_436_432,
    "deit_base": 87_338_192,
    "transformer_xl_base": 151_107_538,  # as its authors' training script prints it
}


def small(name, **options):
    family = name.partition("_")[0]
    return ll.create_model(name, **{**SMALL.get(family, SMALL["vit"]), **options})


def example(model):
    if model.family == "vit":
        c = model.config
        return torch.randn(2, c.channels, c.image_size, c.image_size)
    return torch.randint(29, (2, 7))


@pytest.mark.parametrize("name", ll.list_models())
def test_builds_on_the_meta_device_with_the_published_size(name):
    with torch.device("meta"):
        model = ll.create_model(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    if name in PUBLISHED:
        assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", ll.list_models())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "hopfield", "norm": "post", "de_escalation": 1.0, "norm_kind": "rms"},
        {"attention": "hopfield", "learnable_alpha": "head", "learnable_alpha_prime": "layer", "kv_heads": 1},
        {
            "skip": False,
            "gain": 0.5,
            "de_escalation": 0.5,
            "learnable_de_escalation": True,
            "de_escalation_at": "attention-input",
        },
    ],
)
def test_saved_and_loaded_gives_the_same_output(name, options, tmp_path):
    model = small(name, **options).eval()
    model.save(tmp_path / "model")
    loaded = ll.load(tmp_path / "model")
    inputs = example(model)
    assert loaded.config == model.config
    assert torch.equal(*(out[0] if isinstance(out, tuple) else out for out in (loaded(inputs), model(inputs))))
    assert not loaded.training
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_saving_again_replaces_and_keeps_the_dtype(tmp_path):
    small("gpt2_small").save(tmp_path)
    model = small("gpt2_small", depth=1).bfloat16()
    model.save(tmp_path)
    loaded = ll.load(tmp_path)
    assert loaded.config.depth == 1
    assert all(parameter.dtype == torch.bfloat16 and parameter.requires_grad for parameter in loaded.parameters())


def damage(folder, how):
    config, weights = folder / "config.json", folder / "model.safetensors"
    if how == "no folder":
        return folder / "nowhere"
    if how == "no config":
        config.unlink()
    elif how == "broken config":
        config.write_text(config.read_text()[:40])
    elif how == "foreign config":
        config.write_text(json.dumps({"model_type": "gpt2"}))
    elif how == "unknown family":
        config.write_text(config.read_text().replace('"gpt2"', '"gpt9"'))
    elif how == "family of another type":
        config.write_text(config.read_text().replace('"gpt2"', '["gpt2"]'))
    elif how == "other shape":
        config.write_text(config.read_text().replace('"dim": 12', '"dim": 15'))
    elif how == "other depth":
        config.write_text(config.read_text().replace('"depth": 2', '"depth": 1'))
    elif how == "wrong type":
        config.write_text(config.read_text().replace('"depth": 2', '"depth": "two"'))
    elif how == "no weights":
        weights.unlink()
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "empty weights":
        weights.write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("no folder", "is not a folder"),
        ("no config", "has no config.json"),
        ("broken config", "is not JSON"),
        ("foreign config", "is not Leadline's"),
        ("unknown family", "did you mean 'gpt2'?"),
        ("family of another type", "unknown model family in"),
        ("other shape", "instead of (29, 15)"),
        ("other depth", "has no place"),
        ("wrong type", "has the wrong type"),
        ("no weights", "is missing"),
        ("cut short", "damaged or cut short"),
        ("empty weights", "damaged or cut short"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(how, part, tmp_path):
    small("gpt2_small").save(tmp_path)
    with pytest.raises(ll.LeadlineError) as error:
        ll.load(damage(tmp_path, how))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pool", ["cls", "mean", "max"])
@pytest.mark.parametrize("class_token", [None, True])
def test_pooling(pool, class_token):
    model = small("vit_tiny", pool=pool, class_token=class_token).eval()
    pixels = example(model)
    x = model.encode(pixels)
    prefix = 1 if class_token or pool == "cls" else 0
    assert x.shape == (2, 4 + prefix, 12)
    pooled = {"cls": x[:, 0], "mean": x[:, prefix:].mean(1), "max": x[:, prefix:].max(1).values}[pool]
    assert torch.equal(model(pixels), model.head(pooled))
    assert torch.equal(small("vit_tiny", num_classes=0, pool="mean").head(pooled), pooled)


def test_small_images_and_positions():
    model = ll.create_model("vit_tiny", depth=1, image_size=32, patch_size=4, num_classes=10)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert model.config.tokens == 65
    for family, name in (("vit", "vit_tiny"), ("bert", "bert_base")):
        outputs = [small(name, positions=kind).eval() for kind in ("learned", "sinusoidal", "rotary", "none")]
        inputs = example(outputs[0])
        weights = outputs[-1].state_dict()
        results = []
        for model in outputs[1:]:  # these have the same weights
            model.load_state_dict(weights)
            results.append(model(inputs))
        assert not torch.allclose(results[0], results[1]), family
        assert not torch.allclose(results[1], results[2]), family


def test_without_positions_an_encoder_does_not_know_the_order():
    model = small("bert_base", positions="none", attention="hopfield", token_types=0).double().eval()
    ids = torch.randint(29, (2, 7))
    assert torch.allclose(model(ids).flip(1), model(ids.flip(1)), atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_reaches_a_real_token(side):
    model = small("bert_base", attention="hopfield", de_escalation=0.5).double().eval()
    ids, mask = torch.randint(29, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    mask[0, slice(0, 3) if side == "left" else slice(4, 7)] = False
    changed = torch.where(mask, ids, (ids + 1) % 29)
    assert torch.equal(model(ids, mask)[mask], model(changed, mask)[mask])
    assert not torch.equal(model(ids)[mask], model(changed)[mask])


def test_attention_only_is_nothing_else():
    model = ll.create_model("attention_only", depth=2, attention="hopfield", alpha=0.0)
    kinds = {type(module).__name__ for module in model.modules()}
    assert not kinds & {"LayerNorm", "RMSNorm", "MLP"}
    assert not model.config.skip
    assert model.config.tokens == 197


def spread(weight):
    return weight.detach().std().item()


def test_shared_layers_are_one_block_many_times():
    model = small("albert_base", depth=5, embedding_dim=7).eval()
    assert len(model.blocks) == 1
    assert len(list(model.blocks.layers())) == 5
    ids = torch.randint(29, (2, 7))
    x, _ = model.embed(ids)
    state = None
    for _ in range(5):
        x, state = model.blocks[0](x, state)
    assert torch.equal(model(ids), x)


def test_rotary_settings_are_checked_when_the_model_is_built():
    for rope, part in (
        ({"rope_type": "linear"}, "lack factor"),
        ({"rope_type": "yarn"}, "unknown rope_type 'yarn'"),
        ({"theta": 5.0}, "unknown setting of default rotary positions 'theta'"),
    ):
        with pytest.raises(ll.LeadlineError, match=part):
            small("llama", dim=24, rope=rope)


def test_initialisations():
    dim = 96
    by_name = {}
    for init in ("normal", "trunc_normal", "xavier", "xavier_fused", "torch"):
        by_name[init] = ll.create_model("vit_tiny", depth=2, dim=dim, heads=3, init=init)
    for init in ("normal", "trunc_normal"):
        assert math.isclose(spread(by_name[init].blocks[0].attention.qkv.weight), 0.02, rel_tol=0.05)
    q = by_name["xavier"].blocks[0].attention.qkv.weight[:dim]
    assert math.isclose(spread(q), (2 / (dim + dim)) ** 0.5, rel_tol=0.05)
    fused = by_name["xavier_fused"].blocks[0].attention.qkv.weight
    assert math.isclose(spread(fused), (2 / (dim + 3 * dim)) ** 0.5, rel_tol=0.05)
    assert math.isclose(spread(by_name["torch"].blocks[0].attention.qkv.weight), (1 / (3 * dim)) ** 0.5, rel_tol=0.05)
    assert by_name["xavier"].blocks[0].attention.qkv.bias.abs().max() == 0
    for shared in (False, True):
        gpt2 = ll.create_model("gpt2_small", depth=8, dim=dim, heads=3, vocab_size=29, shared_layers=shared)
        assert math.isclose(spread(gpt2.blocks[-1].mlp.fc2.weight), 0.02 / 4, rel_tol=0.05)
        assert math.isclose(spread(gpt2.blocks[-1].mlp.fc1.weight), 0.02, rel_tol=0.05)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: ll.create_model("vit_tinny"), "did you mean 'vit_tiny'?"),
        (lambda: ll.create_model("resnet50"), "unknown model 'resnet50'; allowed: albert_base,"),
        (lambda: ll.create_model("gpt2_small", image_size=32), "unknown option of gpt2 models 'image_size'"),
        (lambda: ll.create_model("vit_tiny", de_escalaton=1.0), "did you mean 'de_escalation'?"),
        (lambda: ll.create_model("vit_tiny", heads=5), "heads must divide dim"),
        (lambda: ll.create_model("vit_tiny", patch_size=15), "patch_size must divide image_size"),
        (lambda: ll.create_model("vit_tiny", pool="mean", de_escalation=1.0), "the token mean is exactly 0"),
        (lambda: ll.create_model("vit_tiny", pool="median"), "unknown pool 'median'"),
        (lambda: ll.create_model("vit_tiny", class_token=False), "choose pool 'mean' or 'max'"),
        (lambda: ll.create_model("vit_tiny", causal=True), "looks at all of the image"),
        (lambda: ll.create_model("bert_base", causal=True), "for a decoder see gpt2_small"),
        (lambda: ll.create_model("deit_tiny", pool="max"), "it needs pool 'cls'"),
        (lambda: ll.create_model("vit_tiny", distillation="both"), "unknown distillation 'both'"),
        (lambda: ll.create_model("albert_base", drop_path=0.1), "shared layers are one block"),
        (lambda: ll.create_model("vit_tiny", drop_path=0.1, skip=False), "without skips no path can be dropped"),
        (lambda: ll.create_model("vit_tiny", init="kaiming"), "unknown init 'kaiming'"),
        (lambda: ll.create_model("vit_tiny", depth="12"), "has the wrong type"),
        (lambda: small("vit_tiny")(torch.randn(2, 1, 8, 8)), "this model takes (batch, 3, 8, 8)"),
        (lambda: small("vit_tiny")(torch.randn(0, 3, 8, 8)), "this model takes (batch, 3, 8, 8)"),
        (lambda: small("bert_base")(torch.zeros(1, 17, dtype=torch.long)), "positions for 16"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(ll.LeadlineError) as error:
        call()
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mean_pool_head_takes_a_weaker_de_escalation_or_another_place():
    for options in ({"de_escalation": 0.9}, {"de_escalation": 1.0, "de_escalation_at": "ffn-input"}):
        model = small("vit_tiny", pool="mean", **options)
        assert model(example(model)).abs().sum() > 0
