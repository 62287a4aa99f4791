"""The probe and the cures of leadline, tried on one case and compared with the truth."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .case import SEED, Case, Inputs, call, tensors
from .truth import Point, Stream, TowerTruth, measure

SIMILARITY, ENTROPY = 1e-5, 1e-4  # the largest differences that count as the same figure
CURES = {
    "cure_alpha": {"alpha": 0.1},
    "cure_alpha_prime": {"alpha_prime": 0.1},
    "cure_tau": {"de_escalation": 0.1},
}


@dataclass
class Row:
    """The result for one type."""

    library: str
    type: str
    probe: str = ""  # ok | refused | crash | wrong
    blocks: int = 0  # calls of blocks the truth counts
    measured: int = 0  # of them in the report
    attention_seen: int = 0
    attention_known: int = 0  # blocks whose own attention weights the truth could read
    max_error: float | None = None  # of similarity and cosine
    entropy_error: float | None = None
    cure_alpha: str = ""  # ok | refused | wrong
    cure_alpha_prime: str = ""
    cure_tau: str = ""
    reason: str = ""
    cure_reason: str = ""
    towers: dict[str, str] | None = None  # list of blocks -> layout of its stream
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def try_case(case: Case) -> Row:
    """Build a model, measure it by hand and by the probe, and try the cures on it."""
    start = time.perf_counter()
    row = Row(case.library, case.type)
    model, inputs = case.make()
    truths = measure(case, model, inputs)
    row.towers = {truth.tower.name: truth.tower.layout for truth in truths}
    row.blocks = sum(len(truth.points) for truth in _one_reading(truths))
    row.attention_known = sum(point.entropy is not None for truth in truths for point in truth.points)
    _try_probe(row, model, inputs, truths)
    _try_cures(row, model, inputs)
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def _one_reading(truths: list[TowerTruth]) -> list[TowerTruth]:
    """The first tower of each group."""
    return list({truth.tower.group or id(truth): truth for truth in reversed(truths)}.values())


# the probe


def parts_of(report: Any) -> list[Any]:
    """The reports of single towers or stages: ``report.parts``, a mapping or a list, or else the report itself."""
    parts = getattr(report, "parts", None)
    if not parts:
        return [report]
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


def says(report: Any, tower: str) -> bool:
    """Return whether a report names a tower that it does not measure, in ``report.measured`` or its verdict."""
    measured = getattr(report, "measured", None)
    return tower in f"{measured} {getattr(report.verdict, 'text', '')}"


def figures_of(report: Any) -> Iterator[tuple[str, float, float, float | None]]:
    """(name, similarity, cosine, mean entropy) of each layer of one part."""
    for layer in report.layers:
        heads = [head for head in layer.entropy or () if math.isfinite(head)]
        yield layer.name, layer.similarity, layer.cosine, sum(heads) / len(heads) if heads else None


def _try_probe(row: Row, model: nn.Module, inputs: Inputs, truths: list[TowerTruth]) -> None:
    import leadline as ll

    torch.manual_seed(SEED)
    try:
        report = ll.probe(model, inputs, trials=False)
    except ll.LeadlineError as error:
        row.probe, row.reason = "refused", str(error)
        return
    except Exception as error:
        row.probe, row.reason = "crash", _line(error)
        return
    faults = compare(row, report, truths)
    row.probe, row.reason = ("wrong", "; ".join(faults[:3])) if faults else ("ok", "")


def compare(row: Row, report: Any, truths: list[TowerTruth]) -> list[str]:
    """Return what is wrong with a report, in words; the row gets the counts and the errors."""
    points: dict[str, list[tuple[TowerTruth, Point]]] = {}
    for truth in truths:
        for point in truth.points:
            for name in (point.name, *point.aliases):
                points.setdefault(name, []).append((truth, point))
    faults: list[str] = []
    measured: set[tuple[str, str]] = set()
    for part in parts_of(report):
        entering, *layers = figures_of(part)
        first: Point | None = None
        for name, similarity, cosine, entropy in layers:
            if name not in points:
                faults.append(f"{name} is measured and is no block")
                continue
            readings = points[name]  # several where parallel streams pass the same block
            truth, point = min(readings, key=lambda reading: _error(similarity, reading[1].leaving.similarity))
            if first is None:
                first = point
            if (truth.tower.blocks + str(truth.tower.stream), name) not in measured:
                measured.add((truth.tower.blocks + str(truth.tower.stream), name))
                row.measured += 1
            faults += _differences(row, name, similarity, cosine, point.leaving)
            if entropy is not None:
                row.attention_seen += 1
                if point.entropy is not None:
                    error = abs(entropy - point.entropy)
                    row.entropy_error = max(row.entropy_error or 0.0, error)
                    if not error <= ENTROPY:
                        faults.append(f"entropy of {name} is {entropy:.4g}, truth {point.entropy:.4g}")
        if first is not None and first.entering.tokens.shape == first.leaving.tokens.shape:
            faults += _differences(row, f"the input of {first.name}", *entering[1:3], first.entering)
    return faults + _left_out(report, truths, measured)


def _left_out(report: Any, truths: list[TowerTruth], measured: set[tuple[str, str]]) -> list[str]:
    """Towers and stages that the report neither measures nor names; of those in one group one is enough."""
    faults: dict[str, list[str]] = {}
    for truth in truths:
        tower = truth.tower
        names = [{point.name, *point.aliases} for point in truth.points]
        there = {name for key, name in measured if key == tower.blocks + str(tower.stream)}
        missing = sum(not (name & there) for name in names)
        fault = ""
        if missing and tower.required and not says(report, tower.name):
            share = "" if missing == len(names) else f" in {missing} of {len(names)} blocks"
            fault = f"{tower.name} is not measured{share}, and the report does not say so"
        faults.setdefault(tower.group or f"{tower.blocks} {tower.stream}", []).append(fault)
    return [group[0] for group in faults.values() if all(group)]


def _error(given: float, true: float) -> float:
    return abs(given - true) if math.isfinite(given) and math.isfinite(true) else math.inf


def _differences(row: Row, name: str, similarity: float, cosine: float, stream: Stream) -> list[str]:
    """Return where the figures of one layer are not those of the truth; where that is none, NaN is due."""
    faults = []
    for what, given, true in (("similarity", similarity, stream.similarity), ("cosine", cosine, stream.cosine)):
        given = math.nan if given is None else given
        if math.isnan(true) and math.isnan(given):
            continue
        error = _error(given, true)
        if math.isfinite(error):
            row.max_error = max(row.max_error or 0.0, error)
        if not error <= SIMILARITY:
            faults.append(f"{what} of {name} is {given:.4g}, truth {true:.4g}")
    return faults


# the cures


def _try_cures(row: Row, model: nn.Module, inputs: Inputs) -> None:
    reasons: dict[str, list[str]] = {}
    for column, strength in CURES.items():
        answer, reason = _try_cure(copy.deepcopy(model), inputs, strength)
        setattr(row, column, answer)
        if reason:
            reasons.setdefault(reason, []).append(column.removeprefix("cure_"))
    row.cure_reason = "; ".join(f"{', '.join(columns)}: {reason}" for reason, columns in reasons.items())


def _try_cure(model: nn.Module, inputs: Inputs, strength: dict[str, float]) -> tuple[str, str]:
    """ok, refused or wrong, and why. A cure must change the outputs, and its removal restore them bit for bit."""
    import leadline as ll

    before, weights = _outputs(model, inputs), copy.deepcopy(model.state_dict())
    try:
        ll.cure(model, **strength)
    except ll.LeadlineError as error:
        if not _same(before, _outputs(model, inputs)) or not _same_weights(weights, model):
            return "wrong", f"a refused cure changed the model: {error}"
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"cure fails: {_line(error)}"
    try:
        cured = _outputs(model, inputs)
        ll.uncure(model)
        after = _outputs(model, inputs)
    except ll.LeadlineError as error:
        return "refused", f"the cured model refuses the batch: {error}"
    except Exception as error:
        return "wrong", f"the cured model fails: {_line(error)}"
    if _same(before, cured):
        return "wrong", "the outputs are unchanged"
    if not all(torch.isfinite(x).all() for x in cured if x.is_floating_point()):
        return "wrong", "the outputs of the cured model are not finite"
    if not _same(before, after) or not _same_weights(weights, model):
        return "wrong", "uncure does not restore the model"
    return "ok", ""


def _outputs(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x.clone() for x in tensors(call(model, inputs))]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _same_weights(weights: dict[str, torch.Tensor], model: nn.Module) -> bool:
    now = model.state_dict()
    return weights.keys() == now.keys() and all(_equal(weights[name], now[name]) for name in weights)


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)))


def _line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return re.sub(r"0x[0-9a-f]+", "0x...", f"{type(error).__name__}: {text}"[:300])
