"""The form of an entry: a setting, a run that returns a result, and claims that hold or do not."""

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

from leadline.data import load_digits
from leadline.data.images.cifar import load_cifar10, prepare
from leadline.data.images.sets import LAYOUTS
from leadline.errors import LeadlineError, check_choice

Progress = Callable[[int, int], None]  # (done, total)
Item = TypeVar("Item")
Value = TypeVar("Value")
REPORTED = "reported"  # the tolerance of a number of ours that no paper prints
BUDGETS = ("short", "full")  # of entries that train: minutes on one GPU, or what the paper did


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, with our number beside the paper's.

    Args:
        name: What is stated.
        kind: ``"shape"`` for what a paper concludes; the command fails when one is false. ``"digits"`` for a number,
            which is reported either way.
        ours: Our number; None where it does not exist, such as the depth of a collapse that did not happen.
        paper: The paper's number; None where it prints none.
        tolerance: The condition under which the claim holds, in words.
        holds: Whether it holds.

    Raises:
        LeadlineError: If ``kind`` is unknown or a number is not finite.
    """

    name: str
    kind: str
    ours: float | None
    paper: float | None
    tolerance: str
    holds: bool

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("shape", "digits"))
        for number in (self.ours, self.paper):
            if number is not None and not math.isfinite(number):
                raise LeadlineError(f"the claim {self.name!r} has the number {number}; it must be finite or None")


def reported(name: str, ours: float | None) -> Claim:
    """Return a claim for a number of ours that no paper prints."""
    return Claim(name, "digits", ours, None, REPORTED, True)


def within(name: str, ours: float, paper: float, relative: float, kind: str = "digits") -> Claim:
    """Return the claim that ``ours`` equals ``paper`` up to a relative tolerance."""
    return Claim(name, kind, ours, paper, f"{relative:.0%}", abs(ours - paper) <= relative * abs(paper))


def below(name: str, ours: float | None, limit: float, paper: float | None = None, kind: str = "shape") -> Claim:
    """Return the claim that ``ours`` exists and is below ``limit``."""
    return Claim(name, kind, ours, paper, f"below {limit:g}", ours is not None and ours < limit)


def above(name: str, ours: float | None, limit: float, paper: float | None = None, kind: str = "shape") -> Claim:
    """Return the claim that ``ours`` exists and is above ``limit``."""
    return Claim(name, kind, ours, paper, f"above {limit:g}", ours is not None and ours > limit)


def claim_mark(claim: Mapping[str, Any]) -> str:
    """Return "yes" or "no" for a stored claim, or "-" where there is no number to compare with."""
    return "-" if claim["tolerance"] == REPORTED else "yes" if claim["holds"] else "no"


def first_above(curve: Tensor | Sequence[float], level: float) -> int | None:
    """Return the index, from 1, of the first value above ``level``, or None."""
    return next((i for i, value in enumerate(curve, start=1) if float(value) > level), None)


@dataclass
class Result:
    """The result of a run of an entry.

    Args:
        claims: The statements that were checked.
        tables: Rows by table name; each table with rows becomes a CSV file.
        plot: Draws the matplotlib figure; called when the result is stored.
        notes: Sentences for the page, made from the numbers.
        shown: A table as a paper prints it, for the page.
    """

    claims: Sequence[Claim]
    tables: Mapping[str, list[dict[str, Any]]]
    plot: Callable[[], Any]
    notes: list[str] = field(default_factory=list)
    shown: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Context:
    """The input of a run of an entry: its setting, randomness, images, and where to report progress.

    Args:
        setting: The sizes of the entry.
        seed: Seed of every random draw.
        device: Where tensors live.
        data: A local copy of CIFAR-10; None for the hub's.
        embedded: Whether scikit-learn's digits replace CIFAR-10.
        progress: Called with (done, total).
        out: Folder of all results; training runs are stored below it, and entries share them.
        jobs: Number of training runs at a time.
        until: Value of ``time.monotonic()`` after which no further training run starts.
        say: Called with a line for people, such as the end of a run.
        text: A file or folder of text to train on.
        data_id: A hash of the images or the text.
    """

    setting: Mapping[str, Any]
    seed: int
    device: torch.device
    data: Path | None = None
    embedded: bool = False
    progress: Progress = lambda done, total: None
    out: Path = Path("results")
    jobs: int = 1
    until: float | None = None
    say: Callable[[str], None] = lambda line: None
    text: Path | None = None
    data_id: str = ""

    def generator(self, stream: int = 0) -> torch.Generator:
        """Return a random generator on the device; each ``stream`` of a seed is its own sequence."""
        return torch.Generator(self.device).manual_seed((self.seed << 16) + stream)

    def images(self, count: int, size: int) -> Tensor:
        """Return the first test images of CIFAR-10, or of scikit-learn's digits, (count, 3, size, size)."""
        if self.embedded:
            images = load_digits(self.seed)[1].images[:count]
        else:
            images = load_cifar10("test", self.data, count).images
        return prepare(images, size).to(self.device)

    def map(self, work: Callable[[Item], Value], items: Sequence[Item]) -> list[Value]:
        """Apply ``work`` to every item, without gradients, and report progress after each.

        On a CPU, as many threads as torch has take one item at a time, and each operation runs on one thread: these
        matrices are too small to gain from more. The results do not depend on the number of threads, as long as
        ``work`` draws from a generator of its own or inside ``attention_nets.seeded``.

        Args:
            work: The function to apply.
            items: Its arguments.

        Returns:
            The values in the order of ``items``.
        """
        threads = torch.get_num_threads()
        workers = 1 if self.device.type != "cpu" else min(threads, len(items))

        def without_gradients(item: Item) -> Value:
            with torch.no_grad():  # holds for one thread only
                return work(item)

        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(max(workers, 1))
        try:
            pending = [pool.submit(without_gradients, item) for item in items]
            for done, future in enumerate(as_completed(pending), start=1):
                future.result()  # an error stops the rest
                self.progress(done, len(items))
            return [future.result() for future in pending]
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Entry:
    """A figure or a table of a paper, or one of ours.

    Args:
        id: The path of its file below ``leadline/papers``: ``hop-fig4`` is ``hop/fig4.py``.
        title: What it shows.
        run: Computes the result.
        setting: Every size, so that a test can run the same code with smaller ones.
        group: ``"init"`` (nothing is trained), ``"trained"`` (on images) or ``"language"`` (on text).
        images: Whether it needs images.
        text: Whether it needs text to train on.
        budgets: What each of ``BUDGETS`` changes in the setting; empty if nothing is trained.
        image_set: Which images it needs, "cifar10" or "cifar100".
    """

    id: str
    title: str
    run: Callable[[Context], Result]
    setting: Mapping[str, Any]
    group: str = "init"
    images: bool = False
    text: bool = False
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    image_set: str = "cifar10"

    @property
    def needs(self) -> str | None:
        """The images or text that it cannot run without, in words; None if nothing."""
        return "text" if self.text else LAYOUTS[self.image_set].title if self.images else None

    def with_budget(self, budget: str) -> Entry:
        """Return this entry with the sizes of a budget; an entry without budgets stays as it is."""
        check_choice("budget", budget, BUDGETS)
        if not self.budgets:
            return self
        return replace(self, setting={**self.setting, **self.budgets[budget], "budget": budget}, budgets={})

    def full_setting(self, seed: int, device: torch.device, embedded: bool, data_id: str = "") -> dict[str, Any]:
        """Return the setting as summary.json stores it: everything that decides the numbers."""
        full: dict[str, Any] = {**self.setting, "seed": seed, "device": device.type}
        if self.images:
            full["images"] = "scikit-learn digits" if embedded else f"{LAYOUTS[self.image_set].title} {data_id}"
        if self.text:
            full["text"] = data_id
        return json.loads(json.dumps(full))


def claims_as_dicts(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Return claims as summary.json stores them."""
    return [asdict(claim) for claim in claims]
