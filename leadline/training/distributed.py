"""One process or many: joining them, exchanging values, replicating or sharding a model over them.

Processes are started by ``accelerate launch`` or ``torchrun`` and set up by accelerate. A model is then replicated
(DDP) or sharded (FSDP) over them. FSDP is torch's ``fully_shard``, which works on the CPU too, where accelerate would
fall back to DDP.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from leadline.anatomy.blocks import find_blocks
from leadline.errors import LeadlineError, need
from leadline.machine import choose_device
from leadline.training.recipe import Recipe, differences

T = TypeVar("T")
_OWN = ("out", "device", "threads", "data.path", "data.cache", "data.workers")  # keys that may differ by process
_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # number of processes in mpirun's environment


@dataclass(frozen=True)
class Processes:
    """This process and how many there are.

    Attributes:
        rank: The number of this process.
        world: How many processes there are.
        device: The device of this process.
        mode: "one", "ddp" or "fsdp".
    """

    rank: int
    world: int
    device: torch.device
    mode: str

    @property
    def main(self) -> bool:
        """Return whether this is the first process, which writes files and lines."""
        return self.rank == 0

    @property
    def alone_on_a_gpu(self) -> bool:
        """Return whether a CUDA graph of the whole step is possible: one process with one GPU."""
        return self.mode == "one" and self.device.type == "cuda"

    def agree(self, value: T) -> T:
        """Return the first process's value, on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every process's value, by rank, on every process."""
        if self.world == 1:
            return [value]
        boxes: list[Any] = [None] * self.world
        dist.all_gather_object(boxes, value)
        return boxes

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.world == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.world


def join(recipe: Recipe) -> Processes:
    """Join the other processes of this run, if any; they stay connected until the process ends.

    Raises:
        LeadlineError: The processes have different recipes, or were started in a way that cannot be used.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and (mpi := next((name for name in _MPI if int(os.environ.get(name, "1")) > 1), None)):
        raise LeadlineError(
            f"{mpi} is {os.environ[mpi]}: MPI has started several processes, which would all train the same; start "
            "them by torchrun or accelerate launch"
        )
    device = choose_device(None if recipe.device == "auto" else recipe.device)
    if world == 1:
        if recipe.distributed == "fsdp":
            raise LeadlineError(
                "distributed is 'fsdp' and this is the only process; start several, such as "
                "torchrun --nproc-per-node 2 -m leadline train ..., or set distributed=auto"
            )
        return Processes(0, 1, device, "one")
    connected = dist.is_initialized()
    state = need("accelerate", "train").PartialState(cpu=device.type == "cpu")
    if not connected:
        atexit.register(_leave)
    sharded = recipe.distributed == "fsdp" or (
        recipe.distributed == "auto" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    )
    mode = "fsdp" if sharded else "ddp"
    processes = Processes(state.process_index, state.num_processes, torch.device(state.device), mode)
    for rank, theirs in enumerate(processes.gather(recipe)):
        if changed := differences(recipe, theirs, _OWN):
            listed = ", ".join(
                f"{key} ({ours} on process {processes.rank}, {other} on {rank})" for key, ours, other in changed
            )
            raise LeadlineError(f"processes were given different recipes: {listed}; start all with the same")
    return processes


def check_same_data(processes: Processes, fingerprints: dict[str, Any]) -> None:
    """Check that all processes have the same data; each machine may have a copy of its own.

    Args:
        processes: The processes of the run.
        fingerprints: A fingerprint of each split, on this process.

    Raises:
        LeadlineError: The fingerprints differ.
    """
    for rank, theirs in enumerate(processes.gather(fingerprints)):
        if changed := [split for split, own in fingerprints.items() if theirs.get(split) != own]:
            raise LeadlineError(
                f"processes were given different data: {', '.join(changed)} of process {processes.rank} and of {rank} "
                "differ; give every machine the same files"
            )


def ignored_precision(recipe: Recipe) -> str | None:
    """Return a notice if accelerate is configured for another precision than the recipe's, which is used."""
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if configured in ("no", recipe.precision):
        return None
    return f"accelerate's mixed_precision is {configured}; the recipe's precision counts, which is {recipe.precision}"


def _leave() -> None:
    """Leave the process group; gloo aborts a process that ends while objects still refer to the group."""
    if dist.is_initialized():
        gc.collect()  # objects of DDP and FSDP refer to themselves
        dist.destroy_process_group()


class Weights:
    """The parameters of a model, this process's part of each, and conversion between parts and whole tensors.

    Everything that updates weights works on ``local``.

    Args:
        model: The model, sharded if it is to be.
        processes: The processes of the run.

    Attributes:
        names: The names of the parameters.
        parameters: The parameters, in the order of ``names``.
        local: The same parameters or, with FSDP, this process's shards of them.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self.processes = processes
        named = dict(model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.local = [nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p for p in self.parameters]

    def clear_gradients(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def collect_gradients(self) -> list[Tensor]:
        """Return the local gradients; those of parameters that FSDP does not shard are averaged over the processes."""
        gradients = []
        for parameter, local in zip(self.parameters, self.local, strict=True):
            if parameter.grad is None:
                local.grad = None
                continue
            if isinstance(parameter.grad, DTensor):
                local.grad = parameter.grad.to_local()
            elif self.processes.mode == "fsdp":
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.processes.world
            assert local.grad is not None
            gradients.append(local.grad)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm () of all gradients together."""
        if self.processes.mode != "fsdp":
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        pairs = list(zip(self.parameters, self.local, strict=True))
        shards = [local.grad for p, local in pairs if isinstance(p, DTensor) and local.grad is not None]
        others = [local.grad for p, local in pairs if not isinstance(p, DTensor) and local.grad is not None]
        square = torch.stack(torch._foreach_norm(shards)).square().sum()
        dist.all_reduce(square)
        return (square + sum(gradient.square().sum() for gradient in others)).sqrt()

    def whole(self, like: Iterable[Tensor]) -> Iterable[Tensor]:
        """Yield the whole tensors of tensors shaped as ``local``; every process must iterate over all of them."""
        for parameter, local in zip(self.parameters, like, strict=True):
            if isinstance(parameter, DTensor):
                local = DTensor.from_local(
                    local.detach(),
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                ).full_tensor()
            yield local.detach()

    @torch.no_grad()
    def fill(self, targets: Iterable[Tensor], whole: Iterable[Tensor] | None) -> None:
        """Copy the first process's whole tensors into ``targets``, which are shaped as ``local``.

        Args:
            targets: One tensor for each parameter.
            whole: The whole tensors on the first process; ignored on the others.
        """
        source = iter(whole) if whole is not None else None
        for parameter, target in zip(self.parameters, targets, strict=True):
            if source is None:
                full = torch.empty(parameter.shape, dtype=target.dtype, device=target.device)
            else:
                full = next(source).to(target.device)
            if isinstance(parameter, DTensor):
                sharded = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=0)
                full = sharded.to_local()
            elif self.processes.world > 1:
                full = full.contiguous()
                dist.broadcast(full, src=0)
            target.copy_(full)


def shard(model: nn.Module, processes: Processes) -> None:
    """Shard the model in place with FSDP: a group of weights for each block, one for the rest.

    FSDP's own mixed precision is off: it would cast the tensors that blocks hand on, carried scores included. Autocast
    does the same work and leaves them alone. Scalars, such as learned strengths, cannot be sharded and stay whole.
    Weights are resharded after every forward pass; otherwise those of an evaluation with averaged weights would stay.

    Args:
        model: The model.
        processes: The processes to shard it over.
    """
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    scalars = {p for p in model.parameters() if p.ndim == 0}
    for block in find_blocks(model):
        fully_shard(block.module, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)


def replicate(model: nn.Module, processes: Processes, unused: bool) -> nn.Module:
    """Wrap the model in DDP, which must be called in its place.

    Args:
        model: The model, on its device.
        processes: The processes to replicate it to.
        unused: Whether some weights take no part in the loss.
    """
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=unused)
