"""The few figures that cost next to nothing, taken on a forward pass that runs anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Block, as_tokens, find_parts, stream_in, stream_out
from leadline.errors import LeadlineError
from leadline.metrics import attention_entropy
from leadline.metrics._tokens import power_of_two
from leadline.probing.attention import AttentionCatcher, Caught, measuring

NAMES = ("similarity", "diversity", "cosine", "norm")


def light_figures(X: Tensor, mask: Tensor | None) -> Tensor:
    """(4,): t_sim, t_div, t_cos and the mean length of a token, each sample alone, then the mean.

    X (B, n, d), mask (B, n). A few passes over X and no wait for the device; NaN in, NaN out. What the squares of
    tiny or huge tokens would lose is scaled by powers of two, which round nothing.
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
    rest = centred.sum(1) / count[:, None]  # the mean is right to rounding only: see metrics._tokens.split
    shared = count * (mean + rest).square().sum(-1)
    spread = centred.square().sum((1, 2)) - count * rest.square().sum(-1)
    total = shared + spread
    similarity = torch.where(total == 0, 1, shared / total)  # tokens of 0 are alike, as in metrics.token_similarity
    diversity = torch.where(total == 0, 0, spread.clamp(min=0) / total)
    return torch.stack((similarity, diversity, cosine, norm)).mean(-1)


class LightRecorder:
    """Figures of what enters the first block and leaves every block, in the order of the calls."""

    def __init__(
        self, blocks: Sequence[Block], entropy: bool = False, passed: Callable[[], None] = lambda: None
    ) -> None:
        self.blocks, self.entropy, self.passed = list(blocks), entropy, passed
        self._parts = {block.module: find_parts(block.module) for block in blocks}
        self.names = {block.module: block.name for block in blocks}
        self.start(None)

    def start(self, mask: Tensor | None) -> None:
        self.mask = mask
        self.rows: list[Tensor] = []  # (4,) each, still on the device
        self.layer_names = ["input"]
        self.entropies: list[Tensor | None] = []  # by layer, () each
        self.tokens: int | None = None  # of the block that runs

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(self._leave).remove)
            if self.entropy:
                stack.enter_context(AttentionCatcher(lambda: self.tokens, self._receive))
            yield

    def similarity(self) -> list[float]:
        return self.figures()["similarity"]

    def figures(self) -> dict[str, list[float]]:
        """By name and layer; waits for the device."""
        if not self.rows:
            raise LeadlineError("no block ran in the forward pass that was to be measured; see blocks=")
        table = torch.stack(self.rows).T.tolist()
        return dict(zip(NAMES, table, strict=True))

    def entropy_by_layer(self) -> list[float] | None:
        """Mean over samples, heads and queries, in nats; None when attention was not seen in every layer."""
        seen = [entropy.item() for entropy in self.entropies if entropy is not None]
        return seen if len(seen) == len(self.rows) - 1 else None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        source = stream_in(args, kwargs)
        if source is None:
            return
        if not self.rows:
            self._measure(source, module)
        self.tokens = as_tokens(source, self._parts[module].sequence_first).shape[1]
        self.entropies.append(None)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        result = stream_out(output)
        self.tokens = None
        if result is not None:
            self._measure(result, module)
            self.layer_names.append(self.names[module])
        self.passed()

    def _measure(self, source: Tensor, module: nn.Module) -> None:
        wanted, self.tokens = self.tokens, None
        with measuring(source.device):
            x = as_tokens(source.detach(), self._parts[module].sequence_first)
            mask = self.mask if self.mask is not None and self.mask.shape == x.shape[:2] else None
            self.rows.append(light_figures(x, mask))
        self.tokens = wanted

    def _receive(self, caught: Caught) -> None:
        self.tokens = None  # the first attention of a block is meant
        means = []
        with measuring(self.rows[0].device):
            for sample, _, P in caught.chunks(1):
                P = P.float() if P.dtype in (torch.float16, torch.bfloat16) else P
                mask = self.mask
                real = mask[sample] if mask is not None and mask.shape[1] == caught.tokens else None
                entropy = attention_entropy(P[0] if real is None else P[0, :, real])  # (h, n)
                means.append(entropy.mean(-1))
            self.entropies[-1] = torch.cat(means).mean()
