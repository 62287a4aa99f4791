"""The run of ``leadline bench attention``: all methods at all shapes, one table."""

from __future__ import annotations

import gc
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leadline.bench import chains
from leadline.bench.measure import errors, speed
from leadline.bench.models import MODELS, bench_model
from leadline.bench.plot import draw
from leadline.errors import LeadlineError, check_choice
from leadline.files import read_json, whole
from leadline.machine import choose_device, processor, versions

SUITES = ("carried", "biased", "models")
METHODS = ("flash", "leadline", "eager", "compiled", "sdpa_bias", "flex")
FIELDS = {"carried": "rows", "biased": "biased_rows", "models": "model_rows"}
STDS = (1.0, 4.0, 16.0)
REPEATS = 20
Row = dict[str, Any]


def bench_attention(
    suites: tuple[str, ...] = SUITES,
    shapes: tuple[str, ...] = (),
    methods: tuple[str, ...] = METHODS,
    device: str | None = None,
    command: str = "leadline bench attention",
    out: Path | None = None,
    on_row: Callable[[str, Row, int, int], None] = lambda suite, row, done, total: None,
) -> dict[str, Any]:
    """Measure attention operators and whole models, and return one table.

    Suites that are not asked for stay as they are in ``out``, if that was measured on the same hardware and versions.
    A method that cannot run a shape has a row with the reason under "failed". ``out`` is written after each row, so
    that an interrupted run keeps its rows; a picture beside it is drawn at the end.

    Args:
        suites: "carried", "biased" and "models".
        shapes: Names of ``chains.GPU_SHAPES`` or ``chains.CPU_SHAPES``; empty: all.
        methods: Methods to compare with flash attention.
        device: "cuda" or "cpu"; None: a GPU if there is one.
        command: The command that the result names.
        out: JSON file to write.
        on_row: Called as on_row(suite, row, rows so far, rows in all).

    Returns:
        ``{hardware, versions, command, commands, rows, biased_rows, model_rows}``; "commands" has the
        command of each suite.
    """
    check_choice("device", device or "cpu", ("cuda", "cpu"))
    device = choose_device(device).type
    known = chains.GPU_SHAPES if device == "cuda" else chains.CPU_SHAPES
    for what, given, allowed in (("suite", suites, SUITES), ("shape", shapes, known), ("method", methods, METHODS)):
        for name in given:
            check_choice(what, name, tuple(allowed))
    names = {suite: tuple(shapes or known) for suite in suites if suite != "models"}
    if "biased" in names:  # a dense bias at 16384 tokens is 6 GiB a layer: nobody's case
        names["biased"] = tuple(name for name in names["biased"] if name != "long_16384")
    models = tuple(MODELS) if "models" in suites and device == "cuda" else ()
    total = sum(len(methods_of) for methods_of in names.values()) * len({"flash", *methods}) + 2 * len(models)
    rows: dict[str, list[Row]] = {"carried": [], "biased": [], "models": []}
    results: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "versions": versions("triton"),
    }
    before = _read(out, results)
    commands = before.get("commands", {}) | dict.fromkeys(suites, command)
    results |= {"command": commands.get("carried", command), "commands": commands}
    for suite, name in FIELDS.items():
        results[name] = rows[suite] if suite in suites else before.get(name, [])

    def add(suite: str, row: Row) -> None:
        rows[suite].append(row)
        if out is not None:
            _write(results, out)
        on_row(suite, row, sum(map(len, rows.values())), total)
        _clear()

    for suite, wanted in names.items():
        for name in wanted:
            _shape_rows(suite, name, known[name], methods, device, add)
    for name in models:
        standard = None
        for attention in ("standard", "hopfield"):
            row = bench_model(name, attention, REPEATS)
            standard = standard or row["step_ms"]
            add("models", row | {"ratio_to_standard": row["step_ms"] / standard})
    if out is not None and importlib.util.find_spec("matplotlib") and (rows["carried"] or rows["biased"]):
        draw(results, out.with_suffix(".png"))
    return results


def _shape_rows(
    suite: str, name: str, shape: chains.Shape, methods: tuple[str, ...], device: str, add: Callable[[str, Row], None]
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    make = chains.hopfield_methods if suite == "carried" else chains.biased_methods
    all_methods = make(shape.backend)
    flash = {std: errors(all_methods["flash"], shape, device, dtype, std, "plain") for std in STDS}
    layers = chains.draw(shape, device, dtype, bias=suite == "biased")
    base: Row | None = None
    for method in ("flash", *(m for m in METHODS if m in methods and m != "flash")):
        run = all_methods[method]
        row: Row = {"shape": name, "method": method}
        try:
            alone = method in ("flash", "leadline") and shape.backend != "linear"  # it copies from the CPU
            row |= speed(run, layers, shape.causal, REPEATS, graph=alone)
            base = base or row
            row["ratio_to_flash"] = row["total_ms"] / base["total_ms"]
            if "eager_ms" in row:
                row["eager_ratio_to_flash"] = row["eager_ms"] / base["eager_ms"]
            if method in ("flash", "leadline"):
                figures = flash if method == "flash" else {s: errors(run, shape, device, dtype, s, suite) for s in STDS}
            else:  # one look at the others is enough
                figures = {1.0: errors(run, shape, device, dtype, 1.0, suite)}
            row |= _error_fields(figures, flash)
        except Exception as error:  # out of memory, a kernel that this machine has not: the other rows go on
            row |= dict.fromkeys(("forward_ms", "total_ms", "ratio_to_flash", "extra_gib", "error", "grad_error"))
            row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        add(suite, row)


def _error_fields(figures: dict[float, tuple[float, float]], flash: dict[float, tuple[float, float]]) -> Row:
    names = ("error", "grad_error", "flash_error", "flash_grad_error")
    by_std = {std: dict(zip(names, (*figures[std], *flash[std]), strict=True)) for std in figures}
    return by_std[1.0] | {"by_score_std": {f"{std:g}": values for std, values in by_std.items()}}


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _read(out: Path | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``out``, if it is a result of the same hardware and versions."""
    try:
        before = read_json(out) if out is not None else {}
        return before if all(before[name] == now[name] for name in now) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(results: dict[str, Any], out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole(out) as new:
            new.write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise LeadlineError(f"{out} cannot be written ({error.strerror}); give --out a file to write to") from error
