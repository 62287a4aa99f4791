"""One process or many: who we are, what we agree on, and how a model is spread over processes.

Processes are started by ``accelerate launch`` or ``torchrun`` and set up by accelerate. A model is then copied to each
(DDP) or cut up between them (FSDP, torch's ``fully_shard``, which works on the CPU too, where accelerate would fall
back to DDP).
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
from torch.distributed.tensor import DTensor, distribute_tensor

from leadline.anatomy.blocks import find_blocks
from leadline.errors import LeadlineError, need
from leadline.machine import choose_device
from leadline.training.recipe import Recipe, differences

T = TypeVar("T")
_OWN = ("out", "device", "threads", "data.path", "data.cache", "data.workers")  # what processes may have of their own
_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # processes, as mpirun tells them


@dataclass(frozen=True)
class Processes:
    """This process among all of them. ``mode`` is "one", "ddp" or "fsdp"."""

    rank: int
    world: int
    device: torch.device
    mode: str

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def alone_on_a_gpu(self) -> bool:
        """What a CUDA graph of the whole step needs."""
        return self.mode == "one" and self.device.type == "cuda"

    def agree(self, value: T) -> T:
        """Rank 0's value, on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank, on every process."""
        if self.world == 1:
            return [value]
        boxes: list[Any] = [None] * self.world
        dist.all_gather_object(boxes, value)
        return boxes

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if self.world == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.world


def join(recipe: Recipe) -> Processes:
    """Find out who we are, and meet the others; they stay together until the process ends."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and (mpi := next((name for name in _MPI if int(os.environ.get(name, "1")) > 1), None)):
        raise LeadlineError(
            f"{mpi} is {os.environ[mpi]}: MPI has started several processes, which would all train the same; start "
            "them by torchrun or accelerate launch"
        )
    device = choose_device(None if recipe.device == "auto" else recipe.device)
    on_cpu = device.type == "cpu"
    if world == 1:
        if recipe.distributed == "fsdp":
            raise LeadlineError(
                "distributed is 'fsdp' and this is the only process; start several, such as "
                "torchrun --nproc-per-node 2 -m leadline train ..., or set distributed=auto"
            )
        found = Processes(0, 1, device, "one")
    else:
        met = dist.is_initialized()
        state = need("accelerate", "train").PartialState(cpu=on_cpu)
        if not met:
            atexit.register(_part)
        sharded = recipe.distributed == "fsdp" or (
            recipe.distributed == "auto" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
        )
        found = Processes(
            state.process_index, state.num_processes, torch.device(state.device), "fsdp" if sharded else "ddp"
        )
    for rank, theirs in enumerate(found.gather(recipe)):
        if changed := differences(recipe, theirs, _OWN):
            told = ", ".join(
                f"{key} ({ours} on process {found.rank}, {other} on {rank})" for key, ours, other in changed
            )
            raise LeadlineError(f"processes were given different recipes: {told}; start all with the same")
    return found


def check_same_data(processes: Processes, fingerprints: dict[str, Any]) -> None:
    """Each machine may have a copy of the data; of different ones the processes would take other batches."""
    for rank, theirs in enumerate(processes.gather(fingerprints)):
        if changed := [split for split, own in fingerprints.items() if theirs.get(split) != own]:
            raise LeadlineError(
                f"processes were given different data: {', '.join(changed)} of process {processes.rank} and of {rank} "
                "differ; give every machine the same files"
            )


def ignored_precision(recipe: Recipe) -> str | None:
    """A line where accelerate was told another precision than the recipe has, which counts."""
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if told in ("no", recipe.precision):
        return None
    return f"accelerate's mixed_precision is {told}; the recipe's precision counts, which is {recipe.precision}"


def _part() -> None:
    """Leave with nothing left that holds on to the group: gloo aborts a process that ends otherwise."""
    if dist.is_initialized():
        gc.collect()  # what DDP and FSDP have made refers to itself
        dist.destroy_process_group()


class Weights:
    """The parameters of a model by name, the part of each that lies here, and the way back to the whole.

    Everything that updates weights works on ``local``: the parameters themselves, or with FSDP this process's shards.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self.processes = processes
        named = dict(model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.local = [nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p for p in self.parameters]

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def collect_gradients(self) -> list[Tensor]:
        """The gradients here; those of parameters that FSDP leaves whole are averaged over the processes first."""
        found = []
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
            found.append(local.grad)
        return found

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm () of all gradients together."""
        if self.processes.mode != "fsdp":
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        pairs = list(zip(self.parameters, self.local, strict=True))
        shards = [local.grad for p, local in pairs if isinstance(p, DTensor) and local.grad is not None]
        others = [local.grad for p, local in pairs if not isinstance(p, DTensor) and local.grad is not None]
        square = torch.stack(torch._foreach_norm(shards)).square().sum()
        dist.all_reduce(square)
        return (square + sum(gradient.square().sum() for gradient in others)).sqrt()

    def whole(self, like: Iterable[Tensor]) -> Iterable[Tensor]:
        """Tensors shaped as ``local`` -> the whole ones, one at a time; every process must go through all of them."""
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
        """The other way: put rank 0's whole tensors into ``targets``, which are shaped as ``local``.

        ``whole`` is looked at on rank 0 only.
        """
        source = iter(whole) if whole is not None else None
        for parameter, target in zip(self.parameters, targets, strict=True):
            given = next(source) if source is not None else None
            full = torch.empty(parameter.shape, dtype=target.dtype, device=target.device) if given is None else given
            full = full.to(target.device)
            if isinstance(parameter, DTensor):
                cut = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=0)
                full = cut.to_local()
            elif self.processes.world > 1:
                full = full.contiguous()
                dist.broadcast(full, src=0)
            target.copy_(full)


def shard(model: nn.Module, processes: Processes) -> None:
    """Cut the model up in place: a group of weights for each block, one for the rest.

    No mixed precision of FSDP's own: it would cast what blocks hand to each other, carried scores included. Autocast
    does the same work and leaves them alone. Single numbers, such as learned strengths, cannot be cut and stay whole.
    Nothing stays gathered after a forward pass: an evaluation with other weights would leave them behind.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.world,))
    numbers = {p for p in model.parameters() if p.ndim == 0}
    for block in find_blocks(model):
        fully_shard(block.module, mesh=mesh, reshard_after_forward=True, ignored_params=numbers)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=numbers)


def replicate(model: nn.Module, processes: Processes, unused: bool) -> nn.Module:
    """The model as DDP wants it called; ``unused`` says that some weights take no part in the loss."""
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=unused)
