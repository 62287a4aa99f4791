"""Hooks that record all metrics of a probe at every call of a block while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Block, Parts, find_parts
from leadline.anatomy.calling import full_precision
from leadline.anatomy.layouts import Layout, UsualLayout
from leadline.anatomy.streams import stream_in, stream_out
from leadline.anatomy.survey import BlockLayouts, Layouts, usual_layouts
from leadline.errors import LeadlineError
from leadline.metrics import token_diversity, token_similarity
from leadline.metrics._tokens import split
from leadline.probing.attention_capture import AttentionCapture, CapturedAttention
from leadline.probing.statistics import LayerStatistics

_NO_SKIP = 10.0  # gain above which the block is taken to have no skip connection


class Recorder:
    """Records all metrics of a model's blocks.

        with recorder.attached():
            recorder.start(mask)
            model(...)
        recorder.finish()

    A block that is called several times (shared layers) counts as that many layers, in the order of the calls. The
    attention matrices are measured with the input of the attention as X; in a pre-norm block that is normed.

    Args:
        blocks: The blocks to record.
        attention: Capture attention weights and measure them.
        prefix: How many class and register tokens come before the patches.
        heatmaps: Keep the attention of the first sample of the first batch.
        on_block: Called after every block.
        layouts: The layouts of the blocks, by name; the usual ones by default.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        attention: bool = True,
        prefix: int = 0,
        heatmaps: bool = False,
        on_block: Callable[[], None] = lambda: None,
        layouts: Layouts | None = None,
    ) -> None:
        self.blocks, self.prefix, self.with_attention, self.with_heatmaps = list(blocks), prefix, attention, heatmaps
        self.on_block = on_block
        self.heatmaps: dict[int, tuple[Tensor, int]] = {}  # by layer: weights (H, m, m), and the sample's tokens
        self.layers: list[LayerStatistics] = [LayerStatistics(0, "input")]
        self.modules: list[nn.Module] = []  # the block of each layer but the input
        self.stages: dict[int, LayerStatistics] = {}  # by the layer that begins a stage after the first: its input
        self.samples = self.tokens = self.batches = 0
        self.padded = False
        self._parts = {block.module: find_parts(block.module) for block in blocks}
        layouts = usual_layouts(blocks) if layouts is None else layouts
        self._layouts: dict[nn.Module, BlockLayouts] = {block.module: layouts[block.name] for block in blocks}
        self.unseen: dict[str, str] = {}  # layers without attention weights: why
        self._names = {block.module: block.name for block in blocks}
        self.start(None)

    def start(self, mask: Tensor | None, strict: bool = True) -> None:
        """Begin a new forward pass.

        Args:
            mask: The padding mask (B, n), True = a real token.
            strict: Refuse a mask of another shape than the tokens; otherwise it is that of another part.
        """
        self.mask, self.strict = mask, strict
        self.padded = self.padded or mask is not None
        self.calls = 0  # of blocks in this forward pass
        self.first: Tensor | None = None  # (B, n, d), the first stream that had the present tokens
        self.shape: torch.Size | None = None  # of the tokens that left the block before
        self.stack: list[BlockCall] = []  # the calls that have not ended, innermost last
        self.measuring = False

    def finish(self) -> None:
        """End the forward pass.

        Raises:
            LeadlineError: If no block ran, or not as many as on the batch before.
        """
        if self.calls == 0:
            raise LeadlineError(
                f"no block ran: the model never called {self.blocks[0].name!r}; name blocks it calls by blocks=[...]"
            )
        if self.calls != len(self.layers) - 1:
            raise LeadlineError(
                f"this batch went through {self.calls} blocks and the one before through {len(self.layers) - 1}; "
                "turn off layer dropping, or probe such batches apart"
            )
        self.batches += 1

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks, and remove them on exit."""
        with ExitStack() as stack:
            for block in self.blocks:
                parts = self._parts[block.module]
                stack.callback(block.module.register_forward_pre_hook(self._before_block, with_kwargs=True).remove)
                for norm in parts.norms:
                    stack.callback(norm.register_forward_hook(self._after_norm, with_kwargs=True).remove)
                for part, hook in ((parts.attention, self._before_attention), (parts.mlp, self._before_mlp)):
                    if part is not None:
                        stack.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(self._after_block).remove)
            if self.with_attention:
                stack.enter_context(AttentionCapture(self._expected_tokens, self._receive, self._miss))
            yield

    # hooks of blocks

    def _before_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        layout = self._layouts[module].entering
        source = stream_in(args, kwargs, layout.stream)
        if source is None:
            raise LeadlineError(f"block {self._names[module]!r} takes no tokens (batch, tokens, width); see blocks=")
        parts = self._parts[module]
        x = self._tokens(source, layout, f"what enters block {self._names[module]!r}")
        if self.calls == 0:
            if x.shape[1] < 2:
                raise LeadlineError("the inputs have one token a sample; similarity needs at least two")
            self.samples += x.shape[0]
            self.tokens = max(self.tokens, x.shape[1])
            with self._measure(x):
                self.layers[0].add_tokens(x, self._mask_for(x), self.prefix)
        if self.first is None or self.first.shape[:2] != x.shape[:2]:
            self.first = x
        self.calls += 1
        if self.calls == len(self.layers):
            number = self.modules.count(module) + 1
            name = self._names[module] + (f" (call {number})" if number > 1 else "")
            self.layers.append(LayerStatistics(self.calls, name))
            self.modules.append(module)
        self.stack.append(BlockCall(self.calls, parts, layout, x, source))

    def _after_block(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self.stack.pop()
        layout = self._layouts[module].leaving
        result = stream_out(output, layout.stream)
        if result is None:
            raise LeadlineError(f"block {self._names[module]!r} gives no tokens (batch, tokens, width); see blocks=")
        y = self._tokens(result, layout, f"what leaves block {self._names[module]!r}")
        statistics, mask = self.layers[call.layer], self._mask_for(y)
        with self._measure(y):
            same = self.first is not None and self.first.shape[:2] == y.shape[:2]
            statistics.add_tokens(y, mask, self.prefix, self.first if same else None)
            normed = call.normed_input()
            if normed is not None:
                self.layers[call.layer - 1].robust.normed.add(token_similarity(normed, self._mask_for(normed)))
            if call.layer > 1 and not self.shape == call.x.shape == y.shape:
                stage = self.stages.setdefault(call.layer, LayerStatistics(0, "input"))
                stage.add_tokens(call.x, self._mask_for(call.x), self.prefix)
            self.shape = y.shape
            if y.shape == call.x.shape:
                statistics.add_change(call.x, y, mask, call.rates(y, mask), call.gain(y, mask))
            if call.attention is not None:
                X = call.x if call.attention_input is None else call.attention_input
                if self.with_heatmaps and self.batches == 0:
                    self.heatmaps[call.layer] = call.attention.heatmap(), call.attention.tokens
                statistics.attention.add(call.attention, X, self._mask_for(X))
            elif self.with_attention:
                self.unseen[statistics.name] = call.missed or "no attention was recognised in it"
                if call.partial is not None:
                    self.unseen[statistics.name] = f"{call.missed}; only its entropy is measured"
                    statistics.attention.add_entropy(call.partial)
        self.on_block()

    # hooks of parts

    def _after_norm(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        source, result = stream_in(args, kwargs), stream_out(output)
        if self.stack and source is not None and result is not None:
            call = self.stack[-1]
            before, after = self._copy(source), self._copy(result)
            if before is not None and after is not None:
                call.norms.append(NormCall(call.attended, before, after, source, result))

    def _before_attention(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.stack and not self.stack[-1].attended:
            self.stack[-1].attended = True
            self.stack[-1].attention_input = self._copy(stream_in(args, kwargs))

    def _before_mlp(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.stack and self.stack[-1].mlp_input is None:
            source = stream_in(args, kwargs)
            copy = self._copy(source)
            if copy is not None:
                self.stack[-1].mlp_source, self.stack[-1].mlp_input = source, copy

    def _expected_tokens(self) -> int | None:
        """Return the number of tokens of the attention to capture; None if none is wanted now."""
        if self.measuring or not self.stack:
            return None
        call = self.stack[-1]
        if call.parts.channels:
            call.missed = f"its attention is between channels ({call.parts.channels}), not between tokens"
            return None
        # the first attention of a block counts; with an implicit scheme, which iterates, the last
        implicit = str(getattr(call.parts.attention, "scheme", "")).startswith("backward-")
        return None if call.attention is not None and not implicit else call.x.shape[1]

    def _receive(self, attention: CapturedAttention) -> None:
        call = self.stack[-1]
        attention = attention.split(call.x.shape[0])
        if attention.batch == call.x.shape[0]:
            call.attention = attention
        else:
            self._miss(f"its attention has {attention.batch} rows of tokens, and the batch {call.x.shape[0]} samples")

    def _miss(self, reason: str, attention: CapturedAttention | None = None) -> None:
        """Note the first attention of a block if it is not of all tokens to each other."""
        call = self.stack[-1]
        if call.missed is not None:
            return
        call.missed = reason
        if attention is None or self.mask is not None:
            return
        samples, tokens = call.x.shape[:2]
        flat = attention.batch == 1 and attention.heads > samples
        attention = attention.split(samples) if flat else attention
        windows = attention.tokens == attention.keys and attention.batch % samples == 0
        windows = windows and attention.batch * attention.tokens >= samples * tokens
        if windows or (attention.batch == samples and attention.tokens == tokens > attention.keys):
            call.partial = attention

    # tokens

    def _tokens(self, source: Tensor, layout: Layout | UsualLayout, what: str) -> Tensor:
        """Return a copy (B, n, d) of a block's input or output with padding set to 0; ``what`` names it in errors."""
        x = layout.tokens(source.detach())
        if self.mask is not None and self.strict and self.calls == 0 and self.mask.shape != x.shape[:2]:
            raise LeadlineError(
                f"the mask has shape {tuple(self.mask.shape)}; this batch has (samples, tokens) {tuple(x.shape[:2])}"
            )
        x = self._without_padding(x)
        if not torch.isfinite(x).all():
            raise LeadlineError(f"{what} has NaN or infinite entries; mend the model or the inputs first")
        return x

    def _copy(self, source: Tensor | None) -> Tensor | None:
        """Return such a copy of a tensor inside a block; None if it has other tokens than the block's input."""
        call = self.stack[-1]
        if source is None:
            return None
        if source.shape == call.source.shape:
            return self._without_padding(call.layout.tokens(source.detach()))
        return self._without_padding(source.detach()) if source.shape == call.x.shape else None

    def _without_padding(self, x: Tensor) -> Tensor:
        mask = self._mask_for(x)
        return x.clone() if mask is None else x.masked_fill(~mask[..., None], 0)

    def _mask_for(self, x: Tensor) -> Tensor | None:
        return self.mask if self.mask is not None and self.mask.shape == x.shape[:2] else None

    @contextmanager
    def _measure(self, x: Tensor) -> Iterator[None]:
        self.measuring = True
        try:
            with full_precision(x.device):
                yield
        finally:
            self.measuring = False


@dataclass
class NormCall:
    """One call of a norm inside a block."""

    late: bool  # whether attention had begun
    before: Tensor  # (B, n, d), a copy of the input
    after: Tensor  # a copy of the output
    source: Tensor  # the input itself, which later modules are compared with by address
    result: Tensor  # the output itself


@dataclass
class BlockCall:
    """One call of a block, filled in by hooks. Tensors are copied, because a model may add in place."""

    layer: int
    parts: Parts
    layout: Layout | UsualLayout  # of the input
    x: Tensor  # (B, n, d), a copy of the block's input
    source: Tensor  # the input itself
    attended: bool = False  # whether attention has begun
    attention_input: Tensor | None = None
    attention: CapturedAttention | None = None
    missed: str | None = None  # why the first attention that ran is not of all tokens to each other
    partial: CapturedAttention | None = None  # within windows, or to fewer keys than tokens
    norms: list[NormCall] = field(default_factory=list)
    mlp_input: Tensor | None = None  # a copy
    mlp_source: Tensor | None = None  # the input itself

    def normed_input(self) -> Tensor | None:
        """Return the block's input after its norm, (B, n, d); None if no norm reads that input."""
        readers = (norm.after for norm in self.norms if not norm.late and torch.equal(norm.before, self.x))
        return next(readers, None)

    def middle(self, y: Tensor) -> Tensor | None:
        """Return the stream between attention and MLP, (B, n, d).

        Args:
            y: (B, n, d), what leaves the block.

        Returns:
            The stream after the addition of attention; None if attention and MLP run side by side.
        """
        if not self.attended:
            return None
        if self.mlp_source is None:
            if self.parts.mlp is not None:
                return None
            return self.norms[0].before if self.post else y  # attention alone
        feeding = next((n for n in self.norms if n.result.data_ptr() == self.mlp_source.data_ptr()), None)
        if feeding is None:
            return None if self._is_input(self.mlp_source, self.mlp_input) else self.mlp_input
        return feeding.before if feeding.late and not self._is_input(feeding.source, feeding.before) else None

    def _is_input(self, source: Tensor, copy: Tensor | None) -> bool:
        """Return whether a tensor is the unchanged input of the block; a block working in place changes it."""
        return copy is not None and source.data_ptr() == self.source.data_ptr() and torch.equal(copy, self.x)

    @property
    def post(self) -> bool:
        """Return whether the block is post-norm: no norm before attention, and any MLP reads the output of a norm."""
        if not self.norms or not all(norm.late for norm in self.norms):
            return False
        pointers = [norm.result.data_ptr() for norm in self.norms]
        return self.mlp_source is None or self.mlp_source.data_ptr() in pointers

    def rates(self, y: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Return the rate of escalation r = t_div(before) / t_div(after), (B,), of each part of the block.

        - "attention": from the block's input to the stream after the addition of attention;
        - "mlp": from there (post-norm: after the norm) to the stream after the addition of the MLP;
        - "norm": the product over the norms.

        The block's rate is attention x norm x mlp in a post-norm block. In a pre-norm block, whose norms act on
        branches, it is attention x mlp.

        Args:
            y: (B, n, d), what leaves the block.
            mask: (B, n), True = a real token.
        """

        def rate(before: Tensor, after: Tensor) -> Tensor:
            return token_diversity(before, mask) / token_diversity(after, mask)

        rates = {}
        if self.norms:
            rates["norm"] = torch.stack([rate(norm.before, norm.after) for norm in self.norms]).prod(0)
        middle = self.middle(y)
        if middle is not None:
            rates["attention"] = rate(self.x, middle)
            if self.mlp_input is not None and self.post:
                rates["mlp"] = rate(self.mlp_input, self.norms[-1].before)
            elif self.mlp_input is not None:
                rates["mlp"] = rate(middle, y)
        return rates

    def gain(self, y: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the size (B,) of what attention adds, relative to what it is added to, in the token mean.

        Let z = s x + R be the stream after the addition of attention, with s by least squares. The gain is the root
        of ||Pi1 R||^2 / ||Pi1 s x||^2. That is gain^2 d sigma^2 in TSE (9) if attention keeps means (mu_1 = 1), which
        it nearly does. It depends neither on a norm before attention nor on the part alpha of x that it passes on.

        Args:
            y: (B, n, d), what leaves the block.
            mask: (B, n), True = a real token.

        Returns:
            The gain, NaN without a skip connection; None if attention and MLP run side by side.
        """
        middle = self.middle(y)
        if middle is None:
            return None
        x, z = self.x.double(), middle.double()
        s = (x * z).sum((-2, -1)) / x.square().sum((-2, -1))
        R = z - s[:, None, None] * x
        branch, skip = (split(part, mask)[0].square().sum((-2, -1)) for part in (R, x))
        gain = (branch / skip).sqrt() / s.abs()
        return torch.where(gain < _NO_SKIP, gain, torch.nan)
