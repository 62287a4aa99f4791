"""Configuration of a stack of blocks, and the checks of its options. It loads without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from leadline.errors import LeadlineError, check_choice, excerpt

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a name",
    dict: "a mapping",
    tuple: "a list of whole numbers",
}
_CHOICES = dict.fromkeys(("learnable_alpha", "learnable_alpha_prime"), "'layer' or 'head'")
_SHARES = ("drop_path", "alpha", "alpha_prime")
_NOT_BELOW_ZERO = ("norm_eps", "solver_tolerance")
DEEPEST = 2_000  # blocks; each costs time and memory even without weights
_LARGEST = 2**31 - 1  # of other whole numbers
SITES = ("block-end", "ffn-input", "attention-input")  # of de-escalation
# Names of the rules in leadline.nn.residual, which needs torch, and whether a model norms the stream once at its end.
RULES = {"pre": True, "post": False, "none": False}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Options of a stack of blocks. ``create_model`` takes each of them as an override.

    Raises:
        LeadlineError: A value has the wrong type, lies outside its range, or does not fit another one.
    """

    depth: int = 12
    shared_layers: bool = False  # one block, applied depth times (ALBERT)
    dim: int = 192
    heads: int = 3
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: dim / heads
    ffn: int | None = None  # hidden width of the MLP; None: 4 dim; 0: no MLP
    mlp: str = "gelu"  # "relu", "gelu", "gelu_tanh", "swiglu"
    norm: str = "pre"  # "pre" (TSE 19), "post" (TSE algorithm 1) or "none"; see leadline.nn.residual
    norm_kind: str = "layer"  # "layer" or "rms"
    norm_eps: float = 1e-6
    skip: bool = True  # the outer skip connections
    gain: float = 1.0  # weight of the attention branch: TSE's alpha
    causal: bool = False
    qkv_bias: bool = True
    bias: bool = True  # of the other linear maps
    dropout: float = 0.0  # of what a branch adds
    hidden_dropout: float = 0.0  # of the hidden layer of the MLP
    attention_dropout: float = 0.0
    drop_path: float = 0.0  # at the last block, growing linearly from 0 at the first

    attention: str = "standard"  # or "hopfield"
    alpha: float | None = None  # None: 0.5 with Hopfield attention, 0 with standard attention
    alpha_prime: float | None = None  # likewise
    learnable_alpha: str | None = None  # None, "layer" or "head"
    learnable_alpha_prime: str | None = None
    start: str = "zero"
    scheme: str = "forward-backward"  # see leadline.nn.schemes
    formula: str = "softmax"  # see leadline.ops.attention_weights
    solver_tolerance: float | None = None  # of implicit schemes, relative; None: near rounding
    solver_steps: int = 200

    de_escalation: float = 0.0  # tau; 0: none
    de_escalation_at: str = "block-end"  # or "ffn-input", "attention-input"
    learnable_de_escalation: bool = False

    from_zero: ClassVar[tuple[str, ...]] = ("ffn",)

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        check_choice("attention", self.attention, ("standard", "hopfield"))
        check_choice("norm", self.norm, RULES)
        check_choice("de_escalation_at", self.de_escalation_at, SITES)
        if self.attention == "standard":
            for name in ("alpha", "alpha_prime", "learnable_alpha", "learnable_alpha_prime"):
                if getattr(self, name):
                    raise LeadlineError(f"{name} is {getattr(self, name)!r}; give attention='hopfield' with it")
            for name, plain in (("scheme", "forward-backward"), ("start", "zero")):
                if getattr(self, name) != plain:
                    raise LeadlineError(f"{name} is {getattr(self, name)!r}; give attention='hopfield' with it")
        if self.learnable_de_escalation and not self.de_escalation:
            raise LeadlineError("learnable_de_escalation is true and de_escalation 0; give a tau to begin with")
        if self.shared_layers and self.drop_path:
            raise LeadlineError(f"drop_path is {self.drop_path}; shared layers are one block, set it to 0")
        if self.drop_path and not self.skip:
            raise LeadlineError(f"drop_path is {self.drop_path} and skip false; without skips no path can be dropped")
        if self.ffn == 0 and self.de_escalation and self.de_escalation_at == "ffn-input":
            raise LeadlineError("de_escalation_at is 'ffn-input' and ffn 0; there is no MLP to put it before")

    @property
    def final_norm(self) -> bool:
        """Return whether a norm follows the last block."""
        return RULES[self.norm]

    @property
    def strengths(self) -> tuple[float, float]:
        """The values of alpha and alpha' in force."""
        default = 0.5 if self.attention == "hopfield" else 0.0
        return (
            default if self.alpha is None else self.alpha,
            default if self.alpha_prime is None else self.alpha_prime,
        )

    @property
    def causal_mean(self) -> bool:
        """Return whether de-escalation takes the mean over the tokens before each token instead of all tokens."""
        return self.causal

    @property
    def attention_options(self) -> dict[str, Any]:
        """The arguments that every kind of attention takes from this configuration."""
        alpha, alpha_prime = self.strengths
        same = ("dim", "heads", "start", "kv_heads", "head_dim", "learnable_alpha", "learnable_alpha_prime", "qkv_bias")
        options = {name: getattr(self, name) for name in same}
        return {**options, "alpha": alpha, "alpha_prime": alpha_prime, "dropout": self.attention_dropout}


class Config(Protocol):
    """A dataclass of options.

    Attributes:
        from_zero: Names of whole numbers that may be 0, which means "without it"; the others begin at 1.
    """

    from_zero: ClassVar[tuple[str, ...]]


def check_options(config: type[Config], given: Mapping[str, Any], prefix: str = "") -> None:
    """Check the types and ranges of options, each by itself.

    Args:
        config: Dataclass whose annotated fields are the options.
        given: Values by name.
        prefix: Text before the names in the error message.

    Raises:
        LeadlineError: A value has the wrong type or lies outside its range.
    """
    hints = _hints(config)
    for name, value in given.items():
        kinds = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else (hints[name],)
        if not any(_fits(value, kind) for kind in kinds):
            allowed = _CHOICES.get(name) or " or ".join(
                _NAMES[get_origin(kind) or kind] for kind in kinds if kind is not NoneType
            )
            raise LeadlineError(f"{prefix}{name} is {excerpt(value)}, which has the wrong type; it must be {allowed}")
        if value is None:
            continue
        if int in kinds and value < (low := 0 if name in config.from_zero else 1):
            raise LeadlineError(f"{prefix}{name} is {value}; it must be at least {low}")
        if int in kinds and value > (most := DEEPEST if name == "depth" else _LARGEST):
            raise LeadlineError(f"{prefix}{name} is {excerpt(value)}; it must be at most {most:,}")
        if name in _NOT_BELOW_ZERO and value < 0:
            raise LeadlineError(f"{prefix}{name} is {value}; it must be at least 0")
        if (name in _SHARES or name.endswith("dropout")) and not 0 <= value < 1:
            raise LeadlineError(f"{prefix}{name} is {value}; it must lie in [0, 1)")
        if name == "de_escalation" and not 0 <= value <= 1:
            raise LeadlineError(f"{prefix}{name} (tau) is {value}; it must lie in [0, 1]")


@cache
def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config)


def _fits(value: object, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_fits(part, get_args(kind)[0]) for part in value)
    return isinstance(value, get_origin(kind) or kind)
