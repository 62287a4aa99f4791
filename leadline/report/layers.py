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
class Massive:
    """A token or channel that dwarfs the others in one layer; the numbers are means over the samples that have it."""

    index: int  # of the channel, or of the token among the real tokens of its sample, from 0
    share: float  # of the energy of its sample
    ratio: float  # length over the median length of the tokens; of a channel, energy over the median energy
    samples: float  # share of the samples that have it


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
    tokens: float | None = None  # real tokens of a sample
    similarity_robust: float | None = None  # cosine without massive channels; the verdict rests on it
    robust_patches: float | None = None  # the same without class and other prefix tokens
    cosine_samples: float | None = None  # between tokens of different samples
    similarity_normed: float | None = None  # after the norm at the input of the next block
    massive_tokens: list[Massive] = field(default_factory=list)  # the largest share first
    massive_channels: list[Massive] = field(default_factory=list)
    massive_entries: float | None = None  # above 100 and 1000 times the median magnitude, a sample
    influence: float | None = None  # 1 - mean cosine of a token before and after the block
    angle: float | None = None  # mean angle between them, over pi
    sink_weight: list[float] | None = None  # per head: mean weight on the most attended key
    sink_share: float | None = None  # of the heads that have a sink
    largest_score: list[float] | None = None  # per head, before the softmax
    removal: float | None = None  # change of the output without the block, in the unit of the report's depth_use
    removal_error: float | None = None  # its standard error, paired over samples
    removal_attention: float | None = None  # the same without the block's attention alone
    removal_mlp: float | None = None
    lens: float | None = None  # KL of the output from what the end of the model makes of this layer, in nats
    lens_agrees: float | None = None  # share of predictions whose first choice is that of the output
    lens_first: float | None = None  # share of predictions whose final first choice leads here for the first time


@dataclass
class Trial:
    """One candidate cure, tried on the same batch as the others."""

    name: str  # such as "alpha .5"
    cure: dict[str, float]  # arguments of leadline.cure
    similarity: list[float]  # by layer, as in the report
    helps: bool  # whether it improved the number that the verdict is about
    error: str | None = None  # why it could not be tried
    entropy: list[float] | None = None  # by layer, mean over heads, where the verdict is about entropy
    robust: list[float] = field(default_factory=list)  # robust similarity by layer
    change: float | None = None  # of the output, in ``unit``
    change_error: float | None = None  # its standard error, paired over samples
    unit: str | None = None  # "loss", "kl" or "cosine"


@dataclass
class Removal:
    """Layers that were left out together, and the change of the output."""

    layers: list[int]  # from 1
    change: float
    error: float | None  # standard error, paired over samples; None with one sample


@dataclass
class DepthUse:
    """Depth that a model uses. The figures of single layers are in ``LayerData``."""

    unit: str  # of all changes: "loss" and "kl" in nats, "cosine" as 1 - cosine of the last hidden state
    threshold: float  # largest change at which layers count as unused
    in_use: int | None  # layers in use; None where only some were tried
    unused: list[int] | None  # the most layers that can be left out together within the threshold
    together: list[Removal] = field(default_factory=list)  # the sets that were tried
    tail: Removal | None = None  # all layers after the robust similarity first reaches .9
    loss: float | None = None  # of the whole model, where labels were given
    angles: list[list[float]] | None = None  # between the streams after all layers, input first, over pi
    rank_correlation: float | None = None  # Spearman's, of block influence with measured removal
    samples: int = 0
    forwards: float = 0.0  # passes that it took
    notes: list[str] = field(default_factory=list)  # what could not be measured, and why


@dataclass
class Verdict:
    """The conclusion drawn from the metrics, in words and as data, with the trials and the recommended cure."""

    kind: str  # "collapse", "common direction", "entropy collapse", "unused depth" or "no collapse"
    text: str  # plain words, a few sentences
    passes: dict[str, int | None]  # level of similarity (".5", ".9", ".99") -> first layer above it
    rate: float | None  # fitted rate of escalation per layer
    expected_rate: float | None  # by theory: 1 + gain^2 at the measured gain
    collapse_depth: float | None  # layer at which similarity passes .99 if the trend continues
    redundant: list[int] | None = None  # layers that can be left out together; None: not measured
    trials: list[Trial] = field(default_factory=list)
    recommendation: dict[str, float] | None = None  # arguments of leadline.cure; None: leave the model alone
    before: list[float] = field(default_factory=list)  # similarity by layer on the trials' batch, without a cure
    rank_collapse: bool = False  # the tokens end with hardly more than one direction
    entropy_collapse: list[int] = field(default_factory=list)  # layers whose queries attend to almost one token each
    notes: list[str] = field(default_factory=list)  # what is no illness, such as massive tokens and channels
    before_robust: list[float] = field(default_factory=list)  # as ``before``, the robust similarity
    initialised: bool = False  # the weights are as initialised, so that the output means nothing

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
    """The scope of a report: what it measured, what it left out, and why."""

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
    depth_use: DepthUse | None = None
    measured: Measured | None = None
    parts: Mapping[str, ReportData] = field(default_factory=dict)  # by the name of the list of blocks
