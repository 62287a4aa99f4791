"""What test_distributed.py runs in two processes."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from training_toys import CarryTask, ToyTask, toy_recipe

from leadline.errors import LeadlineError
from leadline.training import Stopped, train

LEARNED = {"attention": "hopfield", "learnable_alpha": "layer"}  # single numbers, which FSDP leaves whole
CONSTANT = {"schedule": {"name": "constant"}}
LAGGING = {"attention": "hopfield", "scheme": "forward-forward"}  # the last layer's queries and keys have no gradient


class SeenTask(ToyTask):
    """Notes how the weights lie and what the blocks hand to each other."""

    def loss(self, model, batch, carry):
        if not hasattr(self, "seen"):
            self.seen = True
            weights = dict(model.named_parameters())
            sharded = {name: p for name, p in weights.items() if isinstance(p, DTensor)}
            facts["whole"] = sorted(weights.keys() - sharded.keys())
            facts["numbers"] = sum(p.numel() for p in sharded.values())
            facts["numbers_here"] = sum(p.to_local().numel() for p in sharded.values())
            for block in model.blocks:
                block.register_forward_hook(lambda module, args, output: states.add(str(output[1][0].dtype)))
        return super().loss(model, batch, carry)


class StoppedTask(ToyTask):
    """Only the second process is asked to stop."""

    def __init__(self, recipe, device, rank=0, world=1):
        super().__init__(recipe, device, rank, world)
        self.rank, self.count = rank, 0

    def loss(self, model, batch, carry):
        self.count += 1
        if self.rank == 1 and self.count == 6:  # DDP's trial included: step 4
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch, carry)


class LateNaN(ToyTask):
    """A value that is not a number in the second part of the second process."""

    def __init__(self, recipe, device, rank=0, world=1):
        super().__init__(recipe, device, rank, world)
        whole = self.batches

        class Spoiled(type(whole)):
            def __call__(self, step, micro=0, **options):
                batch = super().__call__(step, micro, **options)
                if step == 3 and micro == 1 and rank == 1:
                    batch["pixels"][0] = float("nan")
                return batch

        self.batches = Spoiled(recipe, device)


class KeptNaN(LateNaN):
    """The same, with the model at hand after the run."""

    def make_model(self):
        models.append(super().make_model())
        return models[-1]


class Explodes(ToyTask):
    """The loss of the second process alone, from the fourth step on."""

    def __init__(self, recipe, device, rank=0, world=1):
        super().__init__(recipe, device, rank, world)
        self.rank = rank

    def loss(self, model, batch, carry):
        loss, metrics, carry = super().loss(model, batch, carry)
        return loss * (1e9 if self.rank == 1 else 1.0), metrics, carry


def diverges(out, task, **settings):
    """What the run says that ends, and the figures that it leaves."""
    try:
        train(toy_recipe(out, **settings), make_task=task)
    except Stopped as stopped:
        return str(stopped)
    return "it did not diverge"


class ElsewhereTask(ToyTask):
    """Each process has data of its own."""

    def __init__(self, recipe, device, rank=0, world=1):
        super().__init__(recipe, device, rank, world)
        self.fingerprints = {"train": f"of {rank}", "test": "of all"}


def refusal(recipe, task=ToyTask):
    try:
        train(recipe, make_task=task)
    except LeadlineError as error:
        return str(error)
    return "it was not refused"


def main(out):
    settings = {"regularise": {"ema": 0.9}, "watch": {"every": "6 steps"}}
    train(toy_recipe(out / "ddp", model=LEARNED, **settings), make_task=ToyTask)
    train(toy_recipe(out / "parts", batch={"accumulate": 2}), make_task=CarryTask)
    train(toy_recipe(out / "lagging", model=LAGGING), make_task=ToyTask)
    train(toy_recipe(out / "fsdp", model=LEARNED, distributed="fsdp", **settings), make_task=SeenTask)
    bf16 = {"length": "2 steps", "schedule": {"warmup": 0}, "precision": "bf16", "distributed": "fsdp"}
    states.clear()
    train(toy_recipe(out / "bf16", model=LEARNED, **bf16), make_task=SeenTask)
    facts["states_in_bf16"] = sorted(states)
    train(toy_recipe(out / "fewer", distributed="fsdp", length="6 steps", **CONSTANT), make_task=ToyTask)
    train(toy_recipe(out / "more", **CONSTANT), make_task=CarryTask)
    try:
        train(toy_recipe(out / "asked", log={"every": 2}), make_task=StoppedTask)
    except Stopped as stopped:
        facts["asked"] = [str(stopped).split(";")[0], stopped.code]
    for mode in ("ddp", "fsdp"):
        settings = {"distributed": mode, "batch": {"accumulate": 2}, "log": {"every": 4}}
        facts[f"nan {mode}"] = diverges(out / f"nan-{mode}", LateNaN, **settings)
        facts[f"exploding {mode}"] = diverges(out / f"exploding-{mode}", Explodes, **settings)
        facts[f"limit {mode}"] = diverges(out / f"limit-{mode}", ToyTask, norm_limit=1e-3, **settings)
    fp16 = {"precision": "fp16", "batch": {"accumulate": 2}, "log": {"every": 12}, "evaluate": "12 steps"}
    facts["nan fp16"] = diverges(out / "nan-fp16", KeptNaN, **fp16, checkpoint={"every": "12 steps"})
    facts["weights fp16"] = [float(p.detach().double().sum()) for p in models[0].parameters()]
    rank = facts["rank"] = int(os.environ["RANK"])
    there = {"out": str(out / f"own-{rank}"), "data": {"cache": str(out / f"cache-{rank}")}}  # may be each one's own
    facts["recipes"] = refusal(toy_recipe(optimizer={"lr": 1e-3 * (1 + rank)}, **there))
    facts["data"] = refusal(toy_recipe(**there), ElsewhereTask)
    (out / f"facts-{facts['rank']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    facts: dict = {}
    states: set = set()
    models: list = []
    main(Path(sys.argv[1]))
