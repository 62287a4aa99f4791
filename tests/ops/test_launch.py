"""When a prepared launch may reuse a compiled kernel, with stand-ins for Triton."""

import pytest
import torch

from leadline.ops.launch import Kernel


class Jitted:
    """Stand-in for a jitted function: records its look-ups and the launches of the compiled kernels."""

    arg_names = ("X", "Y", "factor", "n", "BLOCK")

    def __init__(self):
        self.looked_up, self.launched = [], []

    def __getitem__(self, grid):
        def look_up(*arguments, **rest):
            self.looked_up.append((grid, arguments, rest))
            return {(*grid, 1, 1)[:3]: lambda *inputs: self.launched.append(inputs)}

        return look_up


@pytest.fixture
def jitted():
    return Jitted()


def test_the_second_launch_is_not_looked_up(jitted):
    launch = Kernel(jitted).prepare((4, 2), (100,), {"BLOCK": 64}, num_warps=4)
    x, y = torch.zeros(64), torch.zeros(64)
    launch((x, y), (0.5,))
    assert jitted.looked_up == [((4, 2), (x, y, 0.5), {"n": 100, "BLOCK": 64, "num_warps": 4})]
    launch((y, x), (0.7,))
    assert len(jitted.looked_up) == 1
    assert jitted.launched == [(y.data_ptr(), x.data_ptr(), 0.7, 100, 64)]


def test_a_strength_of_1_is_a_float_whatever_it_was_given_as(jitted):
    """Triton compiles an int of 1 into the kernel, which would then be wrong for other strengths."""
    launch = Kernel(jitted).prepare((4,), (100,), {"BLOCK": 64})
    x = torch.zeros(64)
    launch((x, x), (1,))
    launch((x, x), (0,))
    assert type(jitted.looked_up[0][1][2]) is float
    assert type(jitted.launched[0][2]) is float


def test_what_triton_compiles_for_is_told_apart(jitted):
    launch = Kernel(jitted).prepare((4,), (100,), {"BLOCK": 64})
    x = torch.zeros(64)
    launch((x, x), (0.5,))
    launch((x, None), (0.5,))  # an absent tensor is another kernel
    launch((x, None), (0.5,))
    launch((x, x), (0.5,))
    assert len(jitted.looked_up) == 2
    assert [second for _, second, *_ in jitted.launched] == [None, x.data_ptr()]
    launch((x[1:], x), (0.5,))  # and so is one that is not aligned to 16 bytes
    launch((x[1:], x), (0.5,))
    assert len(jitted.looked_up) == 4
    assert len(jitted.launched) == 2


def test_float16_in_the_name_of_bfloat16_is_shown_as_it_is(jitted):
    launch = Kernel(jitted).prepare((4,), (100,), {"BLOCK": 64}, halves=("Y",))
    x = torch.zeros(64, dtype=torch.bfloat16)
    launch((x, x), (0.5,))
    (_, (first, second, _), _) = jitted.looked_up[0]
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float16)
    assert second.data_ptr() == x.data_ptr()
