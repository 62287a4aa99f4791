"""Batches of tokens: each token once an epoch, the same whoever computes them, and lanes that go on."""

import numpy as np
import pytest
import torch

import leadline as ll
from leadline.data.text.batches import Lanes, Windows

CPU = torch.device("cpu")
TEXT = np.arange(1000, dtype=np.uint16)


def make(kind, size=4, accumulate=1, seed=0, length=16):
    return kind(TEXT, length, size, accumulate=accumulate, seed=seed, device=CPU)


@pytest.mark.parametrize("kind", [Windows, Lanes])
def test_targets_are_the_next_tokens(kind):
    batch = make(kind)(3)
    assert batch["ids"].shape == batch["targets"].shape == (4, 16)
    assert batch["ids"].dtype == torch.int64
    assert torch.equal(batch["targets"], batch["ids"] + 1)
    assert (batch["ids"].diff(dim=1) == 1).all()


@pytest.mark.parametrize("kind", [Windows, Lanes])
def test_no_token_is_read_twice_in_an_epoch(kind):
    batches = make(kind)
    for epoch in range(3):
        first = epoch * batches.steps_per_epoch
        seen = torch.cat([batches(first + i)["ids"].flatten() for i in range(batches.steps_per_epoch)])
        assert len(seen.unique()) == len(seen) >= 1000 - 2 * 16 - 4 * 16


def test_windows_differ_from_epoch_to_epoch_and_seed_to_seed():
    batches = make(Windows)
    n = batches.steps_per_epoch
    first, second = (torch.cat([batches(e * n + i)["ids"][:, 0] for i in range(n)]) for e in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first.sort().values, second.sort().values)  # cut at another place
    assert not torch.equal(make(Windows, seed=1)(0)["ids"], batches(0)["ids"])


def test_lanes_go_on_where_they_stopped_even_into_the_next_epoch():
    batches = make(Lanes)
    for step in range(2 * batches.steps_per_epoch):
        now, after = batches(step)["ids"], batches(step + 1)["ids"]
        goes_on = after[:, 0] == now[:, -1] + 1
        wraps = (step + 1) % batches.steps_per_epoch == 0
        assert goes_on.sum() == (3 if wraps else 4)  # the last lane of the text goes on with its beginning


@pytest.mark.parametrize("kind", [Windows, Lanes])
@pytest.mark.parametrize(("accumulate", "world"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_the_global_batch_depends_on_neither_parts_nor_processes(kind, accumulate, world):
    whole = make(kind)
    parts = make(kind, accumulate=accumulate)
    for step in (0, 5, whole.steps_per_epoch + 1):
        joined = [
            parts(step, micro, rank=rank, world=world)["ids"] for micro in range(accumulate) for rank in range(world)
        ]
        assert torch.equal(torch.cat(joined), whole(step)["ids"])


@pytest.mark.parametrize("kind", [Windows, Lanes])
def test_a_batch_depends_on_its_number_alone(kind):
    batches = make(kind)
    n = batches.steps_per_epoch
    want = [batches(step)["ids"] for step in range(2 * n)]
    fresh = make(kind)
    for step in (2 * n - 1, 0, n, n - 1):
        assert torch.equal(fresh(step)["ids"], want[step])


@pytest.mark.parametrize("kind", [Windows, Lanes])
def test_too_little_text_is_one_clear_line(kind):
    with pytest.raises(ll.LeadlineError, match="1000 tokens, too few for"):
        make(kind, size=100)
