"""Batches, padding masks and the mode in which a model is measured."""

import pytest
import torch
from torch import nn

from leadline.anatomy.calling import count_batches, each_batch, evaluation_mode, first_line, padding_mask
from leadline.errors import LeadlineError


def test_batches_of_every_kind_of_input():
    x = torch.randn(2, 3)
    assert list(each_batch(x)) == [x]
    assert list(each_batch({"x": x})) == [{"x": x}]
    assert list(each_batch(iter([x, {"x": x}]))) == [x, {"x": x}]
    assert [count_batches(inputs) for inputs in (x, {"x": x}, [x, x], iter([x]))] == [1, 1, 2, None]
    for inputs, message in [("text", "inputs are str"), ([], "inputs hold no batch"), ([[x]], "a batch is list")]:
        with pytest.raises(LeadlineError, match=message):
            list(each_batch(inputs))


def test_padding_is_read_from_every_usual_mask():
    real = torch.tensor([[True, True, False], [True, True, True]])
    x = torch.randn(2, 3, 4)
    for batch in (
        {"attention_mask": real.long()},
        {"mask": real},
        {"src": x, "src_key_padding_mask": ~real},
        {"src": x, "src_key_padding_mask": torch.zeros(2, 3).masked_fill(~real, -torch.inf)},
    ):
        assert torch.equal(padding_mask(batch), real)
    assert torch.equal(padding_mask(x, mask=lambda batch: real[: len(batch)]), real)
    assert padding_mask(x) is None
    assert padding_mask({"mask": torch.ones(2, 3)}) is None  # nothing is padding
    assert padding_mask({"src": x, "mask": torch.ones(3, 3).tril()}) is None  # a mask of attention
    with pytest.raises(LeadlineError, match=r"the mask has shape \(2, 1, 3\)"):
        padding_mask({"mask": real[:, None]})
    with pytest.raises(LeadlineError, match="without a real token"):
        padding_mask({"mask": torch.zeros(2, 3)})


def test_evaluation_mode_is_undone_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    modes = [module.training for module in model.modules()]
    state, fast_path = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()

    def fail():
        assert not any(module.training for module in model.modules())
        assert not torch.backends.mha.get_fastpath_enabled()
        torch.rand(3)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), evaluation_mode(model):
        fail()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_an_error_in_one_line():
    assert first_line(ValueError("\n  the shapes do not match\nmore")) == "the shapes do not match"
    assert first_line(KeyError("x")) == "KeyError 'x'"
