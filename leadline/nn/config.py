"""Configuration of a stack of blocks. It loads without torch, so that recipes can be checked quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from leadline.errors import LeadlineError, check_choice
from leadline.nn.options import check_options

SITES = ("block-end", "ffn-input", "attention-input")  # of de-escalation
RULES = ("pre", "post", "none")  # names of the rules in leadline.nn.residual, which needs torch


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
    def strengths(self) -> tuple[float, float]:
        """The values of alpha and alpha' in force."""
        default = 0.5 if self.attention == "hopfield" else 0.0
        return (
            default if self.alpha is None else self.alpha,
            default if self.alpha_prime is None else self.alpha_prime,
        )

    @property
    def causal_mean(self) -> bool:
        """Whether de-escalation takes the mean over the tokens before each token instead of all tokens."""
        return self.causal

    @property
    def attention_options(self) -> dict[str, Any]:
        """The arguments that every kind of attention takes from this configuration."""
        alpha, alpha_prime = self.strengths
        same = ("dim", "heads", "start", "kv_heads", "head_dim", "learnable_alpha", "learnable_alpha_prime", "qkv_bias")
        options = {name: getattr(self, name) for name in same}
        return {**options, "alpha": alpha, "alpha_prime": alpha_prime, "dropout": self.attention_dropout}
