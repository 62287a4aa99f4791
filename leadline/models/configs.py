"""Configurations of the model families. They load without torch, since recipes are checked with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from leadline.errors import LeadlineError, check_choice
from leadline.nn.config import BlockConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig):
    """Base of the configurations: the options of the blocks, under the name of the family."""

    family: ClassVar[str]  # as saved models name it in config.json


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelConfig):
    """Options of a Vision Transformer; see ``leadline.models.vit``."""

    family: ClassVar[str] = "vit"

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    num_classes: int = 1000  # 0: no head, the model returns the pooled features
    pool: str = "cls"  # "cls", "mean" or "max"
    class_token: bool | None = None  # None: with pool "cls" only
    distillation: str = "none"  # DeiT's second token: "token", or "head" for a head of its own too
    norm_after_pool: bool = False  # the final norm on the pooled features, as timm does for mean pooling
    positions: str = "learned"  # "learned", "sinusoidal", "rotary" (along the sequence of patches) or "none"
    embedding_dropout: float = 0.0
    init: str = "trunc_normal"

    from_zero: ClassVar[tuple[str, ...]] = (*BlockConfig.from_zero, "num_classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pool", self.pool, ("cls", "mean", "max"))
        if self.causal:
            raise LeadlineError("causal is True; an image model looks at all of the image")
        if self.image_size % self.patch_size:
            raise LeadlineError(
                f"image_size is {self.image_size} and patch_size {self.patch_size}; patch_size must divide image_size"
            )
        check_choice("distillation", self.distillation, ("none", "token", "head"))
        if self.distillation != "none" and self.pool != "cls":
            raise LeadlineError(f"distillation is {self.distillation!r} and pool {self.pool!r}; it needs pool 'cls'")
        if self.pool == "cls" and self.class_token is False:
            raise LeadlineError("pool is 'cls' and class_token False; choose pool 'mean' or 'max'")
        if self.pool == "mean" and self.de_escalation == 1 and self.de_escalation_at == "block-end":
            raise LeadlineError(
                "pool is 'mean' and de_escalation 1: after a complete de-escalation the token mean is exactly 0 and "
                "the head sees nothing; choose pool 'cls' or 'max', or a de_escalation below 1"
            )

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: the class token and the distillation token, if any."""
        has_class_token = self.pool == "cls" if self.class_token is None else self.class_token
        return int(has_class_token) + int(self.distillation != "none")

    @property
    def tokens(self) -> int:
        """Number of tokens in total."""
        return (self.image_size // self.patch_size) ** 2 + self.prefix


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """Options of BERT and ALBERT; see ``leadline.models.bert``."""

    family: ClassVar[str] = "bert"

    vocab_size: int = 30522
    max_tokens: int = 512
    token_types: int = 2  # 0: no token types
    embedding_dim: int | None = None  # None: dim; else a linear map leads from it to dim (ALBERT)
    norm: str = "post"
    norm_eps: float = 1e-12
    positions: str = "learned"  # "learned", "sinusoidal", "rotary" or "none"
    embedding_dropout: float = 0.0
    init: str = "normal"

    from_zero: ClassVar[tuple[str, ...]] = (*BlockConfig.from_zero, "token_types")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal:
            raise LeadlineError("causal is True; an encoder looks at all of the text (for a decoder see gpt2_small)")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Options that the decoders share; see ``leadline.models.decoder``."""

    vocab_size: int = 50257
    max_tokens: int = 1024
    causal: bool = True
    positions: str = "learned"  # "learned", "sinusoidal", "rotary" or "none"
    rope: dict[str, Any] = field(default_factory=dict)  # rotary settings, see leadline.ops.rotary_frequencies
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0  # factor of the token embedding at the entry of the first block
    tied: bool = True  # the head is the token embedding
    init: str = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.embedding_scale < math.inf:
            raise LeadlineError(f"embedding_scale is {self.embedding_scale}; it must be a number above 0, such as 16")
        if not self.causal:
            raise LeadlineError("causal is False; a decoder must not see the future (for an encoder see bert_base)")


@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """Options of GPT-2; see ``leadline.models.gpt2``."""

    family: ClassVar[str] = "gpt2"

    mlp: str = "gelu_tanh"
    norm_eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Options of LLaMA; see ``leadline.models.llama``."""

    family: ClassVar[str] = "llama"

    vocab_size: int = 32000
    max_tokens: int = 4096
    mlp: str = "swiglu"
    norm_kind: str = "rms"
    positions: str = "rotary"
    qkv_bias: bool = False
    bias: bool = False
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(ModelConfig):
    """Options of Transformer-XL; see ``leadline.models.transformer_xl``."""

    family: ClassVar[str] = "transformer_xl"

    vocab_size: int = 267_735  # words in order of frequency
    max_tokens: int = 150  # of a segment in training and evaluation; the model itself takes any number
    memory_length: int = 150  # tokens of the past that a layer remembers
    cutoffs: tuple[int, ...] = (20_000, 40_000, 200_000)
    depth: int = 16
    dim: int = 410
    heads: int = 10
    ffn: int | None = 2100
    mlp: str = "relu"
    norm: str = "post"
    norm_eps: float = 1e-5
    causal: bool = True
    qkv_bias: bool = False
    de_escalation_at: str = "ffn-input"
    de_escalation_form: str = "causal"  # "leaky": the mean of the whole segment, future included, as TSE's Fig. 7
    embedding_dropout: float = 0.0
    init: str = "normal"

    from_zero: ClassVar[tuple[str, ...]] = (*BlockConfig.from_zero, "memory_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        check_choice("de_escalation_form", self.de_escalation_form, ("causal", "leaky"))
        if self.de_escalation_form == "leaky" and not self.de_escalation:
            raise LeadlineError("de_escalation_form is 'leaky' without de_escalation; give tau with it, such as 1.0")
        if not self.causal:
            raise LeadlineError("causal is False; a decoder must not see the future (for an encoder see bert_base)")
        if self.scheme != "forward-backward" or self.formula != "softmax":
            raise LeadlineError(
                f"scheme is {self.scheme!r} and formula {self.formula!r}; relative attention takes 'forward-backward' "
                "with 'softmax'"
            )

    @property
    def causal_mean(self) -> bool:
        """Return whether de-escalation takes the mean of the tokens before each one, and not of the whole segment."""
        return self.de_escalation_form == "causal"
