"""What a probe hands back: plain data, layer by layer, that survives a round trip through JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Distribution:
    """A histogram, which needs the same memory for one batch and for a million."""

    edges: list[float]  # one more than counts
    counts: list[int]
    mean: float
    median: float
    mode: float


@dataclass
class LayerFigures:
    """What leaves a block; index 0 is what enters the first one. Means over samples, each sample measured alone."""

    index: int
    name: str  # of the module, "input" for index 0
    similarity: float
    diversity: float
    cosine: float
    norm: float  # mean length of a token
    effective_rank: float
    similarity_patches: float | None = None  # without class and other prefix tokens
    cosines: Distribution | None = None  # over all pairs of tokens
    rate: float | None = None  # r from the block's input to its output
    rates: dict[str, float] = field(default_factory=dict)  # the same for its parts: attention, norm, mlp
    entropy: list[float] | None = None  # per head, mean over queries, in nats
    entropies: list[Distribution] | None = None  # per head, over queries
    delta: list[float] | None = None  # per head, as are the next two
    omega: list[float] | None = None
    second_eigenvalue: list[float] | None = None
    gradient_norm: float | None = None  # of the loss with respect to the block's weights
    change: float | None = None  # ||Y - X|| / ||X|| of the block
    gain: float | None = None  # of the attention branch against the skip: TSE's alpha at d sigma^2 = 1
    entropy_uniform: float | None = None  # what attention to all visible tokens alike would have


@dataclass
class Trial:
    """One candidate cure, tried on the same batch."""

    name: str  # such as "alpha .5"
    cure: dict[str, float]  # arguments of leadline.cure
    similarity: list[float]  # by layer, as in the report
    helps: bool  # whether it moved the number that the verdict is about
    error: str | None = None  # why it could not be tried
    entropy: list[float] | None = None  # by layer, mean over heads, where the verdict is about entropy


@dataclass
class Verdict:
    kind: str  # "collapse", "no collapse" or "entropy collapse"
    text: str  # plain words, a few sentences
    passes: dict[str, int | None]  # level of similarity (".5", ".9", ".99") -> first layer above it
    rate: float | None  # fitted rate of escalation a layer
    expected_rate: float | None  # what the theory says, 1 + gain^2 at the gain measured
    collapse_depth: float | None  # layer at which similarity passes .99 if it goes on like this
    redundant: list[int] = field(default_factory=list)  # layers that change (almost) nothing
    trials: list[Trial] = field(default_factory=list)
    recommendation: dict[str, float] | None = None  # arguments of leadline.cure; None: leave it alone
    before: list[float] = field(default_factory=list)  # similarity by layer of the batch of the trials, as it is
    rank_collapse: bool = False  # the tokens use hardly more than one direction at the end
    entropy_collapse: list[int] = field(default_factory=list)  # layers whose attention looks at next to one token

    def __str__(self) -> str:
        return self.text


@dataclass
class Heatmap:
    """Attention of one head on one sample."""

    layer: int
    head: int
    weights: list[list[float]]
    tokens: int | None = None  # of the sample; with fewer rows and columns neighbours are joined


@dataclass
class Figures:
    """Everything measured, and what follows from it."""

    model: str
    settings: dict[str, Any]  # what was fed (samples, tokens), dtype, device, versions
    layers: list[LayerFigures]
    verdict: Verdict
    heatmaps: list[Heatmap] = field(default_factory=list)
