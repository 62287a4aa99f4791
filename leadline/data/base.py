"""What a training run asks of its data: the batch of a step, as a pure function of the step's number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from leadline.errors import LeadlineError

if TYPE_CHECKING:
    from torch import Tensor


class Batches(Protocol):
    """``batches(step, micro, rank=rank, world=world)`` is the part of step ``step``'s batch that this process takes
    in its ``micro``-th forward pass, on the task's device.

    It depends on the seed and these four numbers alone, so a run goes on from its step number. All the parts of a
    step, put one behind the other in the order of ``part_of_batch``, are the global batch, which depends on neither
    ``micro`` nor ``rank``: a run on another number of processes sees the same batches. The order of an epoch comes
    from (seed, epoch), what is random about a sample from (seed, step, place in the global batch). Following steps
    may be prepared ahead, in threads or in processes.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps; a ragged end is dropped."""

    def __call__(self, step: int, micro: int = 0, *, rank: int = 0, world: int = 1) -> dict[str, Tensor]: ...


def part_of_batch(size: int, micro: int = 0, accumulate: int = 1, *, rank: int = 0, world: int = 1) -> slice:
    """Rows of the global batch of ``size`` that process ``rank`` takes in forward pass ``micro``.

    Part number micro * world + rank of accumulate * world equal parts.
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
    """One seed from several numbers, well spread: mix_seed(seed, epoch), mix_seed(seed, step, rank), ...

    64 bits by splitmix64; the result fits ``torch.manual_seed``.
    """
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + (number & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
