"""Reads YAML as plain values: text, numbers, lists and mappings of a size that a recipe can have."""

from __future__ import annotations

import re
from typing import Any

import yaml

from leadline.errors import LeadlineError, excerpt

_LARGEST_TEXT = 1 << 20  # characters
_MOST_NODES = 5_000  # with every alias counted as what it stands for
_DEEPEST = 20
_LONGEST_NUMBER = 100  # digits
_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:merge")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|nan))$"
)
_OCTAL = re.compile(r"[-+]?0[0-9_]+$")


class _Loader(yaml.SafeLoader):
    """A loader without dates, octal, binary and sexagesimal numbers, which refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"  # keys merged by ``<<`` may be given again
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.constructor.ConstructorError(problem=f"{', '.join(repeated)} comes twice{node.start_mark}")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str, where: str) -> Any:
    """Return the value that a YAML text describes.

    Its size and its nesting are checked before anything is built, so that aliases of aliases cannot fill the memory.

    Args:
        text: The text.
        where: What it is, for the error message.

    Raises:
        LeadlineError: It is no YAML, too large or nested too deeply; or it has tags, or a number that begins with 0.
    """
    try:
        _check_size(text, where)
        return yaml.load(text, _Loader)
    except LeadlineError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # a scalar that cannot be converted
        raise LeadlineError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


def _check_size(text: str, where: str) -> None:
    """Count the nodes of a text from its events, which takes neither memory nor recursion."""
    if len(text) > _LARGEST_TEXT:
        raise LeadlineError(f"{where} has {len(text):,} characters; a recipe has at most {_LARGEST_TEXT:,}")
    total = 0
    sizes: dict[str, int] = {}  # nodes of what an anchor names, when it is complete
    open_nodes: list[tuple[str | None, int]] = []  # anchor of a list or mapping, and the count before it
    for event in yaml.parse(text, _Loader):
        if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise LeadlineError(f"{where} has an alias *{excerpt(event.anchor)} before its anchor is complete")
            total += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            _check_node(event, where)
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
            total += 1
        if total > _MOST_NODES:
            raise LeadlineError(
                f"{where} has more than {_MOST_NODES:,} values, aliases included; no recipe is as large"
            )
        if len(open_nodes) > _DEEPEST:
            raise LeadlineError(f"{where} has more than {_DEEPEST} levels of lists and mappings; a recipe has three")


def _check_node(event: Any, where: str) -> None:
    if event.tag is not None:
        raise LeadlineError(f"{where} has the tag {excerpt(event.tag)}; a recipe has none, leave it out")
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
        if _OCTAL.match(event.value):
            raise LeadlineError(
                f"{where} has the number {excerpt(event.value)}, which some read as octal; write it without the 0 in "
                "front, or put quotes around it"
            )
        if len(event.value) > _LONGEST_NUMBER and _INT.match(event.value):
            raise LeadlineError(f"{where} has a number of {len(event.value)} digits; write a smaller one")
