"""GPT-2 (Radford et al., 2019): a pre-norm decoder with learned positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leadline.models.decoder import Decoder, DecoderConfig
from leadline.nn import BlockConfig


@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    mlp: str = "gelu_tanh"
    norm_eps: float = 1e-5


class GPT2(Decoder):
    family: ClassVar[str] = "gpt2"
    Config: ClassVar[type[BlockConfig]] = GPT2Config
