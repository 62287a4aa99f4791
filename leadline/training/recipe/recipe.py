"""``Recipe``, the schema of a whole recipe, and the schemas of its sections. Data sections have files of their own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from leadline.training.recipe.language import TextData
from leadline.training.recipe.section import Count, Place, Section, Share, Span, refuse_idle
from leadline.training.recipe.vision import Augment, VisionData

Positive = Annotated[float, Field(gt=0)]
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+|[+-]\.\d+")
_LONGEST = 10**9  # epochs or steps; at a millisecond per step that many steps take 12 days


class ModelSection(BaseModel):
    """The section ``model``: ``name`` and any option that ``leadline.create_model`` takes with it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        """Convert numbers such as 1e-6 and -.5, which YAML reads as text; the other sections convert by their types."""
        if not isinstance(given, dict):
            return given
        text = {key: value for key, value in given.items() if isinstance(value, str) and _NUMBER.fullmatch(value)}
        return {**given, **{key: float(value) for key, value in text.items()}}


class Optimizer(Section):
    """The section ``optimizer``: AdamW; or Adam, whose weight decay is an L2 penalty.

    Norms, biases, positions and strengths do not decay.
    """

    name: Literal["adamw", "adam"] = "adamw"
    lr: Annotated[float, Field(ge=1e-30, le=1e30)] = 1e-3  # float32 represents little more
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.05


class Schedule(Section):
    """The section ``schedule``: learning rate by step, as a factor of ``optimizer.lr``; see ``training.schedule``."""

    name: Literal["cosine", "multi_step", "constant"] = "cosine"
    warmup: Span = Span(0)  # linear from lr * start
    start: Annotated[float, Field(ge=0, le=1)] = 0.0
    cooldown: Span = Span(0)  # linear to lr * final, at the end of the run; after a cosine: constant
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    milestones: tuple[Span, ...] = ()  # multi_step: where the rate is multiplied by ``factor``
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    @model_validator(mode="after")
    def _fitting(self) -> Schedule:
        if self.name == "multi_step" and not self.milestones:
            raise ValueError("name is 'multi_step' and there are no milestones; give them, such as [60 %, 90 %]")
        if self.name != "multi_step" and self.milestones:
            given = [span.text for span in self.milestones]
            raise ValueError(f"name is {self.name!r} and milestones {given}; milestones belong to 'multi_step'")
        flat = self.name != "cosine" and not self.cooldown.number
        idle = {
            "start": None if self.warmup.number else "there is no warmup",
            "factor": None if self.name == "multi_step" else f"name is {self.name!r}",
            "final": f"name is {self.name!r} without a cooldown" if flat else None,
        }
        refuse_idle(self, idle)
        return self


class Batch(Section):
    """The section ``batch``. ``size`` is the number of samples of one optimizer step, of all processes and parts."""

    size: Count = 128
    accumulate: Count = 1

    @model_validator(mode="after")
    def _whole(self) -> Batch:
        if self.size % self.accumulate:
            raise ValueError(f"size is {self.size} and accumulate {self.accumulate}; accumulate must divide size")
        return self


class Regularise(Section):
    """The section ``regularise``."""

    drop_path: Share = 0.0  # of the last block, growing linearly from 0
    smoothing: Share = 0.0  # of labels
    clip: Positive | None = None  # largest gradient norm
    ema: Share | None = None  # decay of the averaged weights, which evaluations then use


class Checkpoint(Section):
    """The section ``checkpoint``."""

    every: Span = Span("10 %")
    keep: Count = 2  # number of newest checkpoints that stay; the best one stays too
    best: bool = True  # save also after an evaluation that is better than all before

    @field_validator("every")
    @classmethod
    def _some(cls, every: Span) -> Span:
        return _above_zero(every)


class Watch(Section):
    """The section ``watch``: the probe during training, figures of every layer on a small fixed batch in probe.csv."""

    every: Span = Span(0)  # 0: never
    entropy: bool = False

    @model_validator(mode="after")
    def _of_use(self) -> Watch:
        refuse_idle(self, {"entropy": None if self.every.number else "every is 0"})
        return self


class Log(Section):
    """The section ``log``."""

    every: Count = 20  # steps; only then the host waits for the device
    tensorboard: bool = False


class Recipe(Section):
    """A whole run: what is trained on what, and how.

    ``leadline train`` reads it from YAML. On its command line ``key=value`` changes one entry, such as ``out=DIR``.
    """

    model: ModelSection
    data: Annotated[VisionData | TextData, Field(discriminator="name")]
    length: Span
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    regularise: Regularise = Regularise()
    augment: Augment = Augment()
    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"  # bf16, fp16: autocast, weights in float32
    compile: Literal["none", "blocks", "model"] = "none"  # blocks: one compilation for all of them
    graph: bool = False  # the whole step as one CUDA graph, where one process has one GPU
    checkpointing: bool = False  # recomputes activations in the backward pass
    distributed: Literal["auto", "ddp", "fsdp"] = "auto"  # auto: the configuration of accelerate, else ddp
    evaluate: Span = Span(1)  # how often
    checkpoint: Checkpoint = Checkpoint()
    watch: Watch = Watch()
    log: Log = Log()
    norm_limit: Positive = 1e6  # a gradient norm above it counts as divergence
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | None = None  # CPU threads; None: torch's choice. Small models are faster with one
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0  # the range of torch.manual_seed
    out: Place | None = None  # folder of the run; ``load_recipe`` sets runs/NAME unless it is given

    @field_validator("length", "evaluate")
    @classmethod
    def _some(cls, span: Span) -> Span:
        return _above_zero(span)

    @field_validator("length")
    @classmethod
    def _absolute(cls, length: Span) -> Span:
        if length.unit == "%":
            raise ValueError(f"{length.text!r} is a share; give epochs or steps")
        if length.number > _LONGEST:
            raise ValueError(f"{length.text!r} is too long; give at most {_LONGEST:,} epochs or steps")
        return length

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        if self.graph and self.checkpointing:
            raise ValueError("graph and checkpointing are both true; a CUDA graph cannot recompute, choose one")
        if "drop_path" in (self.model.model_extra or {}):
            raise ValueError("model.drop_path is given; write regularise.drop_path instead")
        return self

    def model_options(self) -> dict[str, Any]:
        """Return the options for ``create_model``: those of ``model``, and the drop path of ``regularise``."""
        options = dict(self.model.model_extra or {})
        if self.regularise.drop_path:
            options["drop_path"] = self.regularise.drop_path
        return options


def _above_zero(span: Span) -> Span:
    if span.number <= 0:
        raise ValueError(f"{span.text!r} must be above 0")
    return span
