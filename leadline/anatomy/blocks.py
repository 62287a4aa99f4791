"""Finds the blocks of a model, and the attention, the MLP and the norms of a block."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from leadline.errors import LeadlineError, excerpt

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
_MLP = re.compile(r"^(mlp|ffn?|feed_?forward\w*|intermediate|linear1|fc1|\w*moe|denserelu\w*)$", re.IGNORECASE)
_CHANNELS = re.compile(r"^(XCA|CrossCovariance\w*|Channel\w*Att(n|ention)\w*)$")
_QK_NORM = re.compile(r"(^|_)(q|k|query|key)_?(layer)?_?norm", re.IGNORECASE)


class Block(NamedTuple):
    """One block of a model: its name in ``model.named_modules()`` and the module."""

    name: str
    module: nn.Module


class Tower(NamedTuple):
    """A list of blocks that one stream passes, such as the encoder of T5; a model has one or several."""

    name: str  # of the list
    blocks: list[Block]


class Parts(NamedTuple):
    """The sub-layers of a block."""

    attention: nn.Module | None
    mlp: nn.Module | None
    norms: list[nn.Module]  # of the stream's width, in any order
    channels: str | None  # the class of attention between channels inside
    sequence_first: bool  # its nn.MultiheadAttention takes (n, B, d)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a ``torch.compile`` wrapper: hooks on the wrapper never fire."""
    return getattr(module, "_orig_mod", module)


def find_blocks(model: nn.Module, blocks: str | Sequence[str] | None = None) -> list[Block]:
    """Return the blocks of a model, in order.

    Without names, candidates are the lists (``ModuleList``, ``Sequential``) of modules of one type that contain
    attention. The list with most blocks is taken; a list of groups or stages is replaced by the blocks inside.

    Args:
        model: Any module.
        blocks: Names of modules, or patterns in which * stands for one part of a name, such as "encoder.layer.*".

    Raises:
        LeadlineError: If there is no such list, or a name matches no module.
    """
    if blocks is not None:
        names = [blocks] if isinstance(blocks, str) else list(blocks) if isinstance(blocks, Iterable) else [blocks]
        if not all(isinstance(name, str) for name in names):
            raise LeadlineError(
                f"blocks is {excerpt(blocks)}; give names, such as 'encoder.layer.*', or a list of them"
            )
        return _blocks_by_name(model, names)
    return find_towers(model)[0].blocks


def find_towers(model: nn.Module, blocks: str | Sequence[str] | None = None) -> list[Tower]:
    """Return the towers of a model: its lists of blocks, the one with most blocks first.

    Args:
        model: Any module.
        blocks: As in ``find_blocks``; they are one tower.

    Raises:
        LeadlineError: If there is no such list, or a name matches no module.
    """
    if blocks is not None:
        listed = find_blocks(model, blocks)
        name = blocks if isinstance(blocks, str) else f"{listed[0].name} to {listed[-1].name}"
        return [Tower(name.removesuffix(".*"), listed)]
    towers = [Tower(path or "blocks", _blocks_of_list(path, modules)) for path, modules in _attention_lists(model, "")]
    if not towers:
        raise LeadlineError(
            f"no blocks found in {type(model).__name__}: no list of like modules with attention; "
            'name them, such as blocks="encoder.layer.*" (see model.named_modules())'
        )
    largest = max(towers, key=lambda tower: (len(tower.blocks), sum(_size(block.module) for block in tower.blocks)))
    return [largest, *(tower for tower in towers if tower is not largest)]


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention alone, without a norm or an MLP."""
    parts = find_parts(module)
    return bool(_ATTENTION.search(type(module).__name__)) and parts.mlp is None and not parts.norms


def find_parts(block: nn.Module) -> Parts:
    """Return the attention, the MLP and the norms of a block, recognised by the names of modules and classes.

    The attention is the outermost module with such a name. The MLP is the first module with such a name outside the
    attention. Only its input is of interest, so the first linear layer of an unnamed MLP will do.
    """
    attention = _outermost(block, lambda name, module: bool(_ATTENTION.search(name)) and not _is_norm(module))
    inside = set() if attention is None else set(attention.modules())
    mlp = _outermost(block, lambda name, module: bool(_MLP.match(name)) and module not in inside)
    norms = [
        module
        for name, module in block.named_modules()
        if _is_norm(module) and not _QK_NORM.search(name.rpartition(".")[2])
    ]
    sequence_first = any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in block.modules())
    classes = [type(module).__name__ for module in block.modules()]
    channels = next((name for name in classes if _CHANNELS.search(name)), None)
    return Parts(attention, mlp, norms, channels, sequence_first)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_attention(module: nn.Module) -> bool:
    return any(
        _ATTENTION.search(name.rpartition(".")[2]) or _ATTENTION.search(type(child).__name__)
        for name, child in module.named_modules()
    )


def _is_attention_list(module: nn.Module) -> bool:
    """Return whether this is a list of modules of one type that all contain attention, or of several types of block."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
        return False
    children = [unwrap(child) for child in module.children()]
    if len({type(child) for child in children}) == 1 and all(_has_attention(child) for child in children):
        return True
    mixed = isinstance(module, nn.ModuleList) and any(_has_attention(child) for child in children)
    return mixed and all(_is_block(child) for child in children)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module has a norm and an MLP, and is no list itself."""
    parts = find_parts(module)
    return parts.mlp is not None and bool(parts.norms) and not isinstance(module, (nn.ModuleList, nn.Sequential))


def _attention_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost lists of like modules with attention, each with its name."""
    module = unwrap(module)
    if _is_attention_list(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _attention_lists(child, f"{path}.{name}" if path else name)


def _blocks_of_list(path: str, modules: nn.Module) -> list[Block]:
    """Return the members of a list, or the blocks inside them if those hold nearly all the weights."""
    children = [(f"{path}.{name}" if path else name, unwrap(child)) for name, child in modules.named_children()]
    nested = [
        [block for inner_path, inner in _attention_lists(child, name) for block in _blocks_of_list(inner_path, inner)]
        for name, child in children
    ]
    blocks = [block for inner in nested for block in inner]
    share = sum(_size(block.module) for block in blocks) / max(_size(modules), 1)
    one_wrapped = len(children) == 1 and len(blocks) > 1  # such as a Sequential around a whole model
    whole = share >= 0.3 and all(_is_block(block.module) for block in blocks)
    if all(nested) and (share >= 0.8 or one_wrapped or whole):
        return blocks
    stages = [_blocks_of_stage(name, child) for name, child in children if _attends(child)]
    if len(stages) > 1 and all(stages) and len({_widest(child) for _, child in children}) > 1:
        return [block for stage in stages for block in stage]
    return [Block(name, child) for name, child in children]


def _blocks_of_stage(path: str, stage: nn.Module) -> list[Block]:
    """Return the members of a stage that is a list, or of the list that holds most of its weights; some attend."""
    lists = [(path, stage), *((f"{path}.{name}", child) for name, child in stage.named_children())]
    lists = [(name, unwrap(one)) for name, one in lists]
    for name, one in lists:
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and _size(one) >= 0.5 * _size(stage) and _attends(one):
            return [Block(f"{name}.{number}", unwrap(child)) for number, child in one.named_children()]
    return []


def _attends(module: nn.Module) -> bool:
    """Return whether a module contains attention with weights."""
    return any(
        (_ATTENTION.search(name.rpartition(".")[2]) or _ATTENTION.search(type(child).__name__)) and _size(child) > 0
        for name, child in module.named_modules()
    )


def _widest(module: nn.Module) -> int:
    """Return the largest size of a weight, in which stages of a hierarchy differ and blocks of one width do not."""
    return max((size for parameter in module.parameters() for size in parameter.shape), default=0)


def _blocks_by_name(model: nn.Module, patterns: Iterable[str]) -> list[Block]:
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}
    for pattern in patterns:
        parts = pattern.split(".")
        names = [
            name
            for name in modules
            if name.count(".") == len(parts) - 1 and all(map(fnmatchcase, name.split("."), parts)) and name
        ]
        if not names:
            near = difflib.get_close_matches(pattern, modules, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LeadlineError(
                f"blocks={pattern!r} names no module of {type(model).__name__}; see model.named_modules(){hint}"
            )
        blocks.update((name, unwrap(modules[name])) for name in names)
    if not blocks:
        raise LeadlineError('blocks is empty; name the blocks, such as blocks="encoder.layer.*"')
    return [Block(name, module) for name, module in blocks.items()]


def _outermost(block: nn.Module, matches: Callable[[str, nn.Module], bool]) -> nn.Module | None:
    """Return the first match among the modules of a block, level by level."""
    level = [(name, unwrap(child)) for name, child in block.named_children()]
    while level:
        for name, module in level:
            if matches(name, module):
                return module
        level = [(name, unwrap(inner)) for _, module in level for name, inner in module.named_children()]
    return None
