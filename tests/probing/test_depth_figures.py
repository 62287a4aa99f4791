"""Depth in use in a report: removal, logit lens and angles against loops by hand; labels in any form."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import leadline as ll
from leadline.errors import LeadlineError
from leadline.probing import probe
from leadline.probing.outputs import as_initialised
from leadline.report import DepthReport

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
DEPTH = 5
ids = torch.randint(3, 97, (3, 16), generator=torch.Generator().manual_seed(1))


def llama(**options) -> nn.Module:
    """A decoder that counts as trained, with weights so large that its blocks matter."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=DEPTH, num_key_value_heads=2, **options)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else 0.6)
    return model.eval()


def streams(model):
    seen, blocks = [], model.model.layers
    hooks = [blocks[0].register_forward_pre_hook(lambda m, a: seen.append(a[0]))]
    hooks += [block.register_forward_hook(lambda m, a, o: seen.append(o)) for block in blocks]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return seen, logits


def plant_identity(model, layers) -> None:
    for i in layers:
        nn.init.zeros_(model.model.layers[i].self_attn.o_proj.weight)
        nn.init.zeros_(model.model.layers[i].mlp.down_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_the_lens_is_the_final_norm_and_head_on_each_stream(tied):
    model = llama(tie_word_embeddings=tied)
    hidden, logits = streams(model)
    report = probe(model, ids, depth_use=True)
    final = logits.double().log_softmax(-1)
    leading = torch.zeros(ids.shape, dtype=torch.bool)
    for layer, X in zip(report.layers, hidden, strict=True):
        lens = model.lm_head(model.model.norm(X)).double().log_softmax(-1)
        divergence = (final.exp() * (final - lens)).sum(-1).mean().item()
        assert layer.lens == pytest.approx(divergence, rel=1e-4, abs=1e-6)
        agrees = lens.argmax(-1) == logits.argmax(-1)
        assert layer.lens_agrees == pytest.approx(agrees.double().mean().item())
        assert layer.lens_first == pytest.approx((agrees & ~leading).double().mean().item())
        leading |= agrees
    assert report.layers[-1].lens == 0
    assert sum(layer.lens_first for layer in report.layers) == pytest.approx(1)


@torch.no_grad()
def test_angles_are_those_of_any_two_streams():
    model = llama()
    hidden, _ = streams(model)
    report = probe(model, ids, depth_use=True)
    for i, X in enumerate(hidden):
        for j, Y in enumerate(hidden):
            cosines = F.cosine_similarity(X.double(), Y.double(), dim=-1).clamp(-1, 1)
            angle = (cosines.arccos() / math.pi).mean().item()
            assert report.depth_use.angles[i][j] == pytest.approx(angle, abs=1e-4)
        assert report.depth_use.angles[i][i] == 0


def test_useful_blocks_count_and_identities_do_not():
    model = llama()
    plant_identity(model, [1, 3])
    labels = ids.clone()
    labels[:, 1:] = model(ids).logits.argmax(-1)[:, :-1]  # the model is right, so that its blocks are of use
    report = probe(model, {"input_ids": ids, "labels": labels}, depth_use=True)
    assert report.depth_use.unit == "loss"
    assert report.depth_use.in_use == DEPTH - 2
    assert report.layers[2].removal == report.layers[4].removal == 0.0
    assert report.verdict.kind == "unused depth"
    assert report.verdict.redundant == [2, 4]
    assert "Depth in use: 3 of 5 layers: leaving out layers 2, 4 together" in report.verdict.text
    assert report.verdict.trials == []
    again = DepthReport.from_json(report.to_json())
    assert again.depth_use == report.depth_use
    assert again.layers[2] == report.layers[2]


def test_a_sample_of_blocks_claims_nothing():
    report = probe(llama(), ids, depth_use=2)
    assert [layer.removal is not None for layer in report.layers] == [False, True, False, False, False, True]
    assert report.verdict.redundant is None
    assert "Depth in use is not known: 2 of 5 layers were left out" in report.verdict.text


def test_nothing_is_redundant_where_nothing_was_left_out():
    model = llama()
    plant_identity(model, [1])
    verdict = probe(model, ids).verdict
    assert verdict.redundant is None
    assert "redundant" not in verdict.text


def plant_direction(model, layer: int) -> torch.Tensor:
    """Make block ``layer`` (from 1) add one long vector to all tokens, and return it."""
    vector = 300 * torch.randn(32, generator=torch.Generator().manual_seed(3))
    model.model.layers[layer - 1].register_forward_hook(lambda m, a, o: o + vector)
    return vector


def test_a_common_direction_in_use_is_not_collapse():
    model = llama()
    vector = plant_direction(model, 2)
    with torch.no_grad():  # the head looks past the direction, at what differs between tokens
        u = F.normalize(model.model.norm.weight * vector, dim=0)
        model.lm_head.weight -= torch.outer(model.lm_head.weight @ u, u)
        model.lm_head.weight *= 20
    untried = probe(model, ids, trials=False)
    assert untried.verdict.kind == "collapse"
    assert (
        "Whether layers 3 to 5, which work on such tokens, matter to the output was not tried" in untried.verdict.text
    )
    report = probe(model, ids, trials=False, depth_use=True)
    assert report.layers[-1].similarity_robust > 0.9
    assert report.verdict.kind == "common direction"
    assert report.depth_use.tail.layers == [3, 4, 5]
    assert report.depth_use.tail.change > report.depth_use.threshold


def test_collapse_stands_where_what_comes_after_it_is_not_in_use():
    model = llama()
    plant_identity(model, [2, 3, 4])
    plant_direction(model, 2)
    report = probe(model, ids, trials=False, depth_use=True)
    assert report.verdict.kind == "collapse"
    assert report.depth_use.tail.layers == [3, 4, 5]
    assert report.depth_use.tail.change == 0
    assert "Leaving out layers 3 to 5 together, which work on such tokens, moves" in report.verdict.text


def test_no_lens_where_the_output_reads_earlier_streams():
    model = llama()
    first: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda m, a, o: first.append(o))
    model.model.norm.register_forward_hook(lambda m, a, o: o + first[-1])
    report = probe(model, ids, depth_use=True)
    assert all(layer.lens is None for layer in report.layers)
    assert any("No logit lens" in note for note in report.depth_use.notes)


@pytest.mark.parametrize("form", ["mapping", "pair", "list of pairs", "loader"])
def test_labels_come_in_any_form(form):
    model = llama()
    inputs = {
        "mapping": {"input_ids": ids, "labels": ids},
        "pair": (ids, ids),
        "list of pairs": [(ids, ids)],
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, ids), batch_size=3),
    }[form]
    report = probe(model, inputs, depth_use=True)
    assert report.depth_use.unit == "loss"
    with torch.no_grad():
        assert report.depth_use.loss == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert report.settings["samples"] == 3


def test_classes_of_an_image_model_and_a_list_of_batches():
    torch.manual_seed(6)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=3, num_classes=7
    ).eval()
    pixels, classes = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    report = probe(model, (pixels, classes), depth_use=True)
    with torch.no_grad():
        assert report.depth_use.loss == pytest.approx(F.cross_entropy(model(pixels), classes).item(), rel=1e-5)
    assert probe(model, [pixels, pixels]).settings["batches"] == 2
    assert ll.probe(model, {"x": pixels, "labels": classes}, depth_use=True).depth_use.unit == "loss"


def test_a_plain_tensor_is_logits_where_labels_fit_it():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, y = torch.randn(3, 9, 16), torch.randint(16, (3, 9))
    report = probe(model, (x, y), depth_use=True, trials=False)
    with torch.no_grad():
        assert report.depth_use.loss == pytest.approx(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    assert probe(model, x, depth_use=True, trials=False).depth_use.unit == "cosine"


def test_labels_that_do_not_fit_are_named_and_the_distribution_taken():
    report = probe(llama(), ids, depth_use=True)
    assert report.depth_use.unit == "kl"
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**SIZES, num_hidden_layers=2)).eval()
    report = probe(bert, (ids, ids[:, 0]), depth_use=True)
    assert report.depth_use.unit == "cosine"
    assert any("no logits" in note for note in report.depth_use.notes)


@pytest.mark.parametrize("wrong", [-1, "blocks"])
def test_other_choices_are_refused(wrong):
    with pytest.raises(LeadlineError, match="depth_use is"):
        probe(llama(), ids, depth_use=wrong)


def test_weights_as_initialised_are_told_from_trained_ones():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, num_hidden_layers=2))
    assert as_initialised(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids).last_hidden_state[..., 0].sum().backward()
    optimizer.step()
    assert as_initialised(model) is False
    assert as_initialised(nn.Linear(2, 2)) is None


def test_trials_report_what_a_cure_does_to_the_output():
    model = llama()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight *= 3
            block.mlp.down_proj.weight.zero_()
            for part in (block.self_attn.q_proj, block.self_attn.k_proj):
                part.weight.zero_()
    report = probe(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert report.verdict.trials
    with torch.no_grad():
        whole = model(ids, labels=ids).loss.item()
        for trial in report.verdict.trials:
            if trial.error is None:
                ll.cure(model, **trial.cure)
                assert trial.unit == "loss"
                assert trial.change == pytest.approx(model(ids, labels=ids).loss.item() - whole, abs=1e-4)
                ll.uncure(model)
    chosen = next(t for t in report.verdict.trials if t.cure == report.verdict.recommendation)
    assert ("trained with it" in report.verdict.text) == (chosen.change > 0.05)
    assert f"(loss {chosen.change:+.3g})" in report.verdict.text


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, num_hidden_layers=2, initializer_range=0.3)
    return transformers.BertForMaskedLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "attention", "mlp"),
    [
        (llama, "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.down_proj"),
        (gpt2, "transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp.c_proj"),
        (bert, "bert.encoder.layer.{}.attention.output.dense", "bert.encoder.layer.{}.output.dense"),
    ],
)
def test_attention_and_mlp_alone_are_their_last_weights_set_to_zero(make, attention, mlp):
    torch.manual_seed(2)
    model = make()
    report = probe(model, ids, depth_use="sublayers", trials=False)
    p = model(ids).logits.double().log_softmax(-1)
    assert report.depth_use.notes == []
    for i, layer in enumerate(report.layers[1:]):
        for path, value in ((attention, layer.removal_attention), (mlp, layer.removal_mlp)):
            parameters = list(model.get_submodule(path.format(i)).parameters())
            before = [parameter.clone() for parameter in parameters]
            for parameter in parameters:
                parameter.zero_()
            q = model(ids).logits.double().log_softmax(-1)
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)
            assert value == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3, abs=1e-6)


def test_a_sublayer_that_cannot_be_told_is_refused_with_the_reason():
    class Mixed(nn.Module):
        """A block whose stream passes through more than attention and MLP."""

        def __init__(self):
            super().__init__()
            self.attention, self.mlp = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)
            self.more = nn.Linear(16, 16)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.more(x) + self.mlp(x)

    torch.manual_seed(0)
    model = nn.Sequential(Mixed(), Mixed())
    report = probe(model, torch.randn(2, 9, 16), depth_use="sublayers", trials=False)
    assert all(layer.removal_attention is None for layer in report.layers)
    assert all(layer.removal is not None for layer in report.layers[1:])
    assert any("not left out alone in layers 1, 2" in note for note in report.depth_use.notes)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_largest_score_of_each_head_is_the_largest_product_it_may_see(implementation):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.set_attn_implementation(implementation)
    seen: list[torch.Tensor] = []
    hooks = [block.attn.c_attn.register_forward_hook(lambda m, a, o: seen.append(o)) for block in model.transformer.h]
    model(ids)
    for hook in hooks:
        hook.remove()
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    report = probe(model, {"input_ids": ids, "attention_mask": mask}, depth_use=1)
    for projected, layer in zip(seen, report.layers[1:], strict=True):
        q, k, _ = (part.view(3, 16, 4, 8).transpose(1, 2).double() for part in projected.split(32, -1))
        scores = q @ k.mT / 8**0.5
        hidden = torch.ones(16, 16, dtype=torch.bool).triu(1) | (mask == 0)[:, None, :, None]  # padded queries
        scores = scores.masked_fill(hidden, -torch.inf)
        assert layer.largest_score == pytest.approx(scores.amax((-2, -1)).mean(0).tolist(), rel=1e-4)
