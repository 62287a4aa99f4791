"""Everything a run is made of, into a checkpoint and back, on any number of processes.

model.safetensors, config.json   the weights, as ``model.save`` writes them: ``leadline.load`` reads the folder
ema/                             the averaged weights, likewise
optimizer.safetensors            exp_avg.NAME, exp_avg_sq.NAME, step.NAME
carry.safetensors                what a model carries from step to step, of the whole batch
state.json                       step, learning rate, random seed, loss scale, running sums, score, recipe
"""

from __future__ import annotations

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


def save(step: Step, out: Path, done: int, facts: dict[str, Any]) -> Path:
    """Write the checkpoint after ``done`` steps. Rank 0 gathers and writes; all return, or all raise, together."""
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
            _write_model(step.model, gathered["model"], folder)
            if "ema" in gathered:
                _write_model(step.model, gathered["ema"], folder / "ema")
            write_tensors(folder / "optimizer.safetensors", gathered["optimizer"])
            if gathered["carry"]:
                write_tensors(folder / "carry.safetensors", gathered["carry"])
            write_json(folder / STATE, state)

        try:
            checkpoint.save(out, done, write)
            checkpoint.prune(out, step.recipe.checkpoint.keep)
        except Exception as error:
            failure = error
    if (told := step.processes.agree(failure)) is not None:
        raise told if failure is None else failure
    return checkpoint.folder_of(out, done)


def load(step: Step, saved: Saved | None) -> dict[str, Any]:
    """Take up a checkpoint, which rank 0 has in hand; returns its state.json."""
    main, weights = step.processes.main, step.weights
    state = step.processes.agree(saved.state if saved is not None else None)
    assert state is not None

    def fill(targets: list[Tensor], file: str, prefix: str = "") -> None:
        stored = saved.tensors(file) if saved is not None else {}
        whole = [_named(stored, prefix + name, saved) for name in weights.names] if main else None
        weights.fill(targets, whole)

    fill([local.detach() for local in weights.local], "model")
    if step.ema is not None:
        fill(step.ema, "ema/model")
    optimizer = saved.tensors("optimizer") if saved is not None else {}
    steps = {name: float(_named(optimizer, f"step.{name}", saved)) for name in weights.names} if main else {}
    steps = step.processes.agree(steps)
    restore(step.optimizer, weights, steps)
    for moment in MOMENTS:
        held = [step.optimizer.state[p].get(moment, torch.zeros_like(p).detach()) for p in weights.local]
        fill(held, "optimizer", f"{moment}.")
    step.scale.fill_(state["scale"])
    step.good_steps.fill_(state["good_steps"])
    step.names = list(state["sums"])  # their mean over the processes is what is read, so each goes on from the mean
    step.sums = torch.tensor(list(state["sums"].values()), dtype=torch.float64, device=step.device)
    _load_carry(step, saved)
    return state


def _gather(step: Step) -> dict[str, dict[str, Tensor]]:
    """All tensors whole, on rank 0's CPU; empty elsewhere, though every process takes part."""
    weights, main = step.weights, step.processes.main

    def whole(local: list[Tensor], prefix: str = "") -> dict[str, Tensor]:
        pairs = zip(weights.names, weights.whole(local), strict=True)
        return {prefix + name: tensor.cpu() for name, tensor in pairs if main} if main else _exhaust(pairs)

    gathered = {"model": whole([local.detach() for local in weights.local])}
    if step.ema is not None:
        gathered["ema"] = whole(step.ema)
    gathered["optimizer"] = {f"step.{name}": count for name, count in steps_of(step.optimizer, weights).items()}
    for moment in MOMENTS:
        gathered["optimizer"].update(whole(moments_of(step.optimizer, weights, moment), f"{moment}."))
    gathered["carry"] = _gather_carry(step)
    return gathered


def _exhaust(pairs: Any) -> dict[str, Tensor]:
    for _ in pairs:
        pass
    return {}


def _write_model(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """As ``Model.save`` does, with these weights; buffers are those of the model."""
    others = {name: value.detach().cpu() for name, value in model.state_dict().items() if name not in tensors}
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Model):
        model.save(folder, {**others, **tensors})
    else:
        write_tensors(folder / "model.safetensors", {**others, **tensors})


def _named(stored: dict[str, Tensor], name: str, saved: Saved | None) -> Tensor:
    if name not in stored:
        folder = saved.folder if saved is not None else "the checkpoint"
        raise LeadlineError(f"{folder} has no {name}; it belongs to another model, give another out=")
    return stored[name]


def _gather_carry(step: Step) -> dict[str, Tensor]:
    """carry.I: the I-th tensor of what is carried, the parts of all processes put together in the batch's order."""
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
    """This process's parts of what was carried."""
    stored = saved.tensors("carry") if saved is not None else {}
    kinds = step.processes.agree([(tensor.shape, tensor.dtype) for tensor in _in_order(stored)])
    size, parts = step.recipe.batch.size, step.recipe.batch.accumulate
    rows = [
        part_of_batch(size, micro, parts, rank=step.processes.rank, world=step.processes.world)
        for micro in range(parts)
    ]
    taken: list[list[Tensor]] = [[] for _ in rows]
    for index, (shape, dtype) in enumerate(kinds):
        whole = torch.empty(shape, dtype=dtype, device=step.device)
        if step.processes.main:
            whole.copy_(_in_order(stored)[index])
        if step.processes.world > 1:
            dist.broadcast(whole, src=0)
        for part, own in zip(taken, rows, strict=True):
            part.append(whole[own].clone())
    if kinds:
        step.carry = [tuple(part) for part in taken]


def _in_order(stored: dict[str, Tensor]) -> list[Tensor]:
    return [stored[f"carry.{index}"] for index in range(len(stored))]
