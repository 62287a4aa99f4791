"""The probe and the cures on tiny random models of every type there is, compared with figures computed by hand.

    python benchmarks/zoo.py [--library transformers|timm|torch] [--only NAME ...] [--jobs N] [--out FILE.json]

Each model runs in a process of a pool with a time limit, so that one that hangs or crashes costs one row. Writes the
rows with versions and hardware as JSON, and a page beside it with the same name and the ending .md. The command ends
with 1 if a probe crashed or was wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a bare checkout

LIBRARIES = ("transformers", "timm", "torch")
LIMIT = 300.0  # seconds for one model, on a machine that may be busy
Task = tuple[str, str]  # library, type


def models_of(library: str) -> Any:
    """The module that lists and builds the types of a library."""
    import importlib

    return importlib.import_module(f"benchmarks.zoo_models.{library}_models")


def work(connection: Connection) -> None:
    """One process of the pool: takes tasks until None comes, answers each with (kind, answer)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from benchmarks.zoo_models.comparison import try_case

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (task := connection.recv()) is not None:
        library, name = task
        try:
            case = models_of(library).case(name)
            case.make()
        except Exception as error:
            connection.send(("not built", f"{type(error).__name__}: {error}"))
            continue
        try:
            connection.send(("row", try_case(case).as_dict()))
        except Exception as error:  # the truth could not be computed
            connection.send(("not built", f"{type(error).__name__}: {error}"))


class Worker:
    """A process of the pool, the task it has and when that began."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.task: Task | None = None
        self.start = 0.0

    def give(self, task: Task) -> None:
        """Send it a task."""
        self.task, self.start = task, time.monotonic()
        self.connection.send(task)

    def end(self) -> None:
        """Stop the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(tasks: list[Task], jobs: int, limit: float = LIMIT) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Rows of the models, in the order of the tasks, and the models that could not be built."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    waiting, answers = list(reversed(tasks)), {}
    workers = [Worker() for _ in range(min(jobs, len(tasks)))]
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("starting", total=len(tasks))
        while waiting or any(worker.task for worker in workers):
            for worker in workers:
                if worker.task is None and waiting:
                    worker.give(waiting.pop())
                    progress.update(bar, description=" ".join(worker.task or ()))
            busy = [worker for worker in workers if worker.task]
            ready = wait([worker.connection for worker in busy], timeout=1.0)
            for worker in busy:
                answer = None
                if worker.connection in ready:
                    try:
                        answer = worker.connection.recv()
                    except EOFError:
                        answer = ("died", "the process died")
                elif time.monotonic() - worker.start > limit:
                    answer = ("died", f"no answer within {limit:g} s")
                if answer is None:
                    continue
                answers[worker.task] = answer
                worker.task = None
                if answer[0] == "died":
                    worker.end()
                    workers[workers.index(worker)] = Worker()
                progress.advance(bar)
    for worker in workers:
        worker.end()
    return _sorted(tasks, answers)


def _sorted(tasks: list[Task], answers: dict[Any, Any]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    from benchmarks.zoo_models.comparison import Row

    rows, not_built = [], []
    for library, name in tasks:
        kind, answer = answers[library, name]
        if kind == "row":
            rows.append(answer)
        elif kind == "died":
            rows.append(Row(library, name, probe="crash", reason=answer).as_dict())
        else:
            not_built.append({"library": library, "type": name, "reason": " ".join(answer.split())})
    return rows, not_built


def _text(result: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    rest = json.dumps({**result, "rows": []}, indent=1)
    return rest.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="all unless given; may be repeated")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="types, or patterns such as 'gpt*'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a .json file; the page goes beside it")
    given = parser.parse_args()
    tasks = [(library, name) for library in given.library or LIBRARIES for name in models_of(library).types()]
    if given.only:
        tasks = [task for task in tasks if any(fnmatch.fnmatch(task[1], pattern) for pattern in given.only)]
    if not tasks:
        parser.error(f"no type is named {' '.join(given.only)}")
    start = time.perf_counter()
    rows, not_built = run(tasks, given.jobs)
    from benchmarks.zoo_models.comparison import ENTROPY, SIMILARITY
    from benchmarks.zoo_models.page import page
    from leadline.machine import processor, versions

    result = {
        "command": " ".join(["python", "benchmarks/zoo.py", *(word for word in sys.argv[1:])]),
        "environment": {"versions": versions("transformers", "timm"), "hardware": processor()},
        "seconds": round(time.perf_counter() - start, 1),
        "tolerances": {"similarity": SIMILARITY, "entropy": ENTROPY},
        "rows": rows,
        "not_built": not_built,
    }
    for library in dict.fromkeys(row["library"] for row in rows):
        counts = Counter(row["probe"] for row in rows if row["library"] == library)
        print(f"{library}: {', '.join(f'{count} {answer}' for answer, count in counts.most_common())}")
    for row in rows:
        if row["probe"] in ("wrong", "crash") or given.only:
            print(f"  {row['library']} {row['type']}: {row['probe']} {row['reason']}")
    for item in not_built:
        print(f"  {item['library']} {item['type']}: not built: {item['reason']}")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(_text(result), encoding="utf-8")
        given.out.with_suffix(".md").write_text(page(result), encoding="utf-8")
    return 1 if any(row["probe"] in ("wrong", "crash") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
