"""The state of a run, all of it, written into a checkpoint and read back, on any number of processes.

| file | content |
| --- | --- |
| ``model.safetensors``, ``config.json`` | the weights, as ``model.save`` writes them, for ``leadline.load`` |
| ``ema/`` | the averaged weights, likewise |
| ``optimizer.safetensors`` | ``exp_avg.NAME``, ``exp_avg_sq.NAME``, ``step.NAME`` |
| ``carry.safetensors`` | what a model carries from step to step, of the whole batch |
| ``state.json`` | step, learning rate, random seed, loss scale, running sums, score, recipe |
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leadline.data.base import part_of_batch
from leadline.errors import LeadlineError
from leadline.models import Model
from leadline.models.checkpoints import STATE, Saved
from leadline.training.optimizer import MOMENTS, moments_of, restore, steps_of
from leadline.training.run_folder import checkpoint
from leadline.training.run_folder.checkpoint import write_json, write_tensors
from leadline.training.step import Step

WEIGHTS, AVERAGED, OPTIMIZER, CARRY = "model", "ema", "optimizer", "carry"


def save(step: Step, out: Path, done: int, facts: dict[str, Any]) -> Path:
    """Write the checkpoint after ``done`` steps, and delete those that are no longer needed.

    Every process takes part; the first one writes. All return, or all raise.

    Args:
        step: What is trained.
        out: The folder of the run.
        done: How many steps are done.
        facts: Further entries of ``state.json``.

    Returns:
        The folder of the checkpoint.

    Raises:
        Stopped: The checkpoint cannot be written.
    """
    assert step.sums is not None
    gathered, sums = _gather(step), step.processes.mean(step.sums).tolist()
    failure: Exception | None = None
    if step.processes.main:
        state = {
            "step": done,
            "lr": float(step.lr),
            "seed": step.recipe.seed,
            "scale": float(step.scale),
            "good_steps": int(step.good_steps),
            "sums": dict(zip(step.names, sums, strict=True)),
            "processes": step.processes.world,
            "recipe": step.recipe.model_dump(mode="json"),
            **facts,
        }

        def write(folder: Path) -> None:
            _write_model(step.model, gathered[WEIGHTS], folder)
            if AVERAGED in gathered:
                _write_model(step.model, gathered[AVERAGED], folder / AVERAGED)
            write_tensors(_file(folder, OPTIMIZER), gathered[OPTIMIZER])
            if gathered[CARRY]:
                write_tensors(_file(folder, CARRY), gathered[CARRY])
            write_json(folder / STATE, state)

        try:
            checkpoint.save(out, done, write)
            checkpoint.prune(out, step.recipe.checkpoint.keep)
        except Exception as error:
            failure = error
    if (first := step.processes.agree(failure)) is not None:
        raise first if failure is None else failure
    return checkpoint.folder_of(out, done)


def load(step: Step, saved: Saved | None) -> dict[str, Any]:
    """Load a checkpoint into the model, the optimizer and the step, on all processes.

    Args:
        step: What is trained.
        saved: The checkpoint on the first process; None on the others.

    Returns:
        The content of its ``state.json``.

    Raises:
        LeadlineError: The checkpoint lacks a weight of this model.
    """
    main, weights = step.processes.main, step.weights
    if saved is not None:
        _check_state(saved)
    state = step.processes.agree(saved.state if saved is not None else None)
    assert state is not None

    def fill(targets: list[Tensor], file: str, prefix: str = "") -> None:
        stored = saved.tensors(file) if saved is not None else {}
        whole = [_named(stored, prefix + name, saved) for name in weights.names] if main else None
        weights.fill(targets, whole)

    fill([local.detach() for local in weights.local], WEIGHTS)
    if step.ema is not None:
        fill(step.ema, f"{AVERAGED}/{WEIGHTS}")
    optimizer = saved.tensors(OPTIMIZER) if saved is not None else {}
    steps = {name: float(_named(optimizer, f"step.{name}", saved)) for name in weights.names} if main else {}
    steps = step.processes.agree(steps)
    restore(step.optimizer, weights, steps)
    for moment in MOMENTS:
        targets = [step.optimizer.state[p].get(moment, torch.zeros_like(p).detach()) for p in weights.local]
        fill(targets, OPTIMIZER, f"{moment}.")
    step.scale.fill_(state["scale"])
    step.good_steps.fill_(state["good_steps"])
    step.names = list(state["sums"])  # means over the processes; reading them takes the mean again
    step.sums = torch.tensor(list(state["sums"].values()), dtype=torch.float64, device=step.device)
    _load_carry(step, saved)
    return state


def _check_state(saved: Saved) -> None:
    """Check the types of what ``load`` reads from state.json."""
    numbers = {name: saved.state.get(name) for name in ("step", "scale", "good_steps")}
    sums = saved.state.get("sums")
    wrong = [name for name, value in numbers.items() if not _number(value)]
    if not isinstance(sums, dict) or not all(map(_number, sums.values())):
        wrong.append("sums")
    if wrong:
        raise LeadlineError(f"{saved.folder / STATE} lacks {', '.join(wrong)} or holds them in another form; remove it")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) >= 2**63


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _gather(step: Step) -> dict[str, dict[str, Tensor]]:
    """Gather all tensors whole on the first process's CPU; empty on the others, though every process takes part."""
    weights, main = step.weights, step.processes.main

    def whole(local: list[Tensor], prefix: str = "") -> dict[str, Tensor]:
        pairs = zip(weights.names, weights.whole(local), strict=True)
        return {prefix + name: tensor.cpu() for name, tensor in pairs if main} if main else _exhaust(pairs)

    gathered = {WEIGHTS: whole([local.detach() for local in weights.local])}
    if step.ema is not None:
        gathered[AVERAGED] = whole(step.ema)
    gathered[OPTIMIZER] = {f"step.{name}": count for name, count in steps_of(step.optimizer, weights).items()}
    for moment in MOMENTS:
        gathered[OPTIMIZER].update(whole(moments_of(step.optimizer, weights, moment), f"{moment}."))
    gathered[CARRY] = _gather_carry(step)
    return gathered


def _exhaust(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    for _ in pairs:
        pass
    return {}


def _write_model(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write a model with these weights as ``Model.save`` does; buffers are those of ``model``."""
    others = {name: value.detach().cpu() for name, value in model.state_dict().items() if name not in tensors}
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Model):
        model.save(folder, {**others, **tensors})
    else:
        write_tensors(_file(folder, WEIGHTS), {**others, **tensors})


def _named(stored: dict[str, Tensor], name: str, saved: Saved | None) -> Tensor:
    if name not in stored:
        folder = saved.folder if saved is not None else "the checkpoint"
        raise LeadlineError(f"{folder} has no {name}; it belongs to another model, give another out=")
    return stored[name]


def _gather_carry(step: Step) -> dict[str, Tensor]:
    """Gather what is carried: ``carry.I`` is its I-th tensor, the parts of all processes in the order of the batch."""
    if step.carry[0] is None:
        return {}
    whole: dict[str, Tensor] = {}
    for index in range(len(step.carry[0])):
        parts = []
        for carry in step.carry:
            assert carry is not None
            own = carry[index].contiguous()
            if step.processes.world > 1:
                pieces = [torch.empty_like(own) for _ in range(step.processes.world)]
                dist.all_gather(pieces, own)
                parts.extend(pieces)
            else:
                parts.append(own)
        whole[f"carry.{index}"] = torch.cat(parts)
    return whole


def _load_carry(step: Step, saved: Saved | None) -> None:
    """Give this process its parts of what was carried."""
    stored = saved.tensors(CARRY) if saved is not None else {}
    kinds = step.processes.agree([(tensor.shape, tensor.dtype) for tensor in _in_order(stored)])
    size, parts = step.recipe.batch.size, step.recipe.batch.accumulate
    rows = [
        part_of_batch(size, micro, parts, rank=step.processes.rank, world=step.processes.world)
        for micro in range(parts)
    ]
    carries: list[list[Tensor]] = [[] for _ in rows]
    for index, (shape, dtype) in enumerate(kinds):
        whole = torch.empty(shape, dtype=dtype, device=step.device)
        if step.processes.main:
            whole.copy_(_in_order(stored)[index])
        if step.processes.world > 1:
            dist.broadcast(whole, src=0)
        for carry, own in zip(carries, rows, strict=True):
            carry.append(whole[own].clone())
    if kinds:
        step.carry = [tuple(carry) for carry in carries]


def _in_order(stored: dict[str, Tensor]) -> list[Tensor]:
    return [stored[f"carry.{index}"] for index in range(len(stored))]
