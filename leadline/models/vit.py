"""Vision Transformer (Dosovitskiy et al., 2021).

DeiT (Touvron et al., 2021) is a variant of it, and so is a network of attention alone, without norms, MLPs and skips.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.models.base import Model
from leadline.models.configs import ModelConfig, ViTConfig
from leadline.models.init import init_weights
from leadline.nn import Positions, TransformerStack
from leadline.nn.layers import make_norm


class ViT(Model):
    """An image classifier: ``model(pixels (B, channels, size, size)) -> logits (B, num_classes)``."""

    Config: ClassVar[type[ModelConfig]] = ViTConfig
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
        # no final norm after post-norm blocks: each ends with a norm
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.final_norm else nn.Identity()
        self.head = nn.Linear(c.dim, c.num_classes) if c.num_classes else nn.Identity()
        with_head = c.distillation == "head" and c.num_classes
        self.distillation_head = nn.Linear(c.dim, c.num_classes) if with_head else None
        init_weights(self, c.init)
        for token in (self.class_token, self.distillation_token):
            if token is not None:
                nn.init.normal_(token, std=0.02)

    def embed(self, pixels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Compute what enters the first block from pixels (B, channels, size, size).

        Returns:
            Tokens (B, N, d) and the rotary angles, if any.
        """
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
        """Compute the hidden states (B, N, d) after the last block and, unless pooling comes first, the final norm."""
        x, rope = self.embed(pixels)
        x = self.blocks(x, rope=rope)
        return x if self.config.norm_after_pool else self.norm(x)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute the logits (B, num_classes) of images (B, channels, size, size)."""
        x = self.encode(pixels)
        if self.distillation_head is not None:
            return (self.head(x[:, 0]) + self.distillation_head(x[:, 1])) / 2
        if self.config.pool == "cls":
            x = x[:, 0]
        else:
            patches = x[:, self.config.prefix :]
            x = patches.mean(1) if self.config.pool == "mean" else patches.amax(1)
        return self.head(self.norm(x) if self.config.norm_after_pool else x)
