"""Layouts, streams and parts: tokens that are not the middle axis, and models with several towers."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

import leadline as ll
from leadline.errors import LeadlineError
from leadline.metrics import token_similarity
from leadline.probing import watch
from leadline.report.depth_report import DepthReport
from leadline.report.html.page import render_page

WIDTH, HEADS, TOKENS = 16, 2, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):  # (B, n, d)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block over tokens that stand as ``axes`` says."""

    def __init__(self, axes="bnd"):
        super().__init__()
        self.axes = axes
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        y = bring(x, self.axes)
        y = y + self.attn(self.norm1(y))
        return back(y + self.mlp(self.norm2(y)), self.axes, x.shape)


def bring(x, axes):
    return {
        "bnd": lambda: x,
        "nbd": lambda: x.transpose(0, 1),
        "bdn": lambda: x.transpose(1, 2),
        "bdhw": lambda: x.flatten(2).transpose(1, 2),
        "bhwd": lambda: x.flatten(1, 2),
    }[axes]()


def back(y, axes, shape):
    if axes == "bdhw":
        return y.transpose(1, 2).reshape(shape)
    return y.reshape(shape) if axes == "bhwd" else bring(y, axes)


class Stack(nn.Module):
    """Ids (B, n) through blocks whose stream has the axes ``axes``."""

    def __init__(self, axes="bnd", blocks=3):
        super().__init__()
        self.axes = axes
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block(axes) for _ in range(blocks))

    def forward(self, ids):
        x = self.embedding(ids)
        sizes = {"b": len(ids), "h": 3, "w": ids.shape[1] // 3, "d": WIDTH, "n": ids.shape[1]}
        x = back(x, self.axes, [sizes[axis] for axis in self.axes])
        for block in self.blocks:
            x = block(x)
        return x


def stack(axes, **options):
    torch.manual_seed(0)
    model = Stack(axes, **options)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def ids(samples=3, tokens=TOKENS):
    return torch.randint(0, 40, (samples, tokens), generator=torch.Generator().manual_seed(1))


def numbers(value):
    """All numbers in plain data, in order."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("axes", ["nbd", "bdn", "bdhw", "bhwd"])
def test_every_layout_gives_the_figures_of_its_transposed_twin(axes):
    twin = ll.probe(stack("bnd"), ids(), trials=False)
    report = ll.probe(stack(axes), ids(), trials=False)
    assert report.measured.layout == axes
    assert report.measured.attention_seen == 3
    one, other = ([asdict(layer) for layer in made.layers] for made in (report, twin))
    assert len(numbers(one)) > 300
    assert numbers(one) == pytest.approx(numbers(other), abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("axes", ["bnd", "nbd", "bdn"])
@pytest.mark.parametrize("samples", [TOKENS, WIDTH, 1])
def test_axes_of_one_size_are_told_apart(axes, samples):
    tokens = WIDTH if samples == WIDTH else TOKENS
    twin = ll.probe(stack("bnd"), ids(samples, tokens), trials=False, blocks="blocks.*", layout="bnd")
    report = ll.probe(stack(axes), ids(samples, tokens), trials=False)
    assert report.measured.layout == axes
    assert [x.similarity for x in report.layers] == pytest.approx([x.similarity for x in twin.layers], abs=1e-6)


def test_what_cannot_be_told_is_refused_and_can_be_named():
    class Blind(Stack):  # what enters the blocks is a table: no axis holds the samples
        def forward(self, ids):
            x = self.embedding(ids).flatten(0, 1)[None]
            for block in self.blocks:
                x = block(x)
            return x

    model = Blind().eval()
    with pytest.raises(LeadlineError, match=r"takes \(1, 36, 16\).*samples cannot be told; name the axes by layout="):
        ll.probe(model, ids())
    assert ll.probe(model, ids(), layout="bnd", trials=False).settings["samples"] == 1
    with pytest.raises(LeadlineError, match="must have a letter for each axis"):
        ll.probe(model, ids(), layout="bnn")
    with pytest.raises(LeadlineError, match="does not fit layout 'bdhw'"):
        ll.probe(model, ids(), layout="bchw")


def test_watch_reads_maps_with_channels_first():
    model, twin = stack("bdhw"), stack("bnd")
    rows = []
    for one in (model, twin):
        with watch(one, every=1) as watcher:
            one(ids())
            rows.append([row["similarity"] for row in watcher.step()])
    assert rows[0] == pytest.approx(rows[1], abs=1e-6)


class Towers(nn.Module):
    """An encoder and a decoder, and blocks that never run."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.unused = stack("bdhw"), stack("bnd", blocks=4), stack("bnd", blocks=2)

    def forward(self, ids):
        return self.encoder(ids).mean((1, 2, 3)) + self.decoder(ids).mean((1, 2))


def test_every_tower_gets_its_report():
    model = Towers().eval()
    report = ll.probe(model, ids(), trials=False)
    assert list(report.parts) == ["decoder.blocks", "encoder.blocks"]
    for name, tower in (("decoder.blocks", model.decoder), ("encoder.blocks", model.encoder)):
        alone = ll.probe(tower, ids(), trials=False)
        part = report.parts[name]
        assert [x.similarity for x in part.layers] == [x.similarity for x in alone.layers]
        assert part.verdict.text == alone.verdict.text
        assert not alone.parts
    assert report.measured.left_out.keys() == {"unused.blocks"}
    assert (
        "Of 2 parts (decoder.blocks, encoder.blocks) none collapses; the figures are those of decoder.blocks."
        in report.verdict.text
    )
    assert "Left out: unused.blocks (no block ran" in report.verdict.text
    again = DepthReport.from_json(report.to_json())
    assert isinstance(again.parts["encoder.blocks"], DepthReport)
    assert again.to_json() == report.to_json()
    page = render_page(report)
    assert "<summary>encoder.blocks: " in page
    assert "left out: unused.blocks" in page


def test_parts_are_chosen_by_name():
    model = Towers().eval()
    report = ll.probe(model, ids(), parts="encoder", trials=False)
    assert report.measured.part == "encoder.blocks"
    assert not report.parts
    assert report.verdict.text.startswith(
        "Measured in part, encoder.blocks. Left out: decoder.blocks (not among parts=)"
    )
    with pytest.raises(LeadlineError, match=r"parts names 'text'.*decoder.blocks, encoder.blocks, unused.blocks"):
        ll.probe(model, ids(), parts=["encoder", "text"])


def test_the_worst_part_gives_the_verdict():
    model = Towers().eval()
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.mlp[-1].bias.fill_(30.0)  # the same large vector for every token
    report = ll.probe(model, ids(), trials=False)
    assert report.parts["decoder.blocks"].verdict.kind == "no collapse"
    assert report.verdict.kind == "collapse"
    assert report.measured.part == "encoder.blocks"
    assert "the worst is encoder.blocks." in report.verdict.text


class Class(nn.Module):
    """A block that gives the class token alone."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x, token):
        x = self.norm(torch.cat([token, x], 1))
        return token + self.attention(x[:, :1], x, x)[0]


def test_outputs_of_one_token_are_no_collapse():
    class Net(Stack):
        def __init__(self):
            super().__init__()
            self.class_blocks = nn.ModuleList(Class() for _ in range(5))

        def forward(self, ids):
            x = super().forward(ids)
            token = x[:, :1]
            for block in self.class_blocks:
                token = block(x, token)
            return token

    model = Net().eval()
    report = ll.probe(model, ids(), trials=False)
    assert report.measured.part == "blocks"
    assert "gives one token a sample" in report.measured.left_out["class_blocks"]
    with pytest.raises(LeadlineError, match="gives one token a sample"):
        ll.probe(model, ids(), parts="class_blocks")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x, y):
        return self.first(x), self.second(y)


class Streams(nn.Module):
    """Two streams through blocks that take both; the first may pass unchanged."""

    def __init__(self, both=True):
        super().__init__()
        self.embedding, self.both = nn.Embedding(40, WIDTH), both
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        y = x[:, ::2]
        for block in self.blocks:
            x, y = (block(x, y)) if self.both else (x, block(x, y)[1])
        return x, y


def test_parallel_streams_are_named_and_can_be_chosen():
    model = Streams().eval()
    outputs = []
    handles = [block.register_forward_hook(lambda m, a, out: outputs.append(out)) for block in model.blocks]
    with torch.no_grad():
        model(ids())
    for handle in handles:
        handle.remove()
    report = ll.probe(model, ids(), trials=False)
    assert report.measured.left_out == {"blocks (stream 1)": 'another stream; pass layout="1:bnd" for it'}
    second = ll.probe(model, ids(), layout="1:bnd", trials=False)
    for which, made in enumerate((report, second)):
        want = [token_similarity(out[which]).mean().item() for out in outputs]
        assert [x.similarity for x in made.layers[1:]] == pytest.approx(want, abs=1e-6)
    assert second.measured.layout == "1:bnd"


def test_attention_layers_are_no_blocks():
    class Lists(nn.Module):  # as XLM has them
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(40, WIDTH)
            self.attentions = nn.ModuleList(Attention() for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

        def forward(self, ids):
            x = self.embedding(ids)
            for attention, norm in zip(self.attentions, self.norms, strict=True):
                x = norm(x + attention(x))
            return x

    model = Lists().eval()
    with pytest.raises(LeadlineError, match=r"'attentions\.0' is attention and no block"):
        ll.probe(model, ids())
    assert len(ll.probe(model, ids(), blocks="norms.*", trials=False).layers) == 4


def test_streams_stacked_beside_the_tokens_are_refused():
    class Stacked(Stack):
        def forward(self, ids):
            x = self.embedding(ids)
            x = torch.cat([x, x + 1], 1)  # twice as many tokens as ids
            for block in self.blocks:
                x = block(x)
            return x

    model = Stacked().eval()
    with pytest.raises(LeadlineError, match=r"takes 24 tokens a sample.*the ids are 12.*several streams"):
        ll.probe(model, ids())
    assert ll.probe(model, ids(), layout="bnd", trials=False).settings["tokens"] == 24


def test_a_report_says_where_attention_is_within_windows():
    timm = pytest.importorskip("timm")
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=8, depths=(2, 2), num_heads=(2, 2))
    report = ll.probe(model.eval(), torch.randn(2, 3, 56, 56), trials=False)
    assert len(report.layers) == 5
    assert report.measured.layout == "bhwd"
    assert report.measured.attention_seen == 4
    assert report.measured.attention_unseen["layers.0.blocks.0"] == (
        "its attention is of 49 queries to 49 keys, and it has 196 tokens; only its entropy is measured"
    )
    assert report.layers[1].entropy is not None
    assert report.layers[1].delta is None


def test_stages_of_a_hierarchy_get_reports():
    timm = pytest.importorskip("timm")
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=8, depths=(2, 2), num_heads=(2, 2))
    entering = []
    model = model.eval()
    model.layers[1].blocks[0].register_forward_pre_hook(lambda m, args: entering.append(args[0].flatten(1, 2)))
    report = ll.probe(model, torch.randn(2, 3, 56, 56), trials=False)
    names = ["layers.0.blocks.0 to layers.0.blocks.1", "layers.1.blocks.0 to layers.1.blocks.1"]
    assert list(report.parts) == names
    second = report.parts[names[1]]
    assert second.layers[0].similarity == pytest.approx(token_similarity(entering[-1]).mean().item(), abs=1e-6)
    assert [x.similarity for x in second.layers[1:]] == [x.similarity for x in report.layers[3:]]
    assert [x.index for x in second.layers] == [0, 1, 2]


def test_a_decoder_does_not_wear_the_mask_of_the_encoder():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    model = transformers.T5Model(config).eval()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 3:] = 0
    batch = {"input_ids": ids(2, 6), "decoder_input_ids": ids(2, 6)}
    states = []
    model.decoder.block[1].register_forward_hook(lambda m, a, out: states.append(out[0]))
    report = ll.probe(model, {**batch, "attention_mask": mask}, trials=False)
    decoder, encoder = report.parts["decoder.block"], report.parts["encoder.block"]
    assert decoder.layers[-1].similarity == pytest.approx(token_similarity(states[-1]).mean().item(), abs=1e-6)
    assert (encoder.settings["padding"], decoder.settings["padding"]) == (True, False)
