"""Vision Transformer (Dosovitskiy et al., 2021).

DeiT (Touvron et al., 2021) is one of its forms, and so is a net of attention alone, without norm, MLP and skips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice
from leadline.models.base import Model
from leadline.models.init import init_weights
from leadline.nn import BlockConfig, Positions, TransformerStack
from leadline.nn.layers import make_norm


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
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
        """Tokens in front of the patches: the class token, if any, and the distillation token, if any."""
        has_class_token = self.pool == "cls" if self.class_token is None else self.class_token
        return int(has_class_token) + int(self.distillation != "none")

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + self.prefix


class ViT(Model):
    """``model(pixels (B, channels, size, size)) -> logits (B, num_classes)``."""

    family: ClassVar[str] = "vit"
    Config: ClassVar[type[BlockConfig]] = ViTConfig
    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c = config
        self.patch = nn.Conv2d(c.channels, c.dim, kernel_size=c.patch_size, stride=c.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.dim)) if c.prefix else None
        distilled = c.distillation != "none"
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, c.dim)) if distilled else None
        self.blocks = TransformerStack(c)
        self.positions = Positions(c.positions, c.tokens, c.dim, self.blocks.head_dim)
        self.dropout = nn.Dropout(c.embedding_dropout)
        # post-norm blocks end with a norm of their own
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.norm == "pre" else nn.Identity()
        self.head = nn.Linear(c.dim, c.num_classes) if c.num_classes else nn.Identity()
        with_head = c.distillation == "head" and c.num_classes
        self.distillation_head = nn.Linear(c.dim, c.num_classes) if with_head else None
        init_weights(self, c.init)
        for token in (self.class_token, self.distillation_token):
            if token is not None:
                nn.init.normal_(token, std=0.02)

    def embed(self, pixels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(B, channels, size, size) -> what enters the first block: tokens (B, N, d) and rotary angles."""
        c = self.config
        if pixels.shape[1:] != (c.channels, c.image_size, c.image_size) or not len(pixels):
            raise LeadlineError(
                f"pixels have shape {tuple(pixels.shape)}; "
                f"this model takes (batch, {c.channels}, {c.image_size}, {c.image_size})"
            )
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        prefix = [token for token in (self.class_token, self.distillation_token) if token is not None]
        x = torch.cat((*(token.expand(len(x), -1, -1) for token in prefix), x), dim=1)
        x, rope = self.positions(x, torch.arange(c.tokens, device=x.device))
        return self.dropout(x), rope

    def encode(self, pixels: Tensor) -> Tensor:
        """Hidden states (B, N, d) after the last block and, unless it comes after the pooling, the final norm."""
        x, rope = self.embed(pixels)
        x = self.blocks(x, rope=rope)
        return x if self.config.norm_after_pool else self.norm(x)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.encode(pixels)
        if self.distillation_head is not None:
            return (self.head(x[:, 0]) + self.distillation_head(x[:, 1])) / 2
        if self.config.pool == "cls":
            x = x[:, 0]
        else:
            patches = x[:, self.config.prefix :]
            x = patches.mean(1) if self.config.pool == "mean" else patches.amax(1)
        return self.head(self.norm(x) if self.config.norm_after_pool else x)
