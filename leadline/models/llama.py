"""LLaMA (Touvron et al., 2023): a pre-norm decoder with RMSNorm, SwiGLU, rotary positions and grouped queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leadline.models.decoder import Decoder, DecoderConfig
from leadline.nn import BlockConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    vocab_size: int = 32000
    max_tokens: int = 4096
    mlp: str = "swiglu"
    norm_kind: str = "rms"
    positions: str = "rotary"
    qkv_bias: bool = False
    bias: bool = False
    tied: bool = False


class Llama(Decoder):
    family: ClassVar[str] = "llama"
    Config: ClassVar[type[BlockConfig]] = LlamaConfig
