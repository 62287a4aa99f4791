"""Learning rates against torch's and timm's schedulers."""

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from leadline.errors import LeadlineError
from leadline.training.optimizer import LearningRate
from leadline.training.recipe import Schedule, Span


def rates(total=200, per_epoch=10, lr=0.2, **settings):
    rate = LearningRate(Schedule(**settings), lr, total, per_epoch)
    return [rate(step) for step in range(total)]


def optimizer(lr=0.2):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)


def test_cosine_with_warm_up_and_cool_down_is_timms():
    scheduler_of = pytest.importorskip("timm.scheduler").CosineLRScheduler
    theirs = optimizer()
    scheduler = scheduler_of(
        theirs, t_initial=150, lr_min=0.002, warmup_t=30, warmup_lr_init=0.02, warmup_prefix=True, cycle_limit=1,
        t_in_epochs=False,
    )  # fmt: skip
    expected = []
    for step in range(200):
        scheduler.step_update(step)
        expected.append(theirs.param_groups[0]["lr"])
    ours = rates(name="cosine", warmup=3, start=0.1, cooldown="20 steps", final=0.01)
    assert ours == pytest.approx(expected, rel=1e-9)


def test_multi_step_with_warm_up_is_torchs():
    theirs = optimizer()
    chain = SequentialLR(
        theirs, [LinearLR(theirs, 0.1, total_iters=20), MultiStepLR(theirs, [120, 160], 0.2)], milestones=[20]
    )
    expected = []
    for _ in range(200):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        chain.step()
    ours = rates(name="multi_step", milestones=["70 %", "18 epochs"], factor=0.2, warmup="20 steps", start=0.1)
    assert ours == pytest.approx(expected, rel=1e-9)


def test_a_constant_rate_cools_down_in_a_straight_line():
    ours = rates(name="constant", cooldown="10 %", final=0.5)
    assert ours[:180] == [0.2] * 180
    assert ours[180:] == pytest.approx([0.2 - 0.1 * i / 20 for i in range(20)])


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_cool_down_that_follows_the_warm_up_starts_from_the_full_rate(name):
    ours = rates(total=10, per_epoch=1, name=name, warmup=5, cooldown=5, final=0.5)
    assert ours == pytest.approx([0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.18, 0.16, 0.14, 0.12])


def test_spans():
    assert [Span(given).steps(13, 1000) for given in (2, "2 epochs", "1 epoch", ".5", "40 steps", "70 %", "70%")] == [
        26, 26, 13, 6, 40, 700, 700,
    ]  # fmt: skip
    for given in ("x", "5 days", -1, True, "5 %%", "nan"):
        with pytest.raises(ValueError, match="is no span"):
            Span(given)


def test_what_does_not_fit_the_run_is_refused():
    with pytest.raises(LeadlineError, match=r"take 150 \+ 60 steps; the run has 200"):
        rates(warmup=15, cooldown=6)
    late = Schedule(name="multi_step", milestones=["50 %", "95 %"], cooldown="10 %")
    with pytest.raises(LeadlineError, match="'95 %', which lies in the cool-down, from step 180 on; make it earlier"):
        LearningRate(late, 1.0, 200, 10)
    with pytest.raises(LeadlineError, match="'20 epochs', which lies after the last of 200 steps"):
        rates(name="multi_step", milestones=["10 epochs", "20 epochs"])
