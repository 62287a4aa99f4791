"""LLaMA (Touvron et al., 2023): a pre-norm decoder with RMSNorm, SwiGLU, rotary positions."""

from __future__ import annotations

from typing import ClassVar

from leadline.models.configs import LlamaConfig, ModelConfig
from leadline.models.decoder import Decoder


class Llama(Decoder):
    """LLaMA, see ``Decoder``; the options are in ``LlamaConfig``."""

    Config: ClassVar[type[ModelConfig]] = LlamaConfig
