"""A small GPT-2, trained on the bytes of the Python manual.

    leadline probe docs/cases/language.py:make_model

The text comes with Python itself, so nothing is downloaded. Training takes about two minutes on one core.
"""

from __future__ import annotations

import math
import sys
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

WIDTH, HEADS, CONTEXT, BATCH, STEPS, RATE = 128, 4, 128, 8, 400, 2e-3


def text() -> Tensor:
    """Return the manual as bytes (n,)."""
    manual = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(manual.encode()), dtype=torch.uint8).long()


def pieces(source: Tensor, count: int) -> Tensor:
    """Return pieces (count, CONTEXT) from random places."""
    starts = torch.randint(len(source) - CONTEXT, (count,)).tolist()
    return torch.stack([source[start : start + CONTEXT] for start in starts])


def make_model(depth: int = 8) -> tuple[GPT2LMHeadModel, dict[str, Tensor]]:
    """Return the model after 400 steps, and 8 pieces of the tenth of the text that it is not trained on."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=depth,
        n_head=HEADS,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    everything = text()
    cut = len(everything) * 9 // 10
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 30)  # a short warm-up
        ids = pieces(everything[:cut], BATCH)
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: {loss.item() / math.log(2):.2f} bits per byte", file=sys.stderr)
    return model, {"input_ids": pieces(everything[cut:], 8)}
