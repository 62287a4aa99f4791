"""Plain data of a report, which JSON can hold: metrics by layer, verdict, trials, heat maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Distribution:
    """A histogram with its mean, median and mode; its size does not depend on the number of values."""

    edges: list[float]  # one more than counts
    counts: list[int]
    mean: float
    median: float
    mode: float


@dataclass
class LayerData:
    """Metrics of the tokens that leave one block; index 0 is the input of the first block.

    Each sample is measured alone; the numbers are means over samples. None stands for what was not measured.
    """

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
    entropy_uniform: float | None = None  # entropy of uniform attention to all visible tokens


@dataclass
class Trial:
    """One candidate cure, tried on the same batch as the others."""

    name: str  # such as "alpha .5"
    cure: dict[str, float]  # arguments of leadline.cure
    similarity: list[float]  # by layer, as in the report
    helps: bool  # whether it improved the number that the verdict is about
    error: str | None = None  # why it could not be tried
    entropy: list[float] | None = None  # by layer, mean over heads, where the verdict is about entropy


@dataclass
class Verdict:
    """The conclusion drawn from the metrics, in words and as data, with the trials and the recommended cure."""

    kind: str  # "collapse", "no collapse" or "entropy collapse"
    text: str  # plain words, a few sentences
    passes: dict[str, int | None]  # level of similarity (".5", ".9", ".99") -> first layer above it
    rate: float | None  # fitted rate of escalation per layer
    expected_rate: float | None  # by theory: 1 + gain^2 at the measured gain
    collapse_depth: float | None  # layer at which similarity passes .99 if the trend continues
    redundant: list[int] = field(default_factory=list)  # layers that change (almost) nothing
    trials: list[Trial] = field(default_factory=list)
    recommendation: dict[str, float] | None = None  # arguments of leadline.cure; None: leave the model alone
    before: list[float] = field(default_factory=list)  # similarity by layer on the trials' batch, without a cure
    rank_collapse: bool = False  # the tokens end with hardly more than one direction
    entropy_collapse: list[int] = field(default_factory=list)  # layers whose queries attend to almost one token each

    def __str__(self) -> str:
        return self.text


@dataclass
class Heatmap:
    """Attention weights of one head on one sample."""

    layer: int
    head: int
    weights: list[list[float]]
    tokens: int | None = None  # of the sample; if weights has fewer rows and columns, neighbours are joined


@dataclass
class Measured:
    """What a report measured, and what it left out and why."""

    part: str  # name of the list of blocks
    blocks: int  # calls of blocks
    layout: str  # axes of the stream: b samples, n, h and w tokens, d channels
    attention_seen: int  # layers whose attention weights were measured
    attention_unseen: dict[str, str] = field(default_factory=dict)  # other layers, by name: why
    left_out: dict[str, str] = field(default_factory=dict)  # other lists of blocks, by name: why

    def __str__(self) -> str:
        words = f"{self.part}: {self.blocks} blocks, layout {self.layout}, attention seen in {self.attention_seen}"
        reasons = [f"{name}: {reason}" for name, reason in self.left_out.items()]
        return f"{words}; left out: {'; '.join(reasons)}" if reasons else words


@dataclass
class ReportData:
    """All data of a report, which the page and the figures draw."""

    model: str
    settings: dict[str, Any]  # samples, tokens, dtype, device, versions, ...
    layers: list[LayerData]
    verdict: Verdict
    heatmaps: list[Heatmap] = field(default_factory=list)
    measured: Measured | None = None
    parts: Mapping[str, ReportData] = field(default_factory=dict)  # by the name of the list of blocks
