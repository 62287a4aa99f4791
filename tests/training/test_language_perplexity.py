"""Perplexity: the same number as transformers gives, whatever the windows, and one that compares tokenizers."""

import math

import numpy as np
import pytest
import torch
import transformers

import leadline as ll
from leadline.data.text.store import encode_text
from leadline.data.text.tokenizers import ByteTokenizer, PairTokenizer, WordTokenizer
from leadline.training.perplexity import Score, figures, perplexity, score_segments, score_windows

CPU = torch.device("cpu")
TEXT = "".join(f"The {i}th sounding gave {i * 7 % 40} fathoms, sand and shells.\n" for i in range(12))
BYTES = encode_text(TEXT, ByteTokenizer())


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=256, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs, ll.convert(theirs)


def xl(**options):
    torch.manual_seed(0)
    sizes = {
        "depth": 2,
        "dim": 16,
        "heads": 2,
        "ffn": 24,
        "vocab_size": 256,
        "cutoffs": (60, 120),
        "memory_length": 5000,
    }
    return ll.create_model("transformer_xl_base", **{**sizes, **options}).eval()


def their_loss(theirs, ids):
    with torch.no_grad():
        return float(theirs(ids, labels=ids).loss)


def test_agrees_with_transformers_own_loss(pair):
    """Windows side by side, n tokens each, predict n tokens: transformers is given one more and predicts as many."""
    theirs, ours = pair
    ids = torch.from_numpy(BYTES.ids.astype(np.int64))
    total = count = 0
    for start in range(0, len(ids) - 1, 64):
        window = ids[start : start + 65]
        with torch.no_grad():
            logits = theirs(window[None, :-1]).logits
            loss = theirs.loss_function(logits, None, 256, shift_labels=window[None, 1:])
        total, count = total + float(loss) * (len(window) - 1), count + len(window) - 1
    found = perplexity(ours, BYTES, ByteTokenizer())
    assert count == len(ids) - 1
    assert found["loss"] == pytest.approx(total / count, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), abs=1e-4 * math.exp(total / count))
    short = encode_text(TEXT[:60], ByteTokenizer())
    assert perplexity(ours, short, ByteTokenizer())["loss"] == pytest.approx(
        their_loss(theirs, ids[None, :60]), abs=1e-5
    )


@pytest.mark.parametrize("stride", [1, 7, 63, 64])
@pytest.mark.parametrize("batch", [1, 5, None])
def test_a_sliding_window_scores_every_token_once_with_all_the_context_it_can(pair, stride, batch):
    theirs, ours = pair
    ids = torch.from_numpy(BYTES.ids.astype(np.int64))[:200]
    nats, scored, done, start = 0.0, [], 0, 0
    while done < 199:
        end = min(start + 64, 199)
        with torch.no_grad():
            logs = theirs(ids[None, start:end]).logits[0].log_softmax(-1)
        for target in range(done + 1, end + 1):
            nats -= float(logs[target - 1 - start, ids[target]])
            scored.append(target)
        done, start = end, start + stride
    assert scored == list(range(1, 200))
    found = score_windows(ours, BYTES.ids[:200], 64, stride, batch, device=CPU)
    assert found.tokens == 199
    assert found.nats == pytest.approx(nats, rel=1e-5)


def test_shares_of_several_processes_add_up_to_the_whole(pair):
    _, ours = pair
    whole = score_windows(ours, BYTES.ids, 32, 8, 3, device=CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.all_reduce", lambda tensor: None)
        shares = [score_windows(ours, BYTES.ids, 32, 8, 3, device=CPU, rank=r, world=4).nats for r in range(4)]
        lanes = [score_segments(xl(), BYTES.ids, 10, 6, device=CPU, rank=r, world=3).nats for r in range(3)]
    assert sum(shares) == pytest.approx(whole.nats, rel=1e-6)
    assert sum(lanes) == pytest.approx(score_segments(xl(), BYTES.ids, 10, 6, device=CPU).nats, rel=1e-6)


@pytest.mark.parametrize("length", [10, 64, 10_000])
def test_transformer_xl_reads_on_with_its_memory(length):
    """With a memory of the whole past the segments do not matter: it is the text read in one go."""
    model = xl()
    ids = torch.from_numpy(BYTES.ids.astype(np.int64))[None]
    with torch.no_grad():
        want = float(model(ids[:, :-1], None, ids[:, 1:])[0])
    assert perplexity(model, BYTES, ByteTokenizer(), length=length)["loss"] == pytest.approx(want, abs=1e-5)


def test_a_short_memory_and_lanes_change_the_result():
    model = xl()
    long = perplexity(model, BYTES, ByteTokenizer(), length=20)["loss"]
    lanes = score_segments(model, BYTES.ids, 20, 4, device=CPU)
    assert lanes.tokens == len(BYTES) - 1
    assert lanes.nats / lanes.tokens != pytest.approx(long, abs=1e-7)
    model.memory_length = 5
    assert perplexity(model, BYTES, ByteTokenizer(), length=20)["loss"] != pytest.approx(long, abs=1e-7)


def stretches(model, lanes):
    """Nats of a text in so many stretches, each read in one go; what does not divide follows the last."""
    ids = torch.from_numpy(BYTES.ids.astype(np.int64))[None]
    each = (len(BYTES) - 1) // lanes
    ends = [*(each * lane for lane in range(1, lanes)), len(BYTES) - 1]
    parts = [ids[:, start : end + 1] for start, end in zip([0, *ends], ends, strict=False)]
    with torch.no_grad():
        return sum(float(model(part[:, :-1], None, part[:, 1:])[0]) * (part.shape[1] - 1) for part in parts)


@pytest.mark.parametrize("lanes", [4, 7, 400, 9999])
def test_lanes_leave_no_token_out(lanes):
    model = xl()
    found = score_segments(model, BYTES.ids, 20, lanes, device=CPU)
    assert found.tokens == len(BYTES) - 1
    assert found.nats == pytest.approx(stretches(model, min(lanes, len(BYTES) - 1)), rel=1e-5)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lanes", [6, 7])
def test_processes_share_lanes_and_what_is_left(lanes, world, monkeypatch):
    model, nats = xl(), []
    monkeypatch.setattr("leadline.training.perplexity.dist.all_reduce", lambda total: None)
    for rank in range(world):
        nats.append(score_segments(model, BYTES.ids, 20, lanes, device=CPU, rank=rank, world=world).nats)
    found = sum(nats) if lanes % world == 0 else nats[0]
    assert found == pytest.approx(stretches(model, lanes), rel=1e-5)


def uniform(vocab_size):
    """A model that finds every token equally likely: its figures are known."""
    model = ll.create_model("gpt2_small", depth=1, dim=8, heads=2, vocab_size=vocab_size, max_tokens=32)
    torch.nn.init.zeros_(model.token.weight)
    return model


def test_figures_of_a_model_that_knows_nothing():
    found = perplexity(uniform(256), BYTES, ByteTokenizer())
    assert found["bits_per_byte"] == pytest.approx(8, rel=1e-6)
    assert found["perplexity"] == pytest.approx(256, rel=1e-5)
    words = len(TEXT.split()) + TEXT.count("\n")
    assert found["word_perplexity"] == pytest.approx(math.exp((len(TEXT) - 1) * math.log(256) / words), rel=1e-4)
    tokenizer = WordTokenizer.train([TEXT])
    text = encode_text(TEXT, tokenizer)
    by_word = perplexity(uniform(tokenizer.vocab_size), text, tokenizer)
    assert (
        by_word["word_perplexity"]
        == pytest.approx(by_word["perplexity"])
        == pytest.approx(tokenizer.vocab_size, rel=1e-5)
    )


def test_bits_per_byte_and_word_perplexity_do_not_depend_on_the_tokens():
    """The same probabilities of the text, told in other tokens, are the same figures up to the first token."""
    pairs = PairTokenizer.train([TEXT], 300)
    text = encode_text(TEXT, pairs)
    bits = 3.0
    found = []
    for kind, tokens in ((ByteTokenizer(), BYTES), (pairs, text)):
        first = len(kind.decode([int(tokens.ids[0])]).encode())
        nats = bits * math.log(2) * (len(TEXT.encode()) - first)
        found.append(figures(Score(nats, len(tokens) - 1), tokens, kind))
    assert found[0]["bits_per_byte"] == pytest.approx(bits) == pytest.approx(found[1]["bits_per_byte"])
    assert found[0]["word_perplexity"] == pytest.approx(found[1]["word_perplexity"], rel=0.05)
    assert found[0]["perplexity"] < found[1]["perplexity"] / 2


def test_unknown_words_are_told_and_bits_per_byte_left_out():
    tokenizer = WordTokenizer.train([TEXT])
    text = encode_text(f"{TEXT}no such words <unk>\n", tokenizer)
    found = perplexity(uniform(tokenizer.vocab_size), text, tokenizer)
    assert "bits_per_byte" not in found
    assert found["unknown_words"] == pytest.approx(3 / text.sizes.words)


@pytest.mark.parametrize("text", ["éa", "水", "a水深"])
def test_bits_per_byte_of_half_a_character(text):
    for tokenizer in (ByteTokenizer(), PairTokenizer.train(["plain"], 257)):
        tokens = encode_text(text, tokenizer)
        assert len(tokens) == len(text.encode())
        score = Score(math.log(2) * (len(tokens) - 1), len(tokens) - 1)
        assert figures(score, tokens, tokenizer)["bits_per_byte"] == pytest.approx(1)


def test_the_mode_is_left_as_it_was(pair):
    _, ours = pair
    ours.train()
    perplexity(ours, BYTES, ByteTokenizer(), batch=2)
    assert ours.training


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (
            lambda ours: perplexity(ours, BYTES, ByteTokenizer(), stride=65),
            "stride is 65; it must lie between 1 and 64",
        ),
        (lambda ours: perplexity(ours, BYTES, ByteTokenizer(), stride=0), "stride is 0"),
        (lambda ours: perplexity(xl(), BYTES, ByteTokenizer(), stride=4), "has a memory instead"),
        (lambda ours: perplexity(ours, encode_text("a", ByteTokenizer()), ByteTokenizer()), "needs at least 2"),
    ],
)
def test_bad_input_is_one_clear_line(pair, call, part):
    with pytest.raises(ll.LeadlineError) as error:
        call(pair[1])
    assert part in str(error.value)
    assert "\n" not in str(error.value)
