"""Which tensor holds the tokens that enter or leave a module, and in which layout."""

import pytest
import torch

import leadline as ll
from leadline.anatomy.streams import count_prefix_tokens, stream_in, stream_out


def test_the_stream_is_the_first_floating_tensor():
    ids, x, y = torch.arange(6).view(2, 3), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert stream_in((ids, x, y), {}) is x
    assert stream_in((), {"memory": y, "hidden_states": x}) is x
    assert stream_in((ids, torch.tensor(0.5)), {"attention_mask": ids}) is None
    assert stream_out(x) is x
    assert stream_out((None, ids, x, y)) is x
    assert stream_out({"ids": ids, "hidden": y}) is y
    assert stream_out(None) is None


def test_prefix_tokens_are_counted():
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    image = {"image_size": 32, "patch_size": 8}
    assert count_prefix_tokens(timm.create_model("deit_tiny_distilled_patch16_224", depth=1)) == 2
    assert count_prefix_tokens(transformers.ViTModel(transformers.ViTConfig(**size, **image))) == 1
    registers = transformers.Dinov2WithRegistersConfig(**size, **image, num_register_tokens=4)
    assert count_prefix_tokens(transformers.Dinov2WithRegistersModel(registers)) == 5
    assert count_prefix_tokens(transformers.BertModel(transformers.BertConfig(vocab_size=60, **size))) == 0
    assert count_prefix_tokens(ll.create_model("vit_tiny", depth=1, image_size=32, pool="cls")) == 1
    assert count_prefix_tokens(ll.create_model("vit_tiny", depth=1, image_size=32, pool="mean")) == 0
