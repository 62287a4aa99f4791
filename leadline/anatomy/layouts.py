"""Layouts of token streams: which axis holds the samples, which the tokens, which the channels."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor

from leadline.errors import LeadlineError

_TEXT = re.compile(r"((?P<stream>\d+):)?(?P<axes>[bnhwtgsdc]+)")


class LayoutError(LeadlineError):
    """The tokens of a stream cannot be told for certain."""


class Layout(NamedTuple):
    """The axes of a stream, one letter each.

    ``b`` samples, ``d`` channels, ``s`` parallel streams, which make a token wider; every other letter is an axis of
    tokens. Without ``b`` the tensor is one sample.
    """

    axes: str = "bnd"
    stream: int = 0  # which of the floating tensors that a block takes and returns

    def tokens(self, x: Tensor) -> Tensor:
        """Return the tokens (B, n, d) of a stream.

        Raises:
            LayoutError: If the stream has another number of axes.
        """
        if x.ndim != len(self.axes):
            raise LayoutError(
                f"a stream of shape {tuple(x.shape)} does not fit layout {self.axes!r}; pass layout= with a letter "
                "for each axis, or name blocks of one layout by blocks="
            )
        if self.axes == "bnd":
            return x
        where = {kind: [i for i, axis in enumerate(self.axes) if axis in kind] for kind in ("b", "s", "d")}
        joined = where["s"] + where["d"]
        rest = [i for i in range(x.ndim) if i not in where["b"] + joined]
        x = x.permute(*where["b"], *rest, *joined).flatten(-len(joined))
        x = x if where["b"] else x.unsqueeze(0)
        return x.flatten(1, -2)

    def __str__(self) -> str:
        return f"{self.stream}:{self.axes}" if self.stream else self.axes


class UsualLayout(NamedTuple):
    """The layout of blocks that nothing is known of but their attention: samples, tokens, channels.

    That is (B, n, d), (n, d), (B, height, width, d), or (n, B, d) if ``sequence_first``. Maps are (B, d, height, width)
    if the second axis alone has the size of a weight.
    """

    sequence_first: bool = False
    widths: frozenset[int] = frozenset()  # sizes of the block's weights
    stream: int = 0

    def tokens(self, x: Tensor) -> Tensor:
        """Return the tokens (B, n, d) of a stream."""
        if x.ndim == 2:
            return x.unsqueeze(0)
        if x.ndim > 3 and x.shape[1] in self.widths and x.shape[-1] not in self.widths:
            return x.flatten(2).transpose(1, 2)
        if x.ndim > 3:
            return x.flatten(1, -2)
        return x.transpose(0, 1) if self.sequence_first else x


def read_layout(text: str) -> Layout:
    """Return the layout that a text such as "bnd", "bchw" or "1:bnd" describes.

    Args:
        text: A letter for each axis, see ``Layout``; ``c`` is ``d``. A number before a colon chooses the stream.

    Raises:
        LeadlineError: If the text is no layout.
    """
    match = _TEXT.fullmatch(text)
    axes = match["axes"].replace("c", "d") if match else ""
    tokens = [axis for axis in axes if axis in "nhwtg"]
    if match is None or axes.count("d") != 1 or axes.count("b") > 1 or not tokens or len(set(axes)) != len(axes):
        raise LeadlineError(
            f'layout is {text!r}; it must have a letter for each axis of the stream, such as "bnd", "nbd", "bchw", '
            '"bhwc" or "1:bnd" for the second stream'
        )
    return Layout(axes, int(match["stream"] or 0))


def layout_of(ndim: int, batch: int | None, channel: int) -> Layout:
    """Return the layout of a stream whose other axes hold tokens.

    Args:
        ndim: Number of axes.
        batch: The axis of the samples; None if the stream is one sample.
        channel: The axis of the channels.
    """
    rest = [axis for axis in range(ndim) if axis not in (batch, channel)]
    letters = {1: "n", 2: "hw", 3: "thw"}.get(len(rest), "nhwtg"[: len(rest)])
    names = dict(zip(rest, letters, strict=True)) | {channel: "d"}
    if batch is not None:
        names[batch] = "b"
    return Layout("".join(names[axis] for axis in range(ndim)))
