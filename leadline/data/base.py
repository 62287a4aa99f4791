"""The protocol of training data: the batch of a step as a pure function of its number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from leadline.errors import LeadlineError

if TYPE_CHECKING:
    from torch import Tensor


class Batches(Protocol):
    """Training batches, computed from the number of a step.

    ``batches(step, micro, rank=rank, world=world)`` returns the part of a step's batch that one process takes in one
    forward pass, on the device of the task. It depends on the seed and these four numbers alone, so a run can resume
    from any step.

    The parts of a step in the order of ``part_of_batch`` form the global batch. That batch depends on neither ``micro``
    nor ``rank``: a run on another number of processes sees the same batches. The order of an epoch follows from (seed,
    epoch), the randomness of a sample from (seed, step, place in the global batch). An implementation may prepare the
    following steps ahead in threads or processes.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; an incomplete last batch is dropped."""

    def __call__(self, step: int, micro: int = 0, *, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """Return the part of a step's batch for one process and forward pass.

        Args:
            step: The optimizer step, from 0.
            micro: The forward pass within the step, from 0, where gradients are accumulated.
            rank: The number of this process.
            world: The number of processes.
        """


def part_of_batch(size: int, micro: int = 0, accumulate: int = 1, *, rank: int = 0, world: int = 1) -> slice:
    """Return the rows of a global batch that one process takes in one forward pass.

    The batch has accumulate * world equal parts; this is part micro * world + rank.

    Args:
        size: Samples of the global batch.
        micro: The forward pass within the step, from 0.
        accumulate: Forward passes of a step.
        rank: The number of this process.
        world: The number of processes.

    Raises:
        LeadlineError: ``size`` is not a multiple of accumulate * world.
    """
    parts = accumulate * world
    if size % parts:
        raise LeadlineError(
            f"the batch size is {size}; {world} process(es) with {accumulate} accumulated part(s) need a multiple of "
            f"{parts}"
        )
    each = size // parts
    first = (micro * world + rank) * each
    return slice(first, first + each)


def mix_seed(*numbers: int) -> int:
    """Mix several numbers into one seed, such as mix_seed(seed, epoch) or mix_seed(seed, step, rank).

    Uses 64 bits of splitmix64; the result fits ``torch.manual_seed``.
    """
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + (number & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
