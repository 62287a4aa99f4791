"""Hooks that record four cheap metrics per block, and entropy if asked for, during one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Block
from leadline.anatomy.calling import full_precision
from leadline.anatomy.layouts import Layout, UsualLayout
from leadline.anatomy.streams import stream_in, stream_out
from leadline.anatomy.survey import BlockLayouts, Layouts, usual_layouts
from leadline.errors import LeadlineError
from leadline.metrics import attention_entropy, robust_similarity
from leadline.metrics._tokens import power_of_two
from leadline.probing.attention_capture import AttentionCapture, CapturedAttention

METRICS = ("similarity", "diversity", "cosine", "norm")


def basic_metrics(X: Tensor, mask: Tensor | None) -> Tensor:
    """Return t_sim, t_div, t_cos and the mean norm of a token, (4,), measured per sample, then averaged.

    It takes a few passes over X and does not wait for the device. NaN in X gives NaN. Tokens are scaled by powers of
    two, which round nothing, so that the squares of tiny or huge tokens are not lost.

    Args:
        X: (B, n, d).
        mask: (B, n), True = a real token.
    """
    X = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
    if mask is None:
        count = X.new_full((X.shape[0],), X.shape[1])
    else:
        X, count = X.masked_fill(~mask[..., None], 0), mask.sum(-1).to(X.dtype)
    largest = X.abs().amax(-1, keepdim=True)  # (B, n, 1)
    size = power_of_two(largest)
    rows = X / size
    lengths = torch.linalg.vector_norm(rows, dim=-1)  # (B, n)
    weights = torch.where(lengths > 0, 1 / lengths, 0)
    units = torch.einsum("bn,bnd->bd", weights, rows).square().sum(-1)
    pairs = (count * (count - 1)).clamp(min=1)
    cosine = torch.where(count > 1, (units - (lengths > 0).sum(-1)) / pairs, 1.0)
    norm = (lengths * size[..., 0] / count[:, None]).sum(-1)
    X = X / power_of_two(largest.amax(1, keepdim=True))
    mean = X.sum(1) / count[:, None]  # (B, d)
    centred = X - mean[:, None]
    centred = centred if mask is None else centred.masked_fill(~mask[..., None], 0)
    rest = centred.sum(1) / count[:, None]  # the rounding error of the mean; see metrics._tokens.split
    shared = count * (mean + rest).square().sum(-1)
    spread = centred.square().sum((1, 2)) - count * rest.square().sum(-1)
    total = shared + spread
    similarity = torch.where(total == 0, 1, shared / total)  # tokens of 0 are alike, as in metrics.token_similarity
    diversity = torch.where(total == 0, 0, spread.clamp(min=0) / total)
    return torch.stack((similarity, diversity, cosine, norm)).mean(-1)


class BasicRecorder:
    """Records the basic metrics of the first block's input and of every block's output, in the order of the calls.

    Args:
        blocks: The blocks to record.
        entropy: Record the attention entropy too.
        on_block: Called after every block.
        robust: Record the robust similarity too; this waits for the device.
        layouts: The layouts of the blocks, by name; the usual ones by default.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        entropy: bool = False,
        on_block: Callable[[], None] = lambda: None,
        robust: bool = False,
        layouts: Layouts | None = None,
    ) -> None:
        self.blocks, self.entropy, self.on_block, self.with_robust = list(blocks), entropy, on_block, robust
        layouts = usual_layouts(blocks) if layouts is None else layouts
        self._layouts: dict[nn.Module, BlockLayouts] = {block.module: layouts[block.name] for block in blocks}
        self.names = {block.module: block.name for block in blocks}
        self.start(None)

    def start(self, mask: Tensor | None) -> None:
        """Begin a new forward pass with the padding mask (B, n), True = a real token."""
        self.mask = mask
        self.rows: list[Tensor] = []  # (4,) each, still on the device
        self.robust: list[float] = []  # by layer
        self.layer_names = ["input"]
        self.entropies: list[Tensor | None] = []  # by layer, () each
        self.tokens: int | None = None  # of the block that is running and whose attention is still to come

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks, and remove them on exit."""
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.module.register_forward_pre_hook(self._before_block, with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(self._after_block).remove)
            if self.entropy:
                stack.enter_context(AttentionCapture(lambda: self.tokens, self._receive))
            yield

    def metrics(self) -> dict[str, list[float]]:
        """Return each basic metric by layer; waits for the device.

        Raises:
            LeadlineError: If no block ran.
        """
        if not self.rows:
            raise LeadlineError("no block ran in the forward pass that was to be measured; see blocks=")
        table = torch.stack(self.rows).T.tolist()
        return dict(zip(METRICS, table, strict=True))

    def entropy_by_layer(self) -> list[float] | None:
        """Return the entropy in nats, mean over samples, heads and queries; None if a layer's attention is missing."""
        values = [entropy.item() for entropy in self.entropies if entropy is not None]
        return values if len(values) == len(self.rows) - 1 else None

    def _before_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        layout = self._layouts[module].entering
        source = stream_in(args, kwargs, layout.stream)
        if source is None:
            return
        if not self.rows:
            self._measure(source, layout)
        self.tokens = layout.tokens(source).shape[1]
        self.entropies.append(None)

    def _after_block(self, module: nn.Module, args: Any, output: Any) -> None:
        layout = self._layouts[module].leaving
        result = stream_out(output, layout.stream)
        self.tokens = None
        if result is not None:
            self._measure(result, layout)
            self.layer_names.append(self.names[module])
        self.on_block()

    def _measure(self, source: Tensor, layout: Layout | UsualLayout) -> None:
        tokens, self.tokens = self.tokens, None  # products of the metrics are not attention
        with full_precision(source.device):
            x = layout.tokens(source.detach())
            mask = self.mask if self.mask is not None and self.mask.shape == x.shape[:2] else None
            self.rows.append(basic_metrics(x, mask))
            if self.with_robust:
                x = x if mask is None else x.masked_fill(~mask[..., None], 0)
                finite = bool(torch.isfinite(x).all())
                self.robust.append(robust_similarity(x, mask).mean().item() if finite else math.nan)
        self.tokens = tokens

    def _receive(self, attention: CapturedAttention) -> None:
        self.tokens = None  # only the first attention of a block counts
        means = []
        with full_precision(self.rows[0].device):
            for sample, _, P in attention.chunks(1):
                P = P.float() if P.dtype in (torch.float16, torch.bfloat16) else P
                mask = self.mask
                real = mask[sample] if mask is not None and mask.shape[1] == attention.tokens else None
                entropy = attention_entropy(P[0] if real is None else P[0, :, real])  # (h, n)
                means.append(entropy.mean(-1))
            self.entropies[-1] = torch.cat(means).mean()
