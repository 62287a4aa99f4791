"""Finding the blocks of models of any make, and the parts of a block."""

import pytest
import torch
from torch import nn

from leadline.anatomy.blocks import find_blocks, find_parts, unwrap
from leadline.errors import LeadlineError

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def test_blocks_are_found_by_themselves():
    swin = pytest.importorskip("timm").create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4)
    assert len(find_blocks(swin)) == 12  # four stages, opened
    t5 = transformers.T5Model(
        transformers.T5Config(
            vocab_size=60, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_decoder_layers=3, num_heads=4
        )
    )
    assert [block.name for block in find_blocks(t5)] == ["decoder.block.0", "decoder.block.1", "decoder.block.2"]
    wrapped = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 3))
    assert [block.name for block in find_blocks(wrapped)] == ["0.layers.0", "0.layers.1", "0.layers.2"]
    albert = transformers.AlbertModel(transformers.AlbertConfig(num_hidden_groups=2, inner_group_num=2, **TEXT))
    assert len(find_blocks(albert)) == 4


def test_blocks_by_pattern():
    model = transformers.BertModel(transformers.BertConfig(**TEXT))
    blocks = find_blocks(model, "encoder.layer.*")
    assert [block.module for block in blocks] == list(model.encoder.layer)
    assert [block.name for block in find_blocks(model, ["encoder.layer.1", "pooler"])] == ["encoder.layer.1", "pooler"]
    with pytest.raises(LeadlineError, match="blocks is empty"):
        find_blocks(model, [])
    with pytest.raises(LeadlineError, match=r"names no module of BertModel; .* did you mean 'encoder\.layer"):
        find_blocks(model, "encoder.layers.1")


def test_compiled_blocks_are_unwrapped():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    plain = list(model.layers)
    model.layers[1] = torch.compile(model.layers[1])
    assert [block.module for block in find_blocks(model)] == plain
    assert unwrap(torch.compile(model)) is model


def test_names_of_parts():
    bert = transformers.BertModel(transformers.BertConfig(**TEXT)).encoder.layer[0]
    parts = find_parts(bert)
    assert parts.attention is bert.attention
    assert parts.mlp is bert.intermediate
    assert set(parts.norms) == {bert.attention.output.LayerNorm, bert.output.LayerNorm}
    qwen = transformers.Qwen3Model(transformers.Qwen3Config(head_dim=8, **TEXT)).layers[0]
    assert set(find_parts(qwen).norms) == {qwen.input_layernorm, qwen.post_attention_layernorm}


@pytest.mark.parametrize("batch_first", [False, True])
def test_layout_of_a_torch_block(batch_first):
    block = nn.TransformerEncoderLayer(16, 2, batch_first=batch_first)
    parts = find_parts(block)
    assert parts.sequence_first is not batch_first
    assert parts.attention is block.self_attn
    assert parts.mlp is block.linear1
    assert set(parts.norms) == {block.norm1, block.norm2}
