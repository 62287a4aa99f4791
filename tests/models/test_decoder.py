"""Decoders: no look into the future, and the cache changes nothing but the time."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers

import leadline as ll
from leadline.models.generation import Sampling, _choose
from leadline.nn import LayerCache

SMALL = {"depth": 3, "dim": 12, "heads": 3, "vocab_size": 29, "max_tokens": 16}
ATTENTION = [{}, {"attention": "hopfield"}, {"attention": "hopfield", "alpha": 0.0, "kv_heads": 1, "start": "scores"}]
CURES = [{}, *({"de_escalation": 0.9, "de_escalation_at": s} for s in ("block-end", "ffn-input", "attention-input"))]
POSITIONS = ["learned", "rotary", "sinusoidal"]
COMBINATIONS = list(itertools.product(ATTENTION, CURES, POSITIONS))


def build(**options):
    torch.manual_seed(1)
    model = ll.create_model("gpt2_small", **{**SMALL, **options}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sharp logits, so that an error changes the tokens
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def prompts(padded):
    ids = torch.randint(29, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = None
    if padded:
        mask = torch.ones(3, 6, dtype=torch.bool)
        mask[0, :4] = mask[1, :1] = False
    return ids, mask


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("attention", "cure", "positions"), COMBINATIONS)
def test_no_output_depends_on_the_future(attention, cure, positions, padded):
    model = build(**attention, **cure, positions=positions)
    ids, mask = prompts(padded)
    real = torch.ones(3, 6, dtype=torch.bool) if mask is None else mask
    logits = model(ids, mask)
    for t in range(1, 6):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 1) % 29
        assert torch.equal(model(changed, mask)[:, :t][real[:, :t]], logits[:, :t][real[:, :t]])
    if padded:
        changed = torch.where(mask, ids, (ids + 1) % 29)
        assert torch.equal(model(changed, mask)[mask], logits[mask])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("attention", "cure", "positions"), COMBINATIONS)
def test_cached_generation_equals_uncached(attention, cure, positions, padded):
    model = build(**attention, **cure, positions=positions)
    ids, mask = prompts(padded)
    cached = model.generate(ids, 9, cache=True, mask=mask)
    assert torch.equal(cached, model.generate(ids, 9, cache=False, mask=mask))
    assert cached.shape == (3, 15)
    sampled = [
        model.generate(ids, 9, cache=c, mask=mask, temperature=0.8, generator=torch.Generator().manual_seed(5))
        for c in (True, False)
    ]
    assert torch.equal(*sampled)
    assert not torch.equal(sampled[0], cached)


@pytest.mark.parametrize(("attention", "cure", "positions"), COMBINATIONS)
def test_cached_logits_equal_uncached_ones_in_chunks_of_any_size(attention, cure, positions):
    model = build(**attention, **cure, positions=positions)
    ids, mask = prompts(padded=True)
    whole, cache, seen, parts = model(ids, mask), [LayerCache(6) for _ in range(3)], 0, []
    for part in ids.split((3, 1, 2), dim=1):
        seen += part.shape[1]
        parts.append(model(part, mask[:, :seen], cache=cache))
    assert torch.allclose(torch.cat(parts, 1)[mask], whole[mask], atol=1e-12)


def test_a_padded_prompt_continues_as_the_bare_one():
    model = build(attention="hopfield", de_escalation=0.9)
    ids, mask = prompts(padded=True)
    bare = model.generate(ids[:1, 4:], 9)
    assert torch.equal(model.generate(ids, 9, mask=mask)[0, 4:], bare[0])


@pytest.mark.parametrize("padded", [False, True])
def test_greedy_generation_is_that_of_transformers(padded):
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=29,
        n_positions=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids, mask = prompts(padded)
    attention_mask = torch.ones_like(ids) if mask is None else mask.long()
    want = theirs.generate(ids, attention_mask=attention_mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(ll.convert(theirs).generate(ids, 12, mask=mask), want)


def test_stop_fills_a_finished_sequence():
    model = build()
    ids, _ = prompts(False)
    free = model.generate(ids, 9)
    stop = int(free[0, 8])
    out = model.generate(ids, 9, stop=stop)
    for row, want in zip(out.tolist(), free.tolist(), strict=True):
        end = want.index(stop, 6) if stop in want[6:] else len(want)
        assert row[: end + 1] == want[: end + 1][: len(row)]
        assert set(row[end:]) <= {stop}


def test_sampling_keeps_to_the_likeliest():
    model = build()
    ids, _ = prompts(False)
    probabilities = model(ids[:1])[0, -1].softmax(-1)
    draws = model.generate(ids[:1].expand(4000, -1), 1, temperature=1.0)[:, -1]
    assert torch.allclose(draws.bincount(minlength=29) / 4000, probabilities.float(), atol=0.04)
    top = model.generate(ids[:1].expand(500, -1), 1, temperature=1.0, top_k=3)[:, -1]
    assert set(top.tolist()) <= set(probabilities.topk(3).indices.tolist())
    ordered = probabilities.sort(descending=True)
    needed = int((ordered.values.cumsum(0) < 0.6).sum()) + 1
    nucleus = model.generate(ids[:1].expand(500, -1), 1, temperature=1.0, top_p=0.6)[:, -1]
    assert set(nucleus.tolist()) == set(ordered.indices[:needed].tolist())


def test_the_likeliest_alone_is_greedy_where_others_are_as_likely():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).expand(200, -1)  # as in bfloat16, which has few numbers
    assert _choose(logits, Sampling(1.0, top_k=1)).unique().numel() == 1
    assert _choose(logits, Sampling(1.0, top_k=2)).unique().numel() == 2


def test_generation_leaves_the_mode_as_it_was():
    model = build(dropout=0.5).train()
    ids, _ = prompts(False)
    assert torch.equal(model.generate(ids, 4), model.generate(ids, 4))
    assert model.training


@pytest.mark.parametrize("scheme", ["forward-forward", "backward-backward"])
def test_other_schemes_generate_without_a_cache_and_refuse_one(scheme):
    model = build(attention="hopfield", alpha=0.9, scheme=scheme, solver_tolerance=1e-6)
    ids, _ = prompts(False)
    assert model.generate(ids, 2, cache=False).shape == (3, 8)
    with pytest.raises(ll.LeadlineError, match="generate with cache=False"):
        model.generate(ids, 2)


def test_untied_head():
    model = build(tied=False)
    assert model.head.weight.shape == (29, 12)
    assert model(prompts(False)[0]).shape == (3, 6, 29)


def test_scaled_embeddings():
    """As if the embedding were larger; the head that is tied to it is not."""
    ids = prompts(False)[0]
    plain, scaled = (build(tied=False, embedding_scale=scale) for scale in (1.0, 4.0))
    scaled.load_state_dict(plain.state_dict())
    assert not torch.allclose(plain(ids), scaled(ids))
    with torch.no_grad():
        plain.token.weight *= 4
    assert torch.equal(plain(ids), scaled(ids))
    tied = build(embedding_scale=4.0)
    assert torch.equal(tied(ids), F.linear(tied.encode(ids), tied.token.weight))
    with pytest.raises(ll.LeadlineError, match="embedding_scale is 0"):
        build(embedding_scale=0)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda m: m(torch.zeros(1, 17, dtype=torch.long)), "17 tokens are given; this model has positions for 16"),
        (lambda m: m.generate(torch.zeros(1, 9, dtype=torch.long), 9), "this model has positions for 16"),
        (lambda m: m(torch.tensor([[3, 29]])), "ids go from 3 to 29; this model has tokens 0 to 28"),
        (lambda m: m(torch.zeros(1, 0, dtype=torch.long)), "integers (batch, tokens)"),
        (lambda m: m(torch.zeros(0, 4, dtype=torch.long)), "integers (batch, tokens)"),
        (lambda m: m(torch.zeros(1, 4)), "integers (batch, tokens)"),
        (lambda m: m(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4)), "it must be boolean"),
        (lambda m: m(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 5) > 0), "of shape (1, 4)"),
        (lambda m: m.generate(torch.zeros(1, 4, dtype=torch.long), 0), "max_new_tokens is 0"),
        (lambda m: m.generate(torch.zeros(1, 4, dtype=torch.long), 1, temperature=-1), "temperature is -1"),
        (
            lambda m: m.generate(torch.zeros(1, 2, dtype=torch.long), 1, mask=torch.tensor([[True, False]])),
            "on the left",
        ),
        (lambda m: ll.create_model("gpt2_small", causal=False), "must not see the future"),
    ],
)
def test_bad_input_is_one_clear_line(call, part):
    with pytest.raises(ll.LeadlineError) as error:
        call(build())
    assert part in str(error.value)
    assert "\n" not in str(error.value)
