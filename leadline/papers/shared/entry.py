"""What an entry is: a setting, a run that fills a result, and claims that hold or do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from leadline.data.images.cifar import load_cifar10, prepare
from leadline.errors import LeadlineError, check_choice
from leadline.training.runs import Setting

Progress = Callable[[int, int], None]  # (done, total)
Item = TypeVar("Item")
Found = TypeVar("Found")
REPORTED = "reported"  # in place of a tolerance: a number of ours that no paper prints
BUDGETS = ("short", "full")  # of entries that train: minutes on one GPU, or what the paper did


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and ours beside it.

    kind  "shape": what the paper concludes; a false one makes the command fail.
          "digits": a printed number, reported either way.
    """

    name: str
    kind: str
    ours: float | None  # None: there is no such number, such as the depth of a collapse that did not happen
    paper: float | None  # None: the paper prints no number
    tolerance: str
    holds: bool

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("shape", "digits"))
        for number in (self.ours, self.paper):
            if number is not None and not math.isfinite(number):
                raise LeadlineError(f"the claim {self.name!r} has the number {number}; it must be finite or None")


def reported(name: str, ours: float | None) -> Claim:
    """A number of ours that no paper prints."""
    return Claim(name, "digits", ours, None, REPORTED, True)


def verdict(claim: Mapping[str, Any]) -> str:
    """Of a stored claim, for a table: whether it holds; nothing where there is nothing to hold to."""
    return "-" if claim["tolerance"] == REPORTED else "yes" if claim["holds"] else "no"


def within(name: str, ours: float, paper: float, relative: float, kind: str = "digits") -> Claim:
    """ours = paper up to a relative tolerance."""
    return Claim(name, kind, ours, paper, f"{relative:.0%}", abs(ours - paper) <= relative * abs(paper))


def below(name: str, ours: float | None, limit: float, paper: float | None = None, kind: str = "shape") -> Claim:
    return Claim(name, kind, ours, paper, f"below {limit:g}", ours is not None and ours < limit)


def above(name: str, ours: float | None, limit: float, paper: float | None = None, kind: str = "shape") -> Claim:
    return Claim(name, kind, ours, paper, f"above {limit:g}", ours is not None and ours > limit)


def first_above(curve: Tensor | list[float], level: float) -> int | None:
    """The index, from 1, of the first value above ``level``."""
    return next((i for i, value in enumerate(curve, start=1) if float(value) > level), None)


@dataclass
class Result:
    """What a run hands back; ``plot`` draws it, as a matplotlib figure, when it is stored."""

    claims: list[Claim]
    tables: dict[str, list[dict[str, Any]]]  # name: rows, a CSV file each where there are any
    plot: Callable[[], Any]
    notes: list[str] = field(default_factory=list)  # sentences that follow from the numbers, for the page
    shown: list[dict[str, str]] = field(default_factory=list)  # a table as a paper prints it, for the page

    def __post_init__(self) -> None:
        self.claims = list(self.claims)


@dataclass
class Context:
    """What a run is given: its setting, and how to get randomness, images and a line of progress."""

    setting: Mapping[str, Any]
    seed: int
    device: torch.device
    data: Path | None = None
    embedded: bool = False
    progress: Progress = lambda done, total: None
    out: Path = Path("results")  # trained runs are kept below it, and entries share them
    jobs: int = 1  # training runs at a time
    until: float | None = None  # time.monotonic() after which no further run is begun
    say: Callable[[str], None] = lambda line: None  # a line for people, such as a run that has ended
    text: Path | None = None  # a file or folder of text to train on
    data_id: str = ""  # changes with the images or the text

    def generator(self, stream: int = 0) -> torch.Generator:
        """Random numbers on the device; each ``stream`` of a seed is its own sequence."""
        return torch.Generator(self.device).manual_seed((self.seed << 16) + stream)

    def images(self, count: int, size: int) -> Tensor:
        """The first ``count`` test images of CIFAR-10, or of scikit-learn's digits, (count, 3, size, size)."""
        if self.embedded:
            from leadline.data import load_digits

            found = load_digits(self.seed)[1].images[:count]
        else:
            found = load_cifar10("test", self.data, count).images
        return prepare(found, size).to(self.device)

    def training(self) -> Setting:
        """Return where and how the training runs of this entry are made."""
        return Setting(
            self.out, self.device, self.complete, self.data_id, self.jobs, self.until, self.progress, self.say
        )

    def complete(self, recipe: dict[str, Any]) -> dict[str, Any]:
        """Put the images or the text at hand into the sections of a recipe."""
        data = recipe["data"]
        if data["name"] == "text":
            data["path"] = str(self.text)
        elif self.embedded:
            # RandAugment needs colour, and a mirrored digit is none
            recipe["augment"] = {**recipe.get("augment", {}), "rand_augment": None, "flip": False}
            recipe["data"] = {"name": "digits", **({"valid": data["valid"]} if "valid" in data else {})}
            model = recipe["model"]
            model["patch_size"] = max(1, model.get("patch_size", 16) * 8 // data.get("image_size", 32))
        elif self.data is not None:
            data["path"] = str(self.data)
        return recipe

    def map(self, work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """``work`` of every item, in order, and a step of progress for each.

        On a CPU a thread takes an item at a time, as many as torch has threads, and no operation is split: matrices
        this small gain little from that and lose much when the cores are shared. The numbers do not depend on how many
        threads there are, as long as ``work`` draws from a generator of its own or inside ``hop_nets.seeded``.
        """
        threads = torch.get_num_threads()
        workers = 1 if self.device.type != "cpu" else min(threads, len(items))

        def quietly(item: Item) -> Found:
            with torch.no_grad():  # holds for one thread only
                return work(item)

        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(max(workers, 1))
        try:
            pending = [pool.submit(quietly, item) for item in items]
            for done, future in enumerate(as_completed(pending), start=1):
                future.result()  # an error stops the rest
                self.progress(done, len(items))
            return [future.result() for future in pending]
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Entry:
    """A figure or a table. ``setting`` holds every size, so that a test may run the same code with smaller ones."""

    id: str
    title: str
    run: Callable[[Context], Result]
    setting: Mapping[str, Any]
    group: str = "init"
    images: bool = False  # whether it needs CIFAR-10
    text: bool = False  # whether it needs text to train on
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what "short" and "full" change in it

    def with_budget(self, budget: str) -> Entry:
        """This entry with the sizes of a budget; one that trains nothing has but one."""
        check_choice("budget", budget, BUDGETS)
        if not self.budgets:
            return self
        return replace(self, setting={**self.setting, **self.budgets[budget], "budget": budget}, budgets={})

    def full_setting(self, seed: int, device: torch.device, embedded: bool, data_id: str = "") -> dict[str, Any]:
        """The setting as summary.json holds it: what decides the numbers."""
        full: dict[str, Any] = {**self.setting, "seed": seed, "device": device.type}
        if self.images:
            full["images"] = "scikit-learn digits" if embedded else f"CIFAR-10 {data_id}"
        if self.text:
            full["text"] = data_id
        return json.loads(json.dumps(full))


def claims_as_dicts(claims: list[Claim]) -> list[dict[str, Any]]:
    return [asdict(claim) for claim in claims]
