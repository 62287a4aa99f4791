"""Plain torch models: torch's own layers, and blocks of one's own in layouts that occur in the wild."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .case import SAMPLES, Case, enliven

WIDTH, HEADS, DEPTH, TOKENS, VOCAB = 32, 4, 3, 10, 50


class Attention(nn.Module):
    """Softmax attention over tokens (B, n, d)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.weights, self.fused = nn.Softmax(-1), True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, n, d/H)
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            y = self.weights(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block over (B, n, d)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ChannelFirstBlock(Block):
    """The same over maps (B, d, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


class ChannelLastBlock(Block):
    """The same over maps (B, height, width, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


class WidthFirstBlock(Block):
    """The same over sequences (B, d, n)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class SequenceFirstBlock(Block):
    """The same over sequences (n, B, d), with attention of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Text(nn.Module):
    """Ids (B, n) through a list of blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block, sequence_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)
        self.sequence_first = sequence_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.transpose(0, 1) if self.sequence_first else x
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0 if self.sequence_first else 1))


class WidthFirstText(Text):
    """The same with tokens behind channels."""

    def __init__(self) -> None:
        super().__init__(WidthFirstBlock)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1))


class Image(nn.Module):
    """Pixels (B, 3, h, w) through maps of the given kind of block."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(*(block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 5)
        self.last = block is ChannelLastBlock

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        x = self.blocks(x.permute(0, 2, 3, 1) if self.last else x)
        return self.head(x.mean((1, 2) if self.last else (2, 3)))


class Stages(nn.Module):
    """Channel-first stages of growing width, halved in size between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(*(ChannelFirstBlock(width) for _ in range(2))) for width in (16, WIDTH)
        )
        self.halve = nn.Conv2d(16, WIDTH, 2, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.stages[1](self.halve(self.stages[0](self.stem(pixels)))).mean((2, 3))


class TwoTowers(nn.Module):
    """An image tower and a text tower, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Image(ChannelFirstBlock), Text()

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        return self.image(pixels) @ self.text(ids).T


class ParallelStreams(nn.Module):
    """Two streams of different length that pass their own blocks side by side, and exchange their means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.fine = nn.ModuleList(Block() for _ in range(DEPTH))
        self.coarse = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = x.unflatten(1, (-1, 2)).mean(2)
        for fine, coarse in zip(self.fine, self.coarse, strict=True):
            x, y = fine(x), coarse(y)
            x, y = x + y.mean(1, keepdim=True), y + x.mean(1, keepdim=True)
        return x.mean(1) + y.mean(1)


class PairBlock(nn.Module):
    """A block that takes and returns two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_fine, self.attn_coarse = Block(), Block()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.attn_fine(x), self.attn_coarse(y)
        return x + y.mean(1, keepdim=True), y + x.mean(1, keepdim=True)


class PairedStreams(nn.Module):
    """The same with both streams in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(PairBlock() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = x.unflatten(1, (-1, 2)).mean(2)
        for block in self.blocks:
            x, y = block(x, y)
        return x.mean(1) + y.mean(1)


class ClassAttention(nn.Module):
    """A block whose output is the class token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        both = self.norm(torch.cat([token, x], 1))
        return token + self.attention(both[:, :1], both, both, need_weights=False)[0]


class OneToken(nn.Module):
    """Blocks over all tokens, then blocks that update one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.class_blocks = nn.ModuleList(ClassAttention() for _ in range(DEPTH + 1))
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        token = self.token.expand(len(x), -1, -1)
        for block in self.class_blocks:
            token = block(x, token)
        return token[:, 0]


class SharedBlock(nn.Module):
    """One block, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(DEPTH):
            x = self.layers[0](x)
        return x


class Encoder(nn.Module):
    """Ids (B, n) through the encoder of torch."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.encoder(x if self.batch_first else x.transpose(0, 1))


def _ids() -> Tensor:
    return torch.randint(0, VOCAB, (SAMPLES, TOKENS))


def _pixels() -> Tensor:
    return torch.randn(SAMPLES, 3, 16, 24)


def _sequence(batch_first: bool, tokens: int = TOKENS) -> Tensor:
    return torch.randn(SAMPLES, tokens, WIDTH) if batch_first else torch.randn(tokens, SAMPLES, WIDTH)


def _encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=batch_first)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def _transformer(batch_first: bool) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, 2 * WIDTH, batch_first=batch_first)


def _two(batch_first: bool) -> dict[str, Tensor]:
    return {"src": _sequence(batch_first), "tgt": _sequence(batch_first, 7)}


_STACKS = "encoder.layers.* | decoder.layers.*"
_MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = {
    "encoder, batch first": ("layers.*", lambda: _encoder(True), lambda: _sequence(True)),
    "encoder, sequence first": ("nbd:layers.*", lambda: _encoder(False), lambda: _sequence(False)),
    "encoder in a model, batch first": ("encoder.layers.*", lambda: Encoder(True), _ids),
    "encoder in a model, sequence first": ("nbd:encoder.layers.*", lambda: Encoder(False), _ids),
    "transformer, batch first": (_STACKS, lambda: _transformer(True), lambda: _two(True)),
    "transformer, sequence first": (
        "nbd:encoder.layers.* | nbd:decoder.layers.*",
        lambda: _transformer(False),
        lambda: _two(False),
    ),
    "own blocks": ("blocks.*", Text, _ids),
    "own blocks, sequence first": ("nbd:blocks.*", lambda: Text(SequenceFirstBlock, True), _ids),
    "own blocks, width first": ("bdn:blocks.*", WidthFirstText, _ids),
    "own blocks, channel first": ("bchw:blocks.*", lambda: Image(ChannelFirstBlock), _pixels),
    "own blocks, channel last": ("bhwc:blocks.*", lambda: Image(ChannelLastBlock), _pixels),
    "own stages, channel first": ("bchw:stages.#.*", Stages, _pixels),
    "two towers": (
        "bchw:image.blocks.* | text.blocks.*",
        TwoTowers,
        lambda: {"pixels": _pixels(), "ids": _ids()},
    ),
    "parallel lists": ("fine.* | coarse.*", ParallelStreams, _ids),
    "paired streams": ("bnd@0:blocks.* | bnd@1:blocks.*", PairedStreams, _ids),
    "one-token blocks": ("blocks.* | bnd:class_blocks.*?", OneToken, _ids),
    "one block, called three times": ("layers.*", SharedBlock, _ids),
}


def types() -> list[str]:
    """All models there are."""
    return sorted(_MODELS)


def case(name: str) -> Case:
    """The case of one model."""
    towers, make, inputs = _MODELS[name]

    def build() -> tuple[nn.Module, Any]:
        model = make()
        enliven(model)
        return model, inputs()

    return Case("torch", name, towers, build, _shown)


@contextmanager
def _shown(model: nn.Module) -> Iterator[nn.Module]:
    """The model with attention that shows its weights."""

    def ask(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    handles = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused = False
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_pre_hook(ask, with_kwargs=True))
    try:
        yield model
    finally:
        for module in model.modules():
            if isinstance(module, Attention):
                module.fused = True
        for handle in handles:
            handle.remove()
