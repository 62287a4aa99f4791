"""``Recipe``: the schema of a recipe, and how it is read from YAML and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from leadline.errors import LeadlineError, excerpt, unknown_name
from leadline.files import read_text
from leadline.models.table import MODELS
from leadline.nn.config import check_options
from leadline.training.recipe.complaints import explain
from leadline.training.recipe.language import TextData
from leadline.training.recipe.plain_yaml import read_yaml
from leadline.training.recipe.section import Count, Place, Section, Share, Span, refuse_idle
from leadline.training.recipe.vision import Augment, VisionData

Positive = Annotated[float, Field(gt=0)]
Threads = Annotated[int, Field(ge=1, le=1024)]  # torch ends the process where it cannot start them
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+|[+-]\.\d+")


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
    eps: Annotated[float, Field(ge=1e-30, le=1e30)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1e30)] = 0.05


class Schedule(Section):
    """The section ``schedule``: learning rate by step, as a factor of ``optimizer.lr``; see ``training.optimizer``."""

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
    threads: Threads | None = None  # CPU threads; None: torch's choice. Small models are faster with one
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


_PLACES = ("out", "data.path", "data.cache")


def load_recipe(file: str | os.PathLike[str], settings: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        file: The file.
        settings: Changes of single entries, such as "schedule.warmup=5" or "out=runs/try".

    Returns:
        The recipe, its keys and values checked.

    Raises:
        LeadlineError: The file is missing or no recipe, or a key or value is wrong; the message is one line.
    """
    path = Path(file)
    if path.is_dir():
        raise LeadlineError(f"{path} is a folder; give a recipe, such as recipes/smoke_digits.yaml")
    if not path.is_file():
        near = [recipe.name for recipe in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        if near:
            raise unknown_name(f"recipe in {path.parent}", path.name, near)
        raise LeadlineError(f"{path} does not exist; give a recipe, such as recipes/smoke_digits.yaml")
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise LeadlineError(f"{path} is not YAML: {error}") from error
    except OSError as error:
        raise LeadlineError(f"{path} cannot be read ({error.strerror}); give a recipe that you may read") from error
    tree = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise LeadlineError(f"{path} holds no mapping; a recipe has the sections model, data, length and more")
    for setting in settings:
        _apply(tree, setting)
    tree.setdefault("out", str(Path("runs") / path.stem))
    return parse_recipe(tree)


def parse_recipe(tree: Mapping[str, Any]) -> Recipe:
    """Make a recipe from plain values, such as those that YAML or JSON hold.

    Args:
        tree: The sections and entries of the recipe.

    Returns:
        The recipe, its keys and values checked.

    Raises:
        LeadlineError: A key or value is wrong; the message is one line about the first of them.
    """
    try:
        recipe = Recipe.model_validate(dict(tree))
    except ValidationError as error:
        raise explain(error, Recipe) from None
    _check_model(recipe)
    return recipe


def of_earlier(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a recipe stored by an earlier version, where the drop path could be a key of ``model``."""
    model, regularise = tree.get("model"), tree.get("regularise")
    if not isinstance(model, dict) or not isinstance(regularise, dict) or "drop_path" not in model:
        return dict(tree)
    rest = {name: value for name, value in model.items() if name != "drop_path"}
    return {**tree, "model": rest, "regularise": {**regularise, "drop_path": model["drop_path"]}}


def differences(one: Recipe, other: Recipe, free: Iterable[str]) -> list[tuple[str, Any, Any]]:
    """List the differences of two recipes.

    Args:
        one: A recipe.
        other: Another one.
        free: Keys and sections that may differ, such as "length" or "data.path".

    Returns:
        (key, value in ``one``, value in ``other``) for every other key whose values differ.
    """
    first, second = (dict(_flat(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return [
        (key, first.get(key, "not set"), second.get(key, "not set"))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key) and not any(f"{key}.".startswith(f"{name}.") for name in free)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(tree: dict[str, Any], setting: str) -> None:
    """Put a setting "a.b=value" into the tree; the value is read as YAML."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise LeadlineError(f"{setting!r} is no setting; write key=value, such as schedule.warmup=5 or out=runs/try")
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            inner = tree[section] = {} if inner is None else {"name": inner} if section in ("model", "data") else {}
        tree = inner
    if key in _PLACES and text[:1] not in ("", "'", '"', "~") and text != "null":
        tree[last] = text  # a folder's name, even where YAML would see a number
        return
    tree[last] = read_yaml(text, f"the value {excerpt(text)} of {key}")


def _check_model(recipe: Recipe) -> None:
    """Check the model's name, and the names, types and ranges of its options.

    Whether the options fit each other and the data is checked when the model is built.
    """
    if recipe.model.name not in MODELS:
        raise unknown_name("model", recipe.model.name, MODELS)
    config = MODELS[recipe.model.name].config
    allowed = [field.name for field in fields(config) if field.name != "drop_path"]  # a key of regularise
    for option in recipe.model.model_extra or {}:
        if option not in allowed:
            raise unknown_name(f"key of model, for {recipe.model.name},", option, allowed)
    check_options(config, recipe.model_options(), "model.")
