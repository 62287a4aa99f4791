"""Hooks that measure every call of a block while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Block, Parts, as_tokens, find_parts, stream_in, stream_out
from leadline.errors import LeadlineError
from leadline.metrics import effective_rank, token_cosine, token_diversity, token_similarity
from leadline.probing.attention import AttentionCatcher, AttentionTally, Caught, heatmap, measuring
from leadline.probing.passage import Normed, Passage
from leadline.probing.tally import Cosines, Mean
from leadline.report.layers import LayerFigures


class LayerTally:
    """What is known of one layer so far."""

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.similarity, self.diversity, self.cosine, self.norm, self.rank = (Mean() for _ in range(5))
        self.patches, self.rate, self.change, self.gain, self.gradient = (Mean() for _ in range(5))
        self.rates: dict[str, Mean] = {}
        self.cosines = Cosines()
        self.attention = AttentionTally()

    def add_tokens(self, X: Tensor, mask: Tensor | None, prefix: int) -> None:
        """X (B, n, d), padding already 0; mask (B, n)."""
        self.similarity.add(token_similarity(X, mask))
        self.diversity.add(token_diversity(X, mask))
        self.cosine.add(token_cosine(X, mask))
        self.rank.add(effective_rank(X, mask))
        lengths = torch.linalg.vector_norm(X.double(), dim=-1)  # (B, n)
        real = torch.ones_like(lengths) if mask is None else mask.double()
        self.norm.add((lengths * real).sum(-1) / real.sum(-1))
        self.cosines.add(X, mask)
        if 0 < prefix < X.shape[1]:
            self.patches.add(token_similarity(X[:, prefix:], None if mask is None else mask[:, prefix:]))

    def add_passage(self, passage: Passage, y: Tensor, mask: Tensor | None) -> None:
        """What the block did to the tokens on their way to y (B, n, d)."""
        self.rate.add(token_diversity(passage.x, mask) / token_diversity(y, mask))
        self.change.add(_length(y - passage.x) / _length(passage.x))
        for part, rate in passage.rates(y, mask).items():
            self.rates.setdefault(part, Mean()).add(rate)
        gain = passage.gain(y, mask)
        if gain is not None:
            self.gain.add(gain)

    def figures(self) -> LayerFigures:
        def known(mean: Mean) -> float:
            value = mean.value()
            return float("nan") if value is None else value

        rates = {part: self.rates[part].value() for part in ("attention", "norm", "mlp") if part in self.rates}
        heads = self.attention
        return LayerFigures(
            index=self.index,
            name=self.name,
            similarity=known(self.similarity),
            diversity=known(self.diversity),
            cosine=known(self.cosine),
            norm=known(self.norm),
            effective_rank=known(self.rank),
            similarity_patches=self.patches.value(),
            cosines=self.cosines.distribution(),
            rate=self.rate.value(),
            rates={part: rate for part, rate in rates.items() if rate is not None},
            entropy=heads.entropy.values(),
            entropies=heads.distributions(),
            delta=heads.delta.values(),
            omega=heads.omega.values(),
            second_eigenvalue=heads.second.values(),
            gradient_norm=self.gradient.value(),
            change=self.change.value(),
            gain=self.gain.value(),
            entropy_uniform=heads.uniform.value(),
        )


class Recorder:
    """Measures the blocks of one model: ``with recorder.attached(): recorder.start(mask); model(...)``.

    A block that is called several times (shared layers) counts as that many layers, in the order of the calls.
    The attention matrices are measured with what enters the attention (behind the norm of a pre-norm block) as X.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        attention: bool = True,
        prefix: int = 0,
        maps: bool = False,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        self.blocks, self.prefix, self.with_attention, self.with_maps = list(blocks), prefix, attention, maps
        self.passed = passed  # called after every block
        self.maps: dict[int, tuple[Tensor, int]] = {}  # by layer: weights (H, m, m) of the first sample, and its tokens
        self.layers: list[LayerTally] = [LayerTally(0, "input")]
        self.modules: list[nn.Module] = []  # the block behind each layer but the input
        self.samples = self.tokens = self.batches = 0
        self._parts = {block.module: find_parts(block.module) for block in blocks}
        self._names = {block.module: block.name for block in blocks}
        self.start(None)

    def start(self, mask: Tensor | None) -> None:
        """A new forward pass begins; mask (B, n), True = a real token."""
        self.mask = mask
        self.at = 0  # calls of blocks so far
        self.stack: list[Passage] = []
        self.busy = False

    def finish(self) -> None:
        """The forward pass ended."""
        if self.at == 0:
            raise LeadlineError(
                f"no block ran: the model never called {self.blocks[0].name!r}; name blocks it calls by blocks=[...]"
            )
        if self.at != len(self.layers) - 1:
            raise LeadlineError(
                f"this batch went through {self.at} blocks and the one before through {len(self.layers) - 1}; "
                "turn off layer dropping, or probe such batches apart"
            )
        self.batches += 1

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are there inside, and gone after it whatever happens."""
        with ExitStack() as stack:
            for block in self.blocks:
                parts = self._parts[block.module]
                stack.callback(block.module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                for norm in parts.norms:
                    stack.callback(norm.register_forward_hook(self._normed, with_kwargs=True).remove)
                for part, hook in ((parts.attention, self._attending), (parts.mlp, self._fed)):
                    if part is not None:
                        stack.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(self._leave).remove)
            if self.with_attention:
                stack.enter_context(AttentionCatcher(self._wanted, self._receive))
            yield

    # hooks of blocks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        source = stream_in(args, kwargs)
        if source is None:
            raise LeadlineError(f"block {self._names[module]!r} takes no tokens (batch, tokens, width); see blocks=")
        parts = self._parts[module]
        x = self._tokens(source, parts, f"what enters block {self._names[module]!r}")
        if self.at == 0:
            if x.shape[1] < 2:
                raise LeadlineError("the inputs have one token a sample; similarity needs at least two")
            self.samples += x.shape[0]
            self.tokens = max(self.tokens, x.shape[1])
            with self._measuring(x):
                self.layers[0].add_tokens(x, self._mask_for(x), self.prefix)
        self.at += 1
        if self.at == len(self.layers):
            calls = self.modules.count(module) + 1
            name = self._names[module] + (f" (call {calls})" if calls > 1 else "")
            self.layers.append(LayerTally(self.at, name))
            self.modules.append(module)
        self.stack.append(Passage(self.at, parts, x, source))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        passage = self.stack.pop()
        result = stream_out(output)
        if result is None:
            raise LeadlineError(f"block {self._names[module]!r} gives no tokens (batch, tokens, width); see blocks=")
        y = self._tokens(result, passage.parts, f"what leaves block {self._names[module]!r}")
        tally, mask = self.layers[passage.layer], self._mask_for(y)
        with self._measuring(y):
            tally.add_tokens(y, mask, self.prefix)
            if y.shape == passage.x.shape:
                tally.add_passage(passage, y, mask)
            if passage.caught is not None:
                X = passage.x if passage.attention_input is None else passage.attention_input
                if self.with_maps and self.batches == 0:
                    self.maps[passage.layer] = heatmap(passage.caught), passage.caught.tokens
                tally.attention.add(passage.caught, X, self._mask_for(X))
        self.passed()

    # hooks of parts

    def _normed(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        source, result = stream_in(args, kwargs), stream_out(output)
        if self.stack and source is not None and result is not None:
            passage = self.stack[-1]
            before, after = self._copy(source), self._copy(result)
            if before is not None and after is not None:
                passage.norms.append(Normed(passage.attended, before, after, source, result))

    def _attending(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.stack and not self.stack[-1].attended:
            self.stack[-1].attended = True
            self.stack[-1].attention_input = self._copy(stream_in(args, kwargs))

    def _fed(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.stack and self.stack[-1].mlp_input is None:
            source = stream_in(args, kwargs)
            copy = self._copy(source)
            if copy is not None:
                self.stack[-1].mlp_source, self.stack[-1].mlp_input = source, copy

    def _wanted(self) -> int | None:
        """How many tokens the attention to catch has; None when there is none."""
        if self.busy or not self.stack:
            return None
        passage = self.stack[-1]
        # the first attention of a block is meant; of an implicit scheme, which iterates, the last
        implicit = str(getattr(passage.parts.attention, "scheme", "")).startswith("backward-")
        return None if passage.caught is not None and not implicit else passage.x.shape[1]

    def _receive(self, caught: Caught) -> None:
        if caught.batch == self.stack[-1].x.shape[0]:
            self.stack[-1].caught = caught

    # tokens

    def _tokens(self, source: Tensor, parts: Parts, what: str) -> Tensor:
        """A copy (B, n, d) of what runs through a block, padding set to 0."""
        x = as_tokens(source.detach(), parts.sequence_first)
        if self.mask is not None and self.at == 0 and self.mask.shape != x.shape[:2]:
            raise LeadlineError(
                f"the mask has shape {tuple(self.mask.shape)}; this batch has (samples, tokens) {tuple(x.shape[:2])}"
            )
        x = self._without_padding(x)
        if not torch.isfinite(x).all():
            raise LeadlineError(f"{what} has NaN or infinite entries; mend the model or the inputs first")
        return x

    def _copy(self, source: Tensor | None) -> Tensor | None:
        """The same for something inside a block; None if it is not shaped like the block's tokens."""
        passage = self.stack[-1]
        if source is None or source.shape != passage.source.shape:
            return None
        return self._without_padding(as_tokens(source.detach(), passage.parts.sequence_first))

    def _without_padding(self, x: Tensor) -> Tensor:
        mask = self._mask_for(x)
        return x.clone() if mask is None else x.masked_fill(~mask[..., None], 0)

    def _mask_for(self, x: Tensor) -> Tensor | None:
        return self.mask if self.mask is not None and self.mask.shape == x.shape[:2] else None

    @contextmanager
    def _measuring(self, x: Tensor) -> Iterator[None]:
        self.busy = True
        try:
            with measuring(x.device):
                yield
        finally:
            self.busy = False


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double(), dim=(-2, -1))
