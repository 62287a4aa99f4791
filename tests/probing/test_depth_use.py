"""Depth in use against blocks that are deleted by hand, planted identities, and outputs compared by definition."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)

import leadline
from leadline.anatomy.blocks import find_blocks
from leadline.errors import LeadlineError
from leadline.probing.depth_use import THRESHOLDS, evenly, measure_depth_use
from leadline.probing.outputs import Yardstick
from leadline.probing.reruns import Reruns

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 97}
DEPTH = 5


@pytest.fixture
def ids() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(97, (3, 12))


def use_of(model: nn.Module, batch: dict[str, Tensor], labels: Tensor | None = None, **options):
    """Depth in use of a model, with the runs that measured it."""
    model.eval()
    reruns = Reruns([block.module for block in find_blocks(model)], lambda: model(**batch))
    return reruns, measure_depth_use(reruns, Yardstick(model, reruns.output, labels), **options)


def llama() -> LlamaForCausalLM:
    """A decoder whose weights are large enough that its blocks matter."""
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=DEPTH, num_key_value_heads=2))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.6)
    return model.eval()


def without_layers(model: nn.Module, path: str, dropped: set[int]) -> nn.Module:
    """A copy of the model in which some members of a module list are deleted."""
    smaller = copy.deepcopy(model)
    owner, _, name = path.rpartition(".")
    layers = smaller.get_submodule(path)
    setattr(smaller.get_submodule(owner), name, nn.ModuleList(m for i, m in enumerate(layers) if i not in dropped))
    return smaller


@torch.no_grad()
def test_removal_is_the_loss_of_the_model_whose_block_is_deleted(ids):
    model = llama()
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    reruns, use = use_of(model, batch, ids)
    assert reruns.partial
    assert use.unit == "loss"
    whole = model(**batch).loss.item()
    for i, change in enumerate(use.singles):
        loss = without_layers(model, "model.layers", {i})(**batch).loss.item()
        assert change.mean == pytest.approx(loss - whole, abs=1e-5)
    for removal in use.together:
        loss = without_layers(model, "model.layers", set(removal.calls))(**batch).loss.item()
        assert removal.change.mean == pytest.approx(loss - whole, abs=1e-5)


@torch.no_grad()
def test_removal_by_divergence_is_kl_by_definition(ids):
    torch.manual_seed(2)
    model = BertForMaskedLM(BertConfig(**SIZES, num_hidden_layers=3, initializer_range=0.3)).eval()
    _, use = use_of(model, {"input_ids": ids})
    p = model(ids).logits.double().softmax(-1)
    assert use.unit == "kl"
    for i, change in enumerate(use.singles):
        q = without_layers(model, "bert.encoder.layer", {i})(ids).logits.double().softmax(-1)
        divergence = (p * (p / q).log()).sum(-1).mean(-1)
        assert change.mean == pytest.approx(divergence.mean().item(), rel=1e-4)
        assert change.error == pytest.approx(divergence.std().item() / 3**0.5, rel=1e-3)


@torch.no_grad()
def test_removal_of_a_hidden_state_is_one_minus_its_cosine_over_real_tokens(ids):
    torch.manual_seed(2)
    model = BertModel(BertConfig(**SIZES, num_hidden_layers=3, initializer_range=0.3)).eval()
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    reruns = Reruns(list(model.encoder.layer), lambda: model(ids, attention_mask=mask))
    use = measure_depth_use(reruns, Yardstick(model, reruns.output, None, mask.bool()))
    h = model(ids, attention_mask=mask).last_hidden_state
    for i, change in enumerate(use.singles):
        other = without_layers(model, "encoder.layer", {i})(ids, attention_mask=mask).last_hidden_state
        cosines = F.cosine_similarity(h.double(), other.double(), dim=-1)
        samples = [1 - cosines[b][mask[b].bool()].mean().item() for b in range(3)]
        assert change.mean == pytest.approx(sum(samples) / 3, abs=1e-7)


def plant_identity(model: LlamaForCausalLM, layers: list[int]) -> None:
    """Zero the output weights of both branches."""
    for i in layers:
        nn.init.zeros_(model.model.layers[i].self_attn.o_proj.weight)
        nn.init.zeros_(model.model.layers[i].mlp.down_proj.weight)


def test_identity_blocks_cost_exactly_nothing_and_do_not_count(ids):
    model = llama()
    plant_identity(model, [1, 3])
    _, use = use_of(model, {"input_ids": ids, "labels": ids}, ids)
    assert use.singles[1].mean == use.singles[3].mean == 0.0
    assert min(use.singles[i].mean for i in (0, 2, 4)) > THRESHOLDS["loss"]
    assert use.unused == (1, 3)
    assert use.in_use == DEPTH - 2


def test_a_block_that_serves_as_several_layers_is_left_out_by_call(ids):
    torch.manual_seed(3)
    config = AlbertConfig(**SIZES, embedding_size=16, num_hidden_layers=4, initializer_range=0.3)
    model = AlbertModel(config)
    reruns, use = use_of(model, {"input_ids": ids})
    assert len(use.singles) == 4
    assert reruns.partial
    config.num_hidden_layers = 3  # the same block, one time less: whichever call is left out
    with torch.no_grad():
        one_less = model(ids).last_hidden_state
    config.num_hidden_layers = 4
    assert torch.allclose(reruns.without([3])[0], one_less, atol=1e-6)
    assert torch.allclose(reruns.without([0])[0], one_less, atol=1e-6)


def test_what_a_block_passes_on_is_computed_though_it_is_left_out(ids):
    """T5's first block makes the position bias of all."""
    torch.manual_seed(4)
    model = T5EncoderModel(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=97)).eval()
    reruns, _ = use_of(model, {"input_ids": ids})
    assert reruns.partial

    def skipped(block, args, output):
        return (args[0], *output[1:])

    handle = model.encoder.block[0].register_forward_hook(skipped)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    handle.remove()
    assert torch.equal(reruns.without([0]).last_hidden_state, expected)


def test_a_model_with_state_beside_its_stream_is_run_whole(ids):
    """Carried scores go from layer to layer beside the stream: nothing may be replayed."""
    model = llama()
    leadline.cure(model, alpha_prime=0.5)
    reruns, use = use_of(model, {"input_ids": ids, "labels": ids}, ids)
    assert not reruns.partial
    handle = model.model.layers[2].register_forward_hook(
        lambda block, args, kwargs, output: args[0] if args else kwargs["hidden_states"], with_kwargs=True
    )
    with torch.no_grad():
        rise = model(ids, labels=ids).loss - reruns.output.loss
    handle.remove()
    assert use.singles[2].mean == pytest.approx(rise.item(), abs=1e-5)


def test_partial_runs_equal_whole_ones_and_cost_half(ids):
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=8, vocab_size=97, initializer_range=0.2)).eval()
    batch = {"input_ids": ids, "labels": ids}
    partial, use = use_of(model, batch, ids)
    whole = Reruns(partial.blocks, partial.forward)
    whole.partial = False
    assert partial.partial
    for call in range(8):
        assert torch.equal(partial.without([call]).logits, whole.without([call]).logits)
    singles = use.forwards - sum(1 - removal.calls[0] / 8 for removal in use.together)
    assert singles <= 8 / 2 + 2


def test_streams_beyond_the_budget_are_kept_by_the_host_and_give_the_same(ids):
    model = llama()
    blocks = list(model.model.layers)
    small = Reruns(blocks, lambda: model(ids), budget=0)
    assert small.partial
    assert torch.equal(small.without([2]).logits, Reruns(blocks, lambda: model(ids)).without([2]).logits)


def test_the_model_is_left_as_it_was(ids):
    model = llama()
    before = {name: list(module.__dict__) for name, module in model.named_modules()}
    reruns, _ = use_of(model, {"input_ids": ids})
    with pytest.raises(RuntimeError):
        Reruns(reruns.blocks, lambda: model(ids[:, :, None]))
    assert before == {name: list(module.__dict__) for name, module in model.named_modules()}


def test_classes_of_timm_and_labels():
    torch.manual_seed(6)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=3, num_classes=7
    ).eval()
    pixels, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    reruns = Reruns(list(model.blocks), lambda: model(pixels))
    assert Yardstick(model, reruns.output).unit == "kl"
    use = measure_depth_use(reruns, Yardstick(model, reruns.output, labels))
    with torch.no_grad():
        whole = F.cross_entropy(model(pixels), labels)
        model.blocks[1] = nn.Identity()
        assert use.singles[1].mean == pytest.approx((F.cross_entropy(model(pixels), labels) - whole).item(), abs=1e-6)


def test_a_sample_of_blocks_claims_no_depth(ids):
    _, use = use_of(llama(), {"input_ids": ids}, sample=2)
    assert [change is None for change in use.singles] == [False, True, True, True, False]
    assert use.unused is None
    assert use.in_use is None
    assert not use.together


def test_even_choice():
    assert evenly(list(range(30)), 8) == [0, 4, 8, 12, 17, 21, 25, 29]
    assert evenly([3, 5], 4) == [3, 5]


def test_labels_that_do_not_fit_are_refused(ids):
    model = llama()
    output = model(ids, labels=ids)
    with pytest.raises(LeadlineError, match=r"labels are torch.int64 \(3, 4\) and the logits \(3, 12, 97\)"):
        Yardstick(model, output, ids[:, :4])
    output.loss = output.loss * 2  # a loss that is not the cross-entropy of these labels
    with pytest.raises(LeadlineError, match="own loss"):
        Yardstick(model, output, ids)
    with pytest.raises(LeadlineError, match="no logits"):
        Yardstick(model.model, model.model(ids), ids)
    with pytest.raises(LeadlineError, match="at least one block"):
        use_of(model, {"input_ids": ids}, sample=0)


def test_a_model_that_changes_its_calls_is_refused(ids):
    torch.manual_seed(7)
    config = AlbertConfig(**SIZES, embedding_size=16, num_hidden_layers=4)
    model = AlbertModel(config).eval()
    reruns = Reruns([block.module for block in find_blocks(model)], lambda: model(ids))
    config.num_hidden_layers = 3
    with pytest.raises(LeadlineError, match="another order or number"):
        reruns.without([1])
    with pytest.raises(LeadlineError, match="no block was called"):
        Reruns([nn.Linear(2, 2)], lambda: model(ids))
