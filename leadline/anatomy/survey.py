"""Surveys how a batch passes the blocks: the layout of every stream, from what the blocks' own weights act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Block, Parts, Tower, find_parts, is_attention
from leadline.anatomy.calling import Batch, call_model
from leadline.anatomy.layouts import Layout, LayoutError, UsualLayout, layout_of
from leadline.anatomy.streams import streams_in, streams_out
from leadline.errors import LeadlineError

_CHANNEL_SECOND = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_IDS = ("input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")


class BlockLayouts(NamedTuple):
    """The layouts of what enters and leaves a block."""

    entering: Layout | UsualLayout
    leaving: Layout | UsualLayout


_EXAMPLES = {2: '"nd"', 3: '"bnd" or "nbd"', 4: '"bhwd", "bdhw" or, with parallel streams, "bnsd"'}

Layouts = Mapping[str, BlockLayouts]  # by the name of the block


def usual_layouts(blocks: Sequence[Block]) -> dict[str, BlockLayouts]:
    """Return the usual layouts of blocks, by name, for where no batch can be surveyed."""
    layouts = {}
    for block in blocks:
        widths = frozenset(size for parameter in block.module.parameters() for size in parameter.shape)
        layout = UsualLayout(find_parts(block.module).sequence_first, widths)
        layouts[block.name] = BlockLayouts(layout, layout)
    return layouts


@dataclass
class Passage:
    """One call of a block."""

    block: Block
    parts: Parts
    entering: tuple[int, ...]  # shape
    given: bool  # whether the stream is an input of the model as it is
    chained: bool  # whether the stream is what the block before gave
    source: Tensor | None  # during the call only
    channel: int | None = None  # the axis of x on which the block's weights act
    certain: bool = False  # that axis holds by address, not by its size alone
    leaving: tuple[int, ...] = ()
    moved: list[int] = field(default_factory=list)  # streams of one shape that the block changes
    empty: bool = False  # whether a sample is zeros and another is not
    problem: str = ""


def survey(model: nn.Module, batch: Batch, towers: Sequence[Tower], layout: Layout | None = None) -> Survey:
    """Run a batch once and return what passes the blocks.

    Args:
        model: The model, in evaluation mode.
        batch: A batch.
        towers: The lists of blocks.
        layout: The layout of every stream, if the user names it.
    """
    return Survey(model, batch, towers, layout)


class Survey:
    """The tensors that pass the blocks of a model on one batch; see ``survey``."""

    def __init__(self, model: nn.Module, batch: Batch, towers: Sequence[Tower], layout: Layout | None) -> None:
        self.model, self.batch, self.towers, self.layout = model, batch, towers, layout
        self.samples = count_samples(batch)
        self.passages = _run(model, batch, towers, 0 if layout is None else layout.stream)
        for passage in (one for passages in self.passages.values() for one in passages):
            if passage.given and passage.parts.sequence_first and len(passage.entering) == 3:
                self.samples = passage.entering[1]  # what the model takes is (n, B, d)
        self._single: dict[str, list[Passage]] | None = None  # the same with one sample

    def layouts(self, tower: Tower) -> dict[str, BlockLayouts]:
        """Return the layouts of a tower's blocks.

        Raises:
            LayoutError: If they cannot be told for certain, or there is no one stream of several tokens.
        """
        passages = self.passages[tower.name]
        if not passages:
            raise LayoutError(
                f"no block ran: the model never called {tower.blocks[0].name!r}; name blocks it calls by blocks=[...]"
            )
        layouts: dict[str, BlockLayouts] = {}
        by_ndim: dict[int, int] = {}  # number of axes -> axis of the channels, of a block that shows it
        for passage in passages:
            if passage.channel is not None:
                by_ndim.setdefault(len(passage.entering), passage.channel)
        sizes: list[tuple[int, int]] = []
        for i, passage in enumerate(passages):
            self._check(tower.name, passage, last=i == len(passages) - 1, following=passages[i + 1 : i + 2])
            entering = self.layout or self._layout(tower.name, i, passage, by_ndim)
            leaving = entering
            if len(passage.leaving) != len(passage.entering):
                leaving = self._leaving(tower.name, i, passages, by_ndim)
            x, y = (_size(*pair) for pair in ((passage.entering, entering), (passage.leaving, leaving)))
            self._check_sizes(passage, x, y)
            sizes.append(x)
            if layouts.setdefault(passage.block.name, BlockLayouts(entering, leaving))[0] != entering:
                raise LayoutError(f"block {passage.block.name!r} takes its tokens in two layouts; see blocks=")
        changes = [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
        if len(set(changes)) < len(changes) and not any(p.entering != p.leaving for p in passages):
            raise LayoutError(
                f"{tower.name} holds several streams of different size that pass its blocks by turns; name the blocks "
                f"of one of them by blocks=, such as {passages[0].block.name!r}"
            )
        return layouts

    def other_streams(self, tower: Tower) -> dict[str, str]:
        """Return the streams of a tower beside the one whose layout is told, and how to measure them."""
        chosen = 0 if self.layout is None else self.layout.stream
        others = sorted({number for passage in self.passages[tower.name] for number in passage.moved} - {chosen})
        return {f"{tower.name} (stream {n})": f'another stream; pass layout="{n}:bnd" for it' for n in others}

    def _check(self, tower: str, passage: Passage, last: bool, following: list[Passage]) -> None:
        if passage.problem:
            raise LayoutError(passage.problem)
        name = passage.block.name
        if passage.moved and (self.layout or Layout()).stream not in passage.moved:
            streams = ", ".join(f"{tower} (stream {number})" for number in passage.moved)
            raise LayoutError(
                f"block {name!r} takes several streams and changes {streams}; choose one by layout=, such as "
                f'"{passage.moved[0]}:bnd"'
            )
        if passage.empty:
            raise LayoutError(f"block {name!r} takes a sample that is nothing but zeros; leave such samples out")
        if is_attention(passage.block.module) and not last and not all(x.chained for x in following):
            raise LayoutError(
                f"{name!r} is attention and no block: what it gives is not what the next one takes; name the modules "
                'that give the stream by blocks=, such as blocks="layer_norm2.*"'
            )

    def _check_sizes(self, passage: Passage, x: tuple[int, int], y: tuple[int, int]) -> None:
        name, ids = passage.block.name, _lengths_of_ids(self.batch)
        if x[0] < 2:
            raise LayoutError("the inputs have one token a sample; similarity needs at least two")
        if y[0] < 2:
            raise LayoutError(f"block {name!r} gives one token a sample; similarity needs two: see blocks=")
        if self.layout is None and ids and x[0] not in ids and any(x[0] % length == 0 for length in ids if length > 1):
            raise LayoutError(
                f"block {name!r} takes {x[0]} tokens a sample, in {passage.entering}, and the ids are {max(ids)}: it "
                f"seems to hold several streams; name the axes by layout=, s being that of streams, such as "
                f'"{"bnd" if len(passage.entering) == 3 else "bnsd"}"'
            )

    def _layout(self, tower: str, index: int, passage: Passage, by_ndim: dict[int, int]) -> Layout:
        shape, name = passage.entering, passage.block.name
        channel = passage.channel if passage.channel is not None else by_ndim.get(len(shape))
        if channel is None:
            sizes = {size for parameter in passage.block.module.parameters() for size in parameter.shape}
            fitting = [axis for axis, size in enumerate(shape) if size in sizes]
            if len(fitting) != 1:
                raise LayoutError(
                    f"block {name!r} takes {shape}, and its weights do not show which axis holds the channels; "
                    f"name the axes by layout=, such as {_EXAMPLES.get(len(shape), 'bnd')}"
                )
            channel = fitting[0]
        if len(shape) == 2 and (passage.given or self.samples is None):
            return layout_of(2, None, channel)
        return layout_of(len(shape), self._batch_axis(tower, index, passage, channel), channel)

    def _batch_axis(self, tower: str, index: int, passage: Passage, channel: int) -> int:
        shape, name = passage.entering, passage.block.name
        if passage.given and len(shape) == 3:
            return 1 if passage.parts.sequence_first else 0
        rest = [axis for axis in range(len(shape)) if axis != channel]
        axes = [axis for axis in rest if shape[axis] == self.samples]
        if len(axes) > 1 and self.samples is not None and self.samples > 1:
            axes = [axis for axis in axes if self._single_shape(tower, index, passage)[axis] == 1]
        if not axes or (len(axes) > 1 and self.samples != 1):
            given = "unknown" if self.samples is None else self.samples
            if others := [number for number in passage.moved if number != (self.layout or Layout()).stream]:
                raise LayoutError(
                    f"block {name!r} takes {shape}, which does not show the {given} samples, and other streams; choose "
                    f'one by layout=, such as "{others[0]}:bnd"'
                )
            raise LayoutError(
                f"block {name!r} takes {shape}, and which axis holds the {given} samples cannot be told; name the axes "
                f"by layout=, such as {_EXAMPLES.get(len(shape), 'bnd')}, or give another number of samples"
            )
        return axes[0]

    def _single_shape(self, tower: str, index: int, passage: Passage) -> tuple[int, ...]:
        """Return the shape of the same stream where the batch is its first sample."""
        if self._single is None:
            try:
                one = _first_sample(self.batch, self.samples)
                self._single = _run(self.model, one, self.towers, 0 if self.layout is None else self.layout.stream)
            except LeadlineError:
                self._single = {}
        passages = self._single.get(tower, [])
        if len(passages) != len(self.passages[tower]) or len(passages[index].entering) != len(passage.entering):
            return passage.entering
        return passages[index].entering

    def _leaving(self, tower: str, index: int, passages: list[Passage], by_ndim: dict[int, int]) -> Layout:
        """Return the layout of an output with another number of axes than the input: as the next block takes it."""
        passage, following = passages[index], passages[index + 1 : index + 2]
        if following and following[0].entering == passage.leaving:
            return self._layout(tower, index + 1, following[0], by_ndim)
        raise LayoutError(
            f"block {passage.block.name!r} takes {passage.entering} and gives {passage.leaving}; name blocks that keep "
            "the layout by blocks="
        )


def count_samples(batch: Batch) -> int | None:
    """Return how many samples a batch has, or None if its one tensor has no axis for them."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim > 1 else None
    tensors = [batch[name] for name in _IDS if name in batch] + list(batch.values())
    return next((len(x) for x in tensors if isinstance(x, Tensor) and x.ndim > 1), None)


def _lengths_of_ids(batch: Batch) -> set[int]:
    """Return the lengths of the texts of a batch that holds nothing but ids."""
    tensors = [batch] if isinstance(batch, Tensor) else [x for x in batch.values() if isinstance(x, Tensor)]
    if any(x.is_floating_point() and x.ndim > 1 for x in tensors):
        return set()
    return {x.shape[1] for x in tensors if x.ndim == 2 and x.dtype in (torch.int32, torch.int64)}


def _first_sample(batch: Batch, samples: int | None) -> Batch:
    if isinstance(batch, Tensor):
        return batch[:1]
    return {name: x[:1] if isinstance(x, Tensor) and x.ndim and len(x) == samples else x for name, x in batch.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _size(shape: tuple[int, ...], layout: Layout) -> tuple[int, int]:
    """Return the number of tokens and channels of a stream."""
    if len(shape) != len(layout.axes):
        raise LayoutError(f"a stream of shape {shape} does not fit layout {str(layout)!r}; pass another layout=")
    sizes = {"b": 1, "d": 1, "n": 1}
    for size, axis in zip(shape, layout.axes, strict=True):
        kind = "d" if axis in "sd" else axis if axis == "b" else "n"
        sizes[kind] *= size
    return sizes["n"], sizes["d"]


def _run(model: nn.Module, batch: Batch, towers: Sequence[Tower], stream: int) -> dict[str, list[Passage]]:
    """Return the calls of the blocks of every tower, by its name.

    The model gets a copy of the batch, because it may work on it in place.
    """
    batch = batch.clone() if isinstance(batch, Tensor) else {name: _copy(value) for name, value in batch.items()}
    watch = _Watch(batch, towers, stream)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), watch.attached(), torch.no_grad():
        call_model(model, batch)
    return watch.passages


class _Watch:
    """Hooks that note the calls of blocks."""

    def __init__(self, batch: Batch, towers: Sequence[Tower], stream: int) -> None:
        self.towers, self.stream = towers, stream
        self.passages: dict[str, list[Passage]] = {tower.name: [] for tower in towers}
        self.stack: list[Passage] = []
        self.last: dict[str, Tensor | None] = {}  # by tower: what its last block gave
        self.inputs = {
            x.data_ptr() for x in ([batch] if isinstance(batch, Tensor) else batch.values()) if isinstance(x, Tensor)
        }

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for tower in self.towers:
                for block in tower.blocks:
                    before, after = self._before(tower, block), self._after(tower)
                    stack.callback(block.module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(block.module.register_forward_hook(after, with_kwargs=True).remove)
                for module in {m for block in tower.blocks for m in block.module.modules()}:
                    if any(True for _ in module.parameters(recurse=False)):
                        stack.callback(module.register_forward_pre_hook(self._leaf, with_kwargs=True).remove)
            yield

    def _before(self, tower: Tower, block: Block) -> Any:
        parts = find_parts(block.module)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            streams = streams_in(args, kwargs)
            if len(streams) <= self.stream:
                problem = f"block {block.name!r} takes no tokens (batch, tokens, width); see blocks="
                passage = Passage(block, parts, (), False, False, None, problem=problem)
            else:
                x, last = streams[self.stream], self.last.get(tower.name)
                chained = last is not None and last.shape == x.shape and bool(torch.equal(last, x))
                passage = Passage(block, parts, tuple(x.shape), x.data_ptr() in self.inputs, chained, x.detach())
                zeros = x.flatten(1).eq(0).all(1)
                passage.empty = bool(zeros.any() and not zeros.all())
            self.passages[tower.name].append(passage)
            self.stack.append(passage)

        return hook

    def _after(self, tower: Tower) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            passage = self.stack.pop()
            before, after = streams_in(args, kwargs), streams_out(output)
            passage.source = None
            if len(after) <= self.stream:
                name = passage.block.name
                passage.problem = passage.problem or (
                    f"block {name!r} gives no tokens (batch, tokens, width); see blocks="
                )
                return
            passage.leaving = tuple(after[self.stream].shape)
            passage.moved = [
                i
                for i, (x, y) in enumerate(zip(before, after, strict=False))
                if x.shape == y.shape and x.ndim >= 3 and _moves(x, y)
            ]
            self.last[tower.name] = after[self.stream].detach()

        return hook

    def _leaf(self, leaf: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the axis of the block's input on which the weights of a module inside act."""
        streams = streams_in(args, kwargs)
        if not self.stack or self.stack[-1].certain or not streams:
            return
        passage, z = self.stack[-1], streams[0]
        axis = channel_axis(leaf, z)
        if passage.source is None or axis is None:
            return
        channel, certain = _same_axis(passage.source, z, axis)
        if channel is not None and (certain or passage.channel is None):
            passage.channel, passage.certain = channel, certain


def _moves(x: Tensor, y: Tensor) -> bool:
    """Return whether a tensor is a stream that blocks change, not a mask or bias of attention (..., n, n)."""
    return x.shape[-1] != x.shape[-2] and not torch.equal(x, y)


def channel_axis(leaf: nn.Module, z: Tensor) -> int | None:
    """Return the axis of its input on which the weights of a linear map, a convolution or a norm act.

    Args:
        leaf: A module with weights of its own.
        z: What enters it.
    """
    weights = list(leaf.parameters(recurse=False))
    if isinstance(leaf, _CHANNEL_SECOND) and z.ndim > 2:
        return 1
    if isinstance(leaf, nn.Linear) or all(weight.ndim == 2 for weight in weights):
        sizes = {size for weight in weights if weight.ndim == 2 for size in weight.shape}
        return z.ndim - 1 if z.shape[-1] in sizes else None
    if "norm" in type(leaf).__name__.lower():
        widths = {weight.numel() for weight in weights}
        fitting = [axis for axis, size in enumerate(z.shape) if size in widths]
        second = type(leaf).__name__.lower().endswith(("2d", "3d"))
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        return 1 if second and 1 in fitting else z.ndim - 1 if z.ndim - 1 in fitting else None
    return None


def _same_axis(x: Tensor, z: Tensor, axis: int) -> tuple[int | None, bool]:
    """Return the axis of ``x`` that is axis ``axis`` of ``z``, and whether that is certain.

    It is certain where z is a view of x, by its stride, or has its numbers in the same order.
    """
    size = z.shape[axis]
    fitting = [i for i in range(x.ndim) if x.shape[i] == size]
    if z.numel() == x.numel() and z.data_ptr() == x.data_ptr():
        strided = [i for i in fitting if x.stride(i) == z.stride(axis)]
        if len(strided) == 1:
            return strided[0], True
    if z.numel() == x.numel():
        rows = z.movedim(axis, -1).reshape(-1, size)
        equal = [i for i in fitting if torch.equal(x.movedim(i, -1).reshape(-1, size), rows)]
        if len(equal) == 1:
            return equal[0], True
        if len(fitting) == 1 and size > 1:
            return fitting[0], False
    return None, False
