"""A differentiable operator out of two functions that launch kernels, for eager calls and for torch.compile."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    remember: Callable[..., None],
    differentiate: Callable[..., tuple[Any, ...]],
    outputs: Callable[..., Any],
    gradients: Callable[..., Any],
) -> Callable[..., Any]:
    """A function of the arguments of ``forward``. Both functions are typed, as torch's custom operators must be.

    remember       (ctx, inputs, output), by these names: keep what ``backward`` needs.
    differentiate  (ctx, backward, *output gradients): call ``backward``; a gradient, or None, for each input.
    outputs        empty outputs for the arguments of ``forward``;
    gradients      empty results for those of ``backward``.

    In eager mode it is an autograd function, since a custom operator costs time to call.
    """
    forward_op = torch.library.custom_op(f"leadline::{name}_forward", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"leadline::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(outputs)
    backward_op.register_fake(gradients)
    forward_op.register_autograd(
        lambda ctx, *grads: differentiate(ctx, backward_op, *grads),
        setup_context=remember,
    )

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            remember(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return differentiate(ctx, backward, *grads)

    def run(*inputs):
        return forward_op(*inputs) if torch.compiler.is_compiling() else Eager.apply(*inputs)

    return run
