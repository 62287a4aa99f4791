"""The training step as one CUDA graph: the host fills the inputs and replays the graph.

The first steps run as usual, on a stream of their own, until everything is compiled and allocated and shapes no longer
change. They are steps of the training like any other. Then the step is captured once, without being run, and replayed
from there on. Random numbers still differ from step to step: a replay takes the seed that ``begin`` has set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.training.step import Step
from leadline.training.tasks.base import Carry

WARM_UP = 3  # steps before the capture
PATIENCE = 64  # steps after which it is an error if the carried tensors still change shape


class GraphStep(Step):
    """A ``Step`` that replays a CUDA graph of itself; it takes the same arguments."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[dict[str, Tensor]] = []  # the buffers that the graph reads: a batch for each part
        self.side = torch.cuda.Stream(self.device)
        self.ran = 0  # steps before the capture
        self.shapes: list[Any] | None = None  # of the tensors carried by the last step

    def __call__(self, number: int) -> None:
        """Train step ``number``: eagerly at first, then by the graph."""
        self.begin(number)
        self._fill([self.part(number, micro) for micro in range(self.recipe.batch.accumulate)])
        if self.graph is None and self._settled():
            self._capture(number)
        if self.graph is not None:
            self.graph.replay()
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.compute(lambda micro: self.inputs[micro])
        torch.cuda.current_stream().wait_stream(self.side)
        self.ran += 1

    def _settled(self) -> bool:
        """Return whether the step can be captured: enough have run, and the last two carried the same shapes."""
        before, self.shapes = self.shapes, [_shapes(carry) for carry in self.carry]
        if self.ran >= PATIENCE and before != self.shapes:
            raise LeadlineError(
                f"graph is true and what this model carries from step to step still changed its shape after {PATIENCE} "
                "steps; set graph=false"
            )
        return self.ran >= WARM_UP and before == self.shapes

    def _capture(self, number: int) -> None:
        """Capture the step as a graph, without running it."""
        self.weights.clear_gradients()  # the graph allocates its own
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            # in "global" mode a thread that pins batches meanwhile would invalidate the capture
            with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
                self.compute(lambda micro: self.inputs[micro])
        except RuntimeError as error:
            raise LeadlineError(
                f"graph is true and the step cannot be captured ({str(error).splitlines()[0]}); set graph=false"
            ) from error
        self.graph = graph
        self.begin(number)

    def _fill(self, batches: list[dict[str, Tensor]]) -> None:
        """Copy batches into the graph's inputs, also before the capture, since compiled code depends on strides."""
        if not self.inputs:
            self.inputs = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
            return
        for inputs, batch in zip(self.inputs, batches, strict=True):
            if _signature(inputs) != _signature(batch):
                raise LeadlineError(
                    f"graph is true and a batch is {_signature(batch)} after {_signature(inputs)}; a CUDA graph needs "
                    "batches of one shape: set graph=false"
                )
            for name, tensor in batch.items():
                inputs[name].copy_(tensor, non_blocking=True)


def _shapes(carry: Carry) -> Any:
    return None if carry is None else [tuple(tensor.shape) for tensor in carry]


def _signature(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in batch.items()}
