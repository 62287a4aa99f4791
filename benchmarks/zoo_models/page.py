"""The readable page of a run of the zoo."""

from __future__ import annotations

from collections import Counter
from typing import Any

_ANSWERS = ("ok", "refused", "wrong", "crash")
_CURES = ("cure_alpha", "cure_alpha_prime", "cure_tau")


def page(result: dict[str, Any]) -> str:
    """Counts first, then a table per library."""
    rows, about = result["rows"], result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        "# The zoo: the probe and the cures on tiny random models",
        "",
        f"`{result['command']}`, {versions}, {about['hardware']}.",
        "",
        "Every model is built from its configuration with random weights and a handful of blocks. The truth comes from",
        "forward hooks by hand: token similarity and cosine at the input of the first block and at the output of",
        f"each, per sample, then the mean. A figure that is off by more than {result['tolerances']['similarity']:g}"
        f" ({result['tolerances']['entropy']:g} nats for",
        "the mean attention entropy) is wrong, and so is a report that leaves a tower or a stage out without a word. A",
        "cure is wrong if outputs do not change, or if its removal does not restore them bit for bit.",
        "",
        "| library | types | probe ok | refused | wrong | crash | alpha ok | alpha' ok | tau ok | any cure wrong |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for library in dict.fromkeys(row["library"] for row in rows):
        mine = [row for row in rows if row["library"] == library]
        probe = Counter(row["probe"] for row in mine)
        cures = [sum(row[cure] == "ok" for row in mine) for cure in _CURES]
        wrong = sum(any(row[cure] == "wrong" for cure in _CURES) for row in mine)
        cells = [library, len(mine), *(probe[answer] for answer in _ANSWERS), *cures, wrong]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if result["not_built"]:
        lines += ["", "Not built, and not counted:", ""]
        lines += [f"- {item['library']} {item['type']}: {item['reason']}" for item in result["not_built"]]
    for library in dict.fromkeys(row["library"] for row in rows):
        lines += ["", f"## {library}", ""]
        lines += ["| type | probe | blocks | attention seen | largest error | alpha | alpha' | tau | reason |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for row in rows:
            if row["library"] == library:
                lines.append(_line(row))
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    blocks = str(row["blocks"]) if row["measured"] in (0, row["blocks"]) else f"{row['measured']} of {row['blocks']}"
    error = "" if row["max_error"] is None else f"{row['max_error']:.1e}"
    reason = row["reason"].replace("|", "/").replace("\n", " ")
    cells = [row["type"], row["probe"], blocks, row["attention_seen"], error, *(row[cure] for cure in _CURES), reason]
    return f"| {' | '.join(map(str, cells))} |"
