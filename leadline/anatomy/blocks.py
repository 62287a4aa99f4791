"""Where a model's blocks are, and where the attention, the MLP and the norms of a block are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
_MLP = re.compile(r"^(mlp|ffn?|feed_?forward\w*|intermediate|linear1|fc1|\w*moe|denserelu\w*)$", re.IGNORECASE)
_QK_NORM = re.compile(r"(^|_)(q|k|query|key)_?(layer)?_?norm", re.IGNORECASE)
_STREAM_NAMES = ("hidden_states", "x", "src", "query", "hidden_state", "inputs")


class Block(NamedTuple):
    name: str
    module: nn.Module


class Parts(NamedTuple):
    """The sub-layers of a block. ``norms`` are those of the stream's width, in any order."""

    attention: nn.Module | None
    mlp: nn.Module | None
    norms: list[nn.Module]
    sequence_first: bool  # the block takes (n, B, d)


def unwrap(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``: hooks on the compiled one never fire."""
    return getattr(module, "_orig_mod", module)


def find_blocks(model: nn.Module, blocks: str | Sequence[str] | None = None) -> list[Block]:
    """The blocks of a model, in order.

    By itself: of the lists (``ModuleList``, ``Sequential``) of modules of one type that contain attention, the one
    with most blocks; a list of groups or stages is opened. ``blocks`` names them instead: module names, or patterns
    in which * stands for one part of a name, such as "encoder.layer.*".
    """
    if blocks is not None:
        return _named(model, [blocks] if isinstance(blocks, str) else list(blocks))
    candidates = [_open(path, found) for path, found in _lists(model, "")]
    if not candidates:
        raise LeadlineError(
            f"no blocks found in {type(model).__name__}: no list of like modules with attention; "
            'name them, such as blocks="encoder.layer.*" (see model.named_modules())'
        )
    return max(candidates, key=lambda found: (len(found), sum(_size(block.module) for block in found)))


def find_parts(block: nn.Module) -> Parts:
    """The outermost module of a block named after attention, the first named after an MLP, and the norms."""
    attention = _outermost(block, lambda name, module: bool(_ATTENTION.search(name)) and not _is_norm(module))
    inside = set() if attention is None else set(attention.modules())
    mlp = _outermost(block, lambda name, module: bool(_MLP.match(name)) and module not in inside)
    norms = [
        module
        for name, module in block.named_modules()
        if _is_norm(module) and not _QK_NORM.search(name.rpartition(".")[2])
    ]
    sequence_first = any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in block.modules())
    return Parts(attention, mlp, norms, sequence_first)


def prefix_tokens(model: nn.Module) -> int:
    """How many class, distillation and register tokens stand before the patches of an image model."""
    for module in model.modules():
        counted = getattr(module, "num_prefix_tokens", None)  # timm
        if isinstance(counted, int):
            return counted
        prefix = getattr(getattr(module, "config", None), "prefix", None)  # ours
        if isinstance(prefix, int) and hasattr(module, "class_token"):
            return prefix
    tokens = 0
    for name, parameter in model.named_parameters():  # transformers
        if name.rpartition(".")[2] in ("cls_token", "distillation_token", "register_tokens"):
            tokens += parameter.shape[-2] if parameter.ndim > 1 else 1
    return tokens


def stream_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tokens that enter a module: its first floating tensor of at least two axes."""
    named = [kwargs[name] for name in _STREAM_NAMES if name in kwargs]
    return next((x for x in (*args, *named, *kwargs.values()) if _is_stream(x)), None)


def stream_out(output: Any) -> Tensor | None:
    """The tokens that leave a module, whether it returns a tensor, a tuple or a mapping."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    found = output if isinstance(output, (tuple, list)) else (output,)
    return next((x for x in found if _is_stream(x)), None)


def as_tokens(x: Tensor, sequence_first: bool) -> Tensor:
    """(B, n, d) from what runs through a block: also (n, d), (n, B, d) and (B, height, width, d)."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    if x.ndim > 3:
        return x.flatten(1, -2)
    return x.transpose(0, 1) if sequence_first else x


def _is_stream(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2 and not x.is_nested


def _is_norm(module: nn.Module) -> bool:
    named = type(module).__name__.lower()
    return "norm" in named and not any(True for _ in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_attention(module: nn.Module) -> bool:
    return any(
        _ATTENTION.search(name.rpartition(".")[2]) or _ATTENTION.search(type(child).__name__)
        for name, child in module.named_modules()
    )


def _is_list(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
        return False
    children = [unwrap(child) for child in module.children()]
    return len({type(child) for child in children}) == 1 and all(_has_attention(child) for child in children)


def _lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of like modules with attention."""
    module = unwrap(module)
    if _is_list(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _lists(child, f"{path}.{name}" if path else name)


def _open(path: str, found: nn.Module) -> list[Block]:
    """The blocks of a list. Where nearly all the weights of its members lie in lists of their own, those are meant."""
    children = [(f"{path}.{name}" if path else name, unwrap(child)) for name, child in found.named_children()]
    opened = [
        [block for inner_path, inner in _lists(child, name) for block in _open(inner_path, inner)]
        for name, child in children
    ]
    blocks = [block for inner in opened for block in inner]
    share = sum(_size(block.module) for block in blocks) / max(_size(found), 1)
    one_wrapped = len(children) == 1 and len(blocks) > 1  # such as a Sequential around a whole model
    if all(opened) and (share >= 0.8 or one_wrapped):
        return blocks
    return [Block(name, child) for name, child in children]


def _named(model: nn.Module, wanted: Iterable[str]) -> list[Block]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in wanted:
        parts = pattern.split(".")
        hits = [
            name
            for name in modules
            if name.count(".") == len(parts) - 1 and all(map(fnmatchcase, name.split("."), parts)) and name
        ]
        if not hits:
            near = difflib.get_close_matches(pattern, modules, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LeadlineError(
                f"blocks={pattern!r} names no module of {type(model).__name__}; see model.named_modules(){hint}"
            )
        found.update((name, unwrap(modules[name])) for name in hits)
    if not found:
        raise LeadlineError('blocks is empty; name the blocks, such as blocks="encoder.layer.*"')
    return [Block(name, module) for name, module in found.items()]


def _outermost(block: nn.Module, wanted: Any) -> nn.Module | None:
    level = [(name, unwrap(child)) for name, child in block.named_children()]
    while level:
        for name, module in level:
            if wanted(name, module):
                return module
        level = [(name, unwrap(inner)) for _, module in level for name, inner in module.named_children()]
    return None


def single_device(model: nn.Module) -> torch.device | None:
    """The device of a model whose weights all lie on one; None for a model spread over several, or without weights."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None
