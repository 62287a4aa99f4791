"""The house keeps its plan: imports point up the list of rooms, light rooms load without torch, the map is complete."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import leadline

HOUSE = Path(leadline.__file__).parent
MAP = HOUSE.parent / "docs" / "architecture.md"
# A room imports only from the rooms before it in this list, and from itself.
ROOMS = [
    *("errors", "lazy", "machine", "files"),
    *("data", "ops", "metrics", "nn", "models", "theory", "anatomy", "curing", "loading"),
    *("report", "probing", "training", "league", "papers", "bench", "demo", "cli"),
]
ENTRY_POINTS = ("__init__.py", "__main__.py")  # of the package: they load lazily what a user asks for
LIGHT = {"report": ("torch", "leadline.machine"), "training.recipe": ("torch",)}


class Import(NamedTuple):
    """One import of a module of Leadline: who imports, at which line, what."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports leadline.{self.module}"


def modules() -> list[Path]:
    """Every module of the package, relative to it."""
    return sorted(path.relative_to(HOUSE) for path in HOUSE.rglob("*.py"))


def room_of(module: str) -> str:
    """The first part of a module's name below the package."""
    return module.split(".")[0]


def imports(source: str, file: Path) -> Iterator[Import]:
    """All imports of Leadline in ``source``: inside functions, as strings and as attributes of the package too."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        for name in _names(node, file):
            if name.startswith("leadline.") and not name.startswith("leadline.__"):
                yield Import(file, getattr(node, "lineno", 0), name.removeprefix("leadline."))


def _names(node: ast.AST, file: Path) -> list[str]:
    """Dotted names that a node imports; for ``from leadline.nn import x`` that is leadline.nn.x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = ("leadline", *file.parts[:-1])
        start = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        base = ".".join(part for part in (start, node.module) if part)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "leadline":
        name = leadline._FUNCTIONS.get(node.attr, f"leadline.{node.attr}")
        return [name]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy" and isinstance(node.args[-1], ast.Dict):
        return [value.value for value in node.args[-1].values if isinstance(value, ast.Constant)]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "need", "__import__")):
        return [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []


def downward(each: Import) -> bool:
    """Whether an import points to a room after its own, or to none that is listed."""
    own, other = room_of(each.file.with_suffix("").parts[0]), room_of(each.module)
    return other not in ROOMS or ROOMS.index(other) > ROOMS.index(own)


def test_every_module_has_a_room():
    unlisted = {path.with_suffix("").parts[0] for path in modules() if path.name not in ENTRY_POINTS} - set(ROOMS)
    assert not unlisted


def test_imports_point_up_the_list_of_rooms():
    found = [
        each
        for path in modules()
        if str(path) not in ENTRY_POINTS
        for each in imports((HOUSE / path).read_text(), path)
        if downward(each)
    ]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "line",
    [
        "import leadline.training",
        "from leadline import training",
        "from leadline.training.loop import train",
        "from ..training import loop",
        "def f():\n    from leadline.training import loop",
        "importlib.import_module('leadline.training')",
        "need('leadline.training', 'train')",
        "lazy(__name__, {'train': 'leadline.training.loop'})",
        "leadline.probe(model, x)",
        "if x:\n    from leadline.unlisted import y",
    ],
)
def test_an_import_that_points_down_is_seen(line):
    assert any(downward(each) for each in imports(line, Path("nn/block.py")))


@pytest.mark.parametrize(
    "line",
    [
        "if TYPE_CHECKING:\n    from leadline.training import loop",
        "from leadline.ops import hopfield",
        "from leadline.nn.layers import MLP",
        "from leadline import __version__",
        "import torch",
    ],
)
def test_other_imports_are_not(line):
    assert not any(downward(each) for each in imports(line, Path("nn/block.py")))


@pytest.mark.parametrize("room", LIGHT)
def test_light_rooms_load_without_torch(room):
    """In a process of its own, with every module of the room loaded."""
    names = [f"leadline.{room}"] + [
        ".".join(("leadline", *path.with_suffix("").parts)).removesuffix(".__init__")
        for path in modules()
        if ".".join(path.parts).startswith(f"{room}.")
    ]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(LIGHT[room]) & set(loaded)
    assert set(names) <= set(loaded)


def row_of(path: Path) -> str:
    """The row of a module in the map: its path and the first line of its docstring."""
    first = (ast.get_docstring(ast.parse((HOUSE / path).read_text())) or "").split("\n")[0]
    return f"| `{path}` | {first.replace('|lambda_2|', 'the modulus of lambda_2')} |"


def test_the_map_names_every_module():
    rows = {row_of(path) for path in modules() if path.name != "__init__.py"}
    shown = {line for line in MAP.read_text().splitlines() if re.match(r"\| `[\w/]+\.py` \|", line)}
    assert not rows - shown, "these rows are missing in docs/architecture.md"
    assert not shown - rows, "these rows of docs/architecture.md name no module, or not as its docstring does"


def test_names_that_load_lazily_exist():
    for name, module in leadline._FUNCTIONS.items():
        assert getattr(importlib.import_module(module), name) is getattr(leadline, name)
