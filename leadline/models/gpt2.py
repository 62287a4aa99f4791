"""GPT-2 (Radford et al., 2019): a pre-norm decoder with learned positions."""

from __future__ import annotations

from typing import ClassVar

from leadline.models.configs import GPT2Config, ModelConfig
from leadline.models.decoder import Decoder


class GPT2(Decoder):
    """GPT-2, see ``Decoder``; the options are in ``GPT2Config``."""

    Config: ClassVar[type[ModelConfig]] = GPT2Config
