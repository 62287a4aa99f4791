"""Differentiable operators from functions that launch kernels, eager and under torch.compile."""

# mypy: ignore-errors
from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch


def operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    remember: Callable[..., None],
    differentiate: Callable[..., Mapping[str, Any]],
    outputs: Callable[..., Any],
    gradients: Callable[..., Any],
) -> Callable[..., Any]:
    """Build a differentiable function with the parameters of ``forward``.

    In eager mode it is an autograd function, since a custom operator costs time to call.

    Args:
        name: Name of the operator among torch's custom operators.
        forward: Computes the outputs. Its parameters are annotated, as torch's custom operators must be.
        backward: Computes gradients; annotated likewise.
        remember: Called as ``remember(ctx, inputs, output)`` to save what ``backward`` needs. ``inputs`` is a named
            tuple of the parameters of ``forward``.
        differentiate: Called as ``differentiate(ctx, backward, *output_gradients)`` to call ``backward``. It returns
            the gradients by the names of the inputs; those left out have none.
        outputs: Returns empty outputs for the arguments of ``forward``.
        gradients: Returns empty results for the arguments of ``backward``.

    Returns:
        The function. It takes positional arguments only.
    """
    parameters = list(inspect.signature(forward).parameters)
    Inputs = namedtuple("Inputs", parameters, defaults=[None] * len(parameters))
    forward_op = torch.library.custom_op(f"leadline::{name}_forward", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"leadline::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(outputs)
    backward_op.register_fake(gradients)
    forward_op.register_autograd(
        lambda ctx, *grads: tuple(Inputs(**differentiate(ctx, backward_op, *grads))),
        setup_context=lambda ctx, inputs, output: remember(ctx, Inputs(*inputs), output),
    )

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            remember(ctx, Inputs(*inputs), output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return tuple(Inputs(**differentiate(ctx, backward, *grads)))

    def run(*inputs):
        return forward_op(*inputs) if torch.compiler.is_compiling() else Eager.apply(*inputs)

    return run
