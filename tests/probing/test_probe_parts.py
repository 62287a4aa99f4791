"""What the parts of a block do: rates of attention, norms and MLP, the gain of attention, redundant blocks."""

import math

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.metrics import token_diversity
from leadline.probing import probe

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.1,
}
ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(1))


def rate(before, after):
    return (token_diversity(before) / token_diversity(after)).mean().item()


def taps(model, names):
    """Inputs and outputs of modules in one forward pass of ``ids``."""
    seen, hooks = {}, []
    for name in names:

        def hook(_, args, kwargs, output, name=name):
            first = args[0] if args else kwargs["hidden_states"]
            seen[name] = (first.detach(), (output[0] if isinstance(output, tuple) else output).detach())

        hooks.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def test_post_norm_parts_multiply_to_the_block():
    model = transformers.BertModel(transformers.BertConfig(**TEXT)).eval()
    block, norm1, norm2 = (
        f"encoder.layer.1{part}" for part in ("", ".attention.output.LayerNorm", ".output.LayerNorm")
    )
    seen = taps(model, [block, norm1, norm2])
    layer = probe(model, ids[:1], trials=False).layers[2]
    product = layer.rates["attention"] * layer.rates["norm"] * layer.rates["mlp"]
    assert product == pytest.approx(layer.rate, rel=1e-5)  # one sample: means do not multiply
    layer = probe(model, ids, trials=False).layers[2]
    assert layer.rates["attention"] == pytest.approx(rate(seen[block][0], seen[norm1][0]), abs=1e-5)
    assert layer.rates["mlp"] == pytest.approx(rate(seen[norm1][1], seen[norm2][0]), abs=1e-5)


@pytest.mark.parametrize(
    ("build", "block", "second_norm"),
    [
        (
            lambda: transformers.GPT2Model(
                transformers.GPT2Config(
                    vocab_size=60, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1, bos_token_id=0, eos_token_id=0
                )
            ),
            "h.1",
            "ln_2",
        ),
        (
            lambda: transformers.LlamaModel(transformers.LlamaConfig(**TEXT)),
            "layers.1",
            "post_attention_layernorm",
        ),
        (  # norms on both sides of each branch
            lambda: transformers.Gemma2Model(
                transformers.Gemma2Config(num_key_value_heads=2, head_dim=8, attn_implementation="eager", **TEXT)
            ),
            "layers.1",
            "pre_feedforward_layernorm",
        ),
        (
            lambda: ll.create_model("gpt2_small", depth=2, dim=32, heads=4, vocab_size=60, init="xavier"),
            "blocks.1",
            "norm2",
        ),
    ],
    ids=["gpt2", "llama", "gemma2", "ours"],
)
def test_pre_norm_parts(build, block, second_norm):
    model = build().eval()
    seen = taps(model, [block, f"{block}.{second_norm}"])
    layer = probe(model, ids, trials=False).layers[2]
    before, after = seen[block]
    middle = seen[f"{block}.{second_norm}"][0]
    assert layer.rates["attention"] == pytest.approx(rate(before, middle), abs=1e-5)
    assert layer.rates["mlp"] == pytest.approx(rate(middle, after), abs=1e-5)


def test_norms_on_branches_alone():
    model = transformers.Olmo2Model(transformers.Olmo2Config(pad_token_id=0, eos_token_id=1, **TEXT)).eval()
    seen = taps(model, ["layers.1", "layers.1.mlp"])
    layer = probe(model, ids, trials=False).layers[2]
    middle = seen["layers.1.mlp"][0]  # the stream itself
    assert layer.rates["attention"] == pytest.approx(rate(seen["layers.1"][0], middle), abs=1e-5)
    assert layer.rates["mlp"] == pytest.approx(rate(middle, seen["layers.1"][1]), abs=1e-5)


def test_attention_and_mlp_side_by_side_have_no_rates_of_their_own():
    config = transformers.GPTNeoXConfig(use_parallel_residual=True, bos_token_id=0, eos_token_id=1, **TEXT)
    report = probe(transformers.GPTNeoXModel(config), ids, trials=False)
    assert set(report.layers[1].rates) == {"norm"}
    assert report.layers[1].rate is not None
    assert report.layers[1].gain is None


def test_attention_alone_is_the_whole_block():
    model = ll.create_model("attention_only", depth=3, image_size=32)
    layer = probe(model, torch.randn(2, 3, 32, 32), trials=False).layers[2]
    assert layer.rates == {"attention": layer.rate}
    assert layer.gain is None  # there is no skip for the branch to be compared with


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("gain", [0.4, 1.0])
def test_gain_of_a_known_branch(gain, alpha):
    """Y = X + gain (alpha X + (1 - alpha) P X W) with W of variance 1/d: (1 - alpha) gain / (1 + alpha gain)."""
    width = 1024
    model = ll.create_model(
        "attention_only",
        depth=1,
        dim=width,
        heads=1,
        image_size=32,
        skip=True,
        gain=gain,
        attention="hopfield",
        alpha=alpha,
        alpha_prime=0.0,
    )
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.qkv.weight[: 2 * width] = 0  # uniform attention
        attention.qkv.weight[2 * width :].normal_(std=width**-0.5)
        attention.qkv.bias.zero_()
        attention.proj.weight.copy_(torch.eye(width))
        attention.proj.bias.zero_()
        model.positions.table.weight.add_(1.0)  # a token mean to speak of
    layer = probe(model, torch.randn(4, 3, 32, 32), trials=False).layers[1]
    exact = (1 - alpha) * gain / (1 + alpha * gain)
    assert layer.gain == pytest.approx(exact, rel=4 * math.sqrt(0.5 / width))  # four deviations of |x W| / |x|


class InPlace(nn.Module):
    """A block that adds into its own input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Linear(32, 32)

    def forward(self, x):
        y = self.norm1(x)
        x += self.attn(y, y, y)[0]
        x += self.mlp(self.norm2(x))
        return x


class Careful(InPlace):
    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


def test_blocks_that_work_in_place():
    careful = nn.Sequential(Careful(), Careful())
    in_place = nn.Sequential(InPlace(), InPlace())
    in_place.load_state_dict(careful.state_dict())
    x = torch.randn(2, 9, 32)
    for a, b in zip(
        probe(careful, x, trials=False).layers, probe(in_place, x.clone(), trials=False).layers, strict=True
    ):
        assert a.rates == pytest.approx(b.rates)
        assert (a.rate, a.change, a.gain) == (
            pytest.approx(b.rate),
            pytest.approx(b.change),
            pytest.approx(b.gain),
        )


def test_a_block_that_does_nothing_is_redundant():
    model = transformers.GPT2Model(
        transformers.GPT2Config(
            vocab_size=60, n_embd=32, n_layer=3, n_head=4, initializer_range=0.3, bos_token_id=0, eos_token_id=0
        )
    )
    with torch.no_grad():
        for projection in (model.h[1].attn.c_proj, model.h[1].mlp.c_proj):
            projection.weight.zero_()
            projection.bias.zero_()
    report = probe(model, ids, trials=False)
    assert report.layers[2].change == 0
    assert report.verdict.redundant is None  # not measured
    report = probe(model, ids, trials=False, depth_use=True)
    assert report.layers[2].removal == report.layers[2].influence == 0
    assert report.verdict.redundant == [2]
    assert "leaving out layer 2 turns the last hidden state by 0" in report.verdict.text
    assert report.verdict.text.endswith(
        "The weights are as initialised, so what removal does to the output means nothing yet."
    )


def test_gradient_norms_are_those_of_a_plain_backward_pass():
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)).eval()
    batch = {"input_ids": ids, "labels": ids}
    report = probe(model, batch, loss="output.loss", trials=False)
    by_function = probe(model, batch, loss=lambda output: 2 * output.loss, trials=False)
    assert all(p.grad is None for p in model.parameters())
    model(**batch).loss.backward()
    for index, block in enumerate(model.bert.encoder.layer, start=1):
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters()))
        assert report.layers[index].gradient_norm == pytest.approx(norm, rel=1e-5)
        assert by_function.layers[index].gradient_norm == pytest.approx(2 * norm, rel=1e-5)


def test_shared_blocks_show_their_one_gradient():
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(embedding_size=16, **TEXT)).eval()
    report = probe(model, {"input_ids": ids, "labels": ids}, loss="output.loss", trials=False)
    model(input_ids=ids, labels=ids).loss.backward()
    block = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters()))
    assert [layer.gradient_norm for layer in report.layers[1:]] == pytest.approx([norm, norm], rel=1e-5)
