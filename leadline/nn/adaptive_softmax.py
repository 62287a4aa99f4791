"""Adaptive softmax, tied to the token embedding (Grave et al., 2017; Dai et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.errors import LeadlineError


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of words that are numbered by falling frequency; rare words are grouped in clusters.

    The head is a softmax over the words below the first cutoff and one entry per cluster. Within a cluster there is a
    softmax over its words: log p(w) = log p(cluster) + log p(w | cluster). The weights of the words are the token
    embedding, an argument of every call, so they are tied; torch's own ``AdaptiveLogSoftmaxWithLoss`` cannot tie them.
    All words have the width of the model (div 1).

    Args:
        dim: Width of the model.
        vocab_size: Number of words.
        cutoffs: First word of each cluster, growing. Cutoffs at or above the vocabulary are ignored; without any it is
            a plain softmax.

    Raises:
        LeadlineError: The cutoffs are below 1 or do not grow.
    """

    def __init__(self, dim: int, vocab_size: int, cutoffs: Sequence[int]) -> None:
        super().__init__()
        if list(cutoffs) != sorted(set(cutoffs)) or any(cutoff < 1 for cutoff in cutoffs):
            raise LeadlineError(f"cutoffs are {list(cutoffs)}; they must be above 0 and grow")
        inside = [cutoff for cutoff in cutoffs if cutoff < vocab_size]
        self.ends = [*inside, vocab_size]  # of the head and of each cluster
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        clusters = len(inside)
        self.cluster_weight = nn.Parameter(torch.zeros(clusters, dim)) if clusters else None
        self.cluster_bias = nn.Parameter(torch.zeros(clusters)) if clusters else None

    def log_probs(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return all log-probabilities, as large as a plain softmax: x (..., d), weight (V, d) -> (..., V)."""
        head = self._head(x, weight)
        first = self.ends[0]
        parts = [head[..., :first]]
        for cluster in range(len(self.ends) - 1):
            parts.append(head[..., first + cluster, None] + self._tail(x, weight, cluster))
        return torch.cat(parts, -1)

    def nll(self, x: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Return -log p of the targets; each cluster is computed for its own words alone.

        Args:
            x: Hidden states (..., d).
            targets: Word numbers (...).
            weight: Token embedding (V, d).

        Returns:
            The losses (...), in nats.

        Raises:
            LeadlineError: The targets have another shape, are not integers, or lie outside the vocabulary.
        """
        if targets.shape != x.shape[:-1]:
            raise LeadlineError(f"targets have shape {tuple(targets.shape)}; they must be {tuple(x.shape[:-1])}")
        if targets.is_floating_point():
            raise LeadlineError(f"targets are {targets.dtype}; they must be integers")
        if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
            least, most = (int(end) for end in torch.aminmax(targets))  # on a GPU this would wait for the device
            if least < 0 or most >= self.ends[-1]:
                raise LeadlineError(
                    f"targets lie between {least} and {most}; they must be words, 0 to {self.ends[-1] - 1}"
                )
        if len(self.ends) == 1:
            logits = F.linear(x, weight, self.bias).flatten(0, -2)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)
        flat, words = x.flatten(0, -2), targets.flatten().contiguous()
        head, first = self._head(flat, weight), self.ends[0]
        cluster_of = torch.bucketize(words, torch.tensor(self.ends, device=words.device), right=True)  # 0: the head
        index = torch.where(cluster_of == 0, words, first + cluster_of - 1)
        log_probs = head.gather(-1, index[:, None]).squeeze(-1)
        for cluster in range(len(self.ends) - 1):
            rows = (cluster_of == cluster + 1).nonzero().squeeze(-1)
            inside = self._tail(flat[rows], weight, cluster)
            word = words[rows] - self.ends[cluster]
            inside = inside.gather(-1, word[:, None]).squeeze(-1)
            log_probs = log_probs.index_add(0, rows, inside.to(log_probs.dtype))
        return -log_probs.view(targets.shape)

    def _head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return log-probabilities of the head: x (..., d) -> (..., first cutoff + clusters), in float32 at least."""
        bias, rows = self.bias[: self.ends[0]], weight[: self.ends[0]]
        if self.cluster_weight is not None and self.cluster_bias is not None:
            rows, bias = torch.cat((rows, self.cluster_weight)), torch.cat((bias, self.cluster_bias))
        return _log_softmax(F.linear(x, rows, bias))

    def _tail(self, x: Tensor, weight: Tensor, cluster: int) -> Tensor:
        """Return log-probabilities within a cluster: x (..., d) -> (..., words of the cluster)."""
        words = slice(self.ends[cluster], self.ends[cluster + 1])
        return _log_softmax(F.linear(x, weight[words], self.bias[words]))

    def extra_repr(self) -> str:
        return f"ends={self.ends}"


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
