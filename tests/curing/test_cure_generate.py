"""Text from cured models: with and without the cache it is the same."""

import copy

import cure_zoo as zoo
import pytest
import torch
import transformers as T

import leadline as ll
from leadline.curing import cure
from leadline.errors import LeadlineError

SITES = ("block-end", "ffn-input", "attention-input")
WAYS = ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"num_beams": 2, "do_sample": True})


def generate(model, cached, **way):
    torch.manual_seed(3)
    inputs = {"attention_mask": zoo.padded_mask("left").long()}
    ids = torch.arange(3, 24).view(3, 7)
    return model.generate(
        ids, **inputs, max_new_tokens=9, min_new_tokens=9, use_cache=cached, output_scores=True,
        return_dict_in_generate=True, **way,
    )  # fmt: skip


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama, zoo.mistral])
def test_cached_equals_uncached(make, site):
    model = cure(make(), alpha=0.3, alpha_prime=0.6, de_escalation=0.7, de_escalation_at=site)
    for way in WAYS:
        cached, plain = generate(model, True, **way), generate(model, False, **way)
        assert torch.equal(cached.sequences, plain.sequences)
        for a, b in zip(cached.scores, plain.scores, strict=True):
            finite = torch.isfinite(b)
            assert (a - b)[finite].abs().max() <= 1e-4


@pytest.mark.parametrize("site", SITES)
def test_an_encoder_used_as_a_decoder_is_causal(site):
    config = T.BertConfig(**zoo.ENCODER, is_decoder=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = cure(
        zoo.liven(T.BertLMHeadModel(config)), alpha=0.3, alpha_prime=0.6, de_escalation=0.7, de_escalation_at=site
    )
    for way in WAYS:
        cached, plain = generate(model, True, **way), generate(model, False, **way)
        assert torch.equal(cached.sequences, plain.sequences)


def test_greedy_text_is_that_of_our_model():
    theirs = zoo.gpt2()
    strengths = {"alpha": 0.3, "alpha_prime": 0.6, "de_escalation": 0.7}
    ours = ll.convert(theirs, attention="hopfield", **strengths)
    mask = zoo.padded_mask("left")
    ids = torch.arange(3, 24).view(3, 7)
    want = ours.generate(ids, 9, mask=mask)
    got = cure(theirs, **strengths).generate(ids, attention_mask=mask.long(), max_new_tokens=9, eos_token_id=None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama, zoo.mistral])
def test_a_cache_in_pieces(make):
    """Tokens given in chunks, through a cache, get the logits of the whole text."""
    model = cure(make(), alpha=0.3, alpha_prime=0.6, de_escalation=0.7)
    ids, mask = torch.randint(3, 31, (3, 9)), zoo.padded_mask("left", N=9).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, parts = T.DynamicCache(config=model.config), []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        output = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
        )
        parts.append(output.logits)
    assert (torch.cat(parts, 1) - whole)[mask.bool()].abs().max() <= 1e-4


@pytest.mark.parametrize("site", SITES)
@torch.no_grad()
def test_sums_follow_the_cache(site):
    """Reordered, selected, repeated and copied caches continue like the texts that they hold."""
    model = cure(zoo.gpt2(), de_escalation=0.9, de_escalation_at=site)
    ids, more = torch.randint(3, 31, (3, 6)), torch.randint(3, 31, (2, 2))
    rows = torch.tensor([2, 0])

    def after(change):
        cache = model(ids, use_cache=True).past_key_values
        cache = change(cache) or cache
        return model(more, past_key_values=cache).logits

    want = model(torch.cat((ids[rows], more), 1), use_cache=False).logits[:, 6:]
    assert (after(lambda cache: cache.reorder_cache(rows)) - want).abs().max() <= 1e-4
    assert (after(lambda cache: cache.batch_select_indices(rows)) - want).abs().max() <= 1e-4

    def copied(cache):
        twin = copy.deepcopy(cache)
        model(ids, past_key_values=cache)
        twin.reorder_cache(rows)
        return twin

    assert (after(copied) - want).abs().max() <= 1e-4

    def repeated(cache):
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)

    twice = torch.cat((ids[[1, 1]], more), 1)
    assert (after(repeated) - model(twice, use_cache=False).logits[:, 6:]).abs().max() <= 1e-4


def test_a_cache_can_be_used_again():
    model = cure(zoo.llama(), alpha_prime=0.5, de_escalation=0.9)
    ids = torch.randint(3, 31, (2, 6))
    cache = T.StaticCache(config=model.config, max_cache_len=12)
    first = model(ids, past_key_values=cache).logits
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, first)


def test_static_cache_without_de_escalation():
    for make in (zoo.gpt2, zoo.llama, zoo.mistral):
        model = cure(make(), alpha=0.3, alpha_prime=0.6)
        static = generate(model, True, cache_implementation="static")
        assert torch.equal(static.sequences, generate(model, False).sequences)


def test_assisted_generation():
    """Carried scores need nothing in the cache, so it may be cropped; the sums of a de-escalation cannot be."""
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    model = cure(zoo.gpt2(), alpha=0.3, alpha_prime=0.6)
    looked_up = model.generate(ids, max_new_tokens=8, prompt_lookup_num_tokens=2)
    assert torch.equal(looked_up, model.generate(ids, max_new_tokens=8, use_cache=False))
    model = cure(zoo.gpt2(), de_escalation=0.5)
    with pytest.raises(LeadlineError, match="cannot be cropped"):
        model.generate(ids, max_new_tokens=8, prompt_lookup_num_tokens=2)


def test_what_de_escalation_refuses_while_running():
    plain, ids = zoo.gpt2(), torch.randint(3, 31, (2, 6))
    filled = plain(ids, use_cache=True).past_key_values
    model = cure(plain, de_escalation=0.5)
    with pytest.raises(LeadlineError, match="start with an empty cache"):
        model(ids, past_key_values=filled)
    with pytest.raises(LeadlineError, match=r"attention_mask is \(2, 1, 6, 6\)"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(LeadlineError, match="static cache"):
        generate(model, True, cache_implementation="static")
    with pytest.raises(LeadlineError, match="pack several texts"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1), use_cache=False)
    with pytest.raises(LeadlineError, match="is_causal is False"):
        model(ids, is_causal=False)
    assert torch.isfinite(model(ids).logits).all()


def test_the_future_stays_hidden():
    for make in (zoo.gpt2, zoo.llama):
        model = cure(make(), alpha=0.3, alpha_prime=0.6, de_escalation=1.0)
        ids = torch.randint(3, 31, (1, 8))
        other = ids.clone()
        other[0, 5] = (ids[0, 5] + 1 - 3) % 28 + 3
        moved = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
        assert torch.all(moved[:5] == 0)
        assert torch.all(moved[5:] > 0)
