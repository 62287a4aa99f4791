"""Jobs, the setting that they are trained in, and the recipe and the files that follow from both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from leadline.training.recipe import Recipe, parse_recipe


@dataclass(frozen=True)
class Job:
    """A wanted run.

    Attributes:
        name: Names the run among all jobs, and in its file.
        recipe: The sections of its recipe.
        probe: How many samples to probe the trained model on; 0 for no probe.
        cost: How long it takes, relative to the others; the longest begin first.
    """

    name: str
    recipe: Mapping[str, Any]
    probe: int = 0
    cost: float = 1.0


@dataclass(frozen=True)
class Setting:
    """The place and the manner of training jobs.

    Attributes:
        folder: Records are stored below it, in ``runs``; unfinished runs in ``work``.
        device: The device to train on. On a CPU, recipes run without graphs, compilation and lower precision.
        complete: Fills the data at hand into the sections of a recipe; may change its argument.
        data_id: Identifies the data; records of other data are not used.
        jobs: How many runs to train at a time.
        until: The value of ``time.monotonic()`` after which no further run begins.
        progress: Called with the number of finished jobs and of all jobs.
        say: Prints a line, such as the result of a run.
    """

    folder: Path
    device: torch.device
    complete: Callable[[dict[str, Any]], dict[str, Any]]
    data_id: str = ""
    jobs: int = 1
    until: float | None = None
    progress: Callable[[int, int], None] = lambda done, total: None
    say: Callable[[str], None] = lambda line: None

    @property
    def records(self) -> Path:
        """The folder of the records."""
        return self.folder / "runs"

    @property
    def work(self) -> Path:
        """The folder of the unfinished runs."""
        return self.folder / "work"


def recipe_of(setting: Setting, job: Job, out: Path | None = None) -> Recipe:
    """Return the recipe of a job, with the data and on the device of the setting."""
    tree = {name: dict(part) if isinstance(part, Mapping) else part for name, part in job.recipe.items()}
    tree = setting.complete(tree)
    cuda = setting.device.type == "cuda"
    if not cuda:
        tree.update(graph=False, compile="none", precision="float32")
    return parse_recipe({**tree, "device": "cuda" if cuda else "cpu", "out": None if out is None else str(out)})


def stem(setting: Setting, job: Job) -> str:
    """Return the name of a job's files; it changes with everything that the figures depend on."""
    plain = recipe_of(setting, job).model_dump(mode="json")
    for free in ("path", "cache", "workers"):
        plain["data"].pop(free, None)
    plain["data"]["id"] = setting.data_id
    text = json.dumps({"recipe": plain, "probe": job.probe}, sort_keys=True)
    return f"{job.name.replace(' ', '_').replace(chr(39), 'p')}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
