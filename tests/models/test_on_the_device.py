"""A forward and backward pass takes nothing from the CPU: what a GPU waits for, and a CUDA graph cannot hold."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import leadline as ll

SMALL = {"depth": 2, "dim": 16, "heads": 2}
TEXT = {**SMALL, "vocab_size": 29, "max_tokens": 16}
MODELS = {
    "vit_tiny": {**SMALL, "image_size": 16, "patch_size": 4, "num_classes": 3},
    "bert_base": TEXT,
    "gpt2_small": TEXT,
    "llama": {**TEXT, "ffn": 32, "kv_heads": 1},
    "transformer_xl_base": {**SMALL, "ffn": 32, "vocab_size": 29, "memory_length": 8},
}
CURES = [{}, {"norm": "post", "de_escalation": 1.0}, {"attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.5}]


class NothingFromTheCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs or {})):
            assert not isinstance(x, torch.Tensor) or x.is_meta or x.ndim == 0, f"{func} reads a tensor of the CPU"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cure", CURES, ids=["plain", "de-escalated", "hopfield"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_comes_from_the_cpu(name, cure):
    with torch.device("meta"):
        model = ll.create_model(name, **MODELS[name], **cure)
    if name == "vit_tiny":
        inputs = (torch.empty(2, 3, 16, 16, device="meta"),)
    else:
        ids = torch.empty(2, 16, dtype=torch.long, device="meta")
        inputs = (ids, None, ids) if name == "transformer_xl_base" else (ids,)
    with NothingFromTheCpu():
        out = model(*inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
