"""The section ``data`` of a recipe for text."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from leadline.training.recipe.section import Count, Place, Section


class TextData(Section):
    """The section ``data``, for text from a file, a folder or the hub; see ``leadline.data.text.files.open_text``."""

    name: Literal["text", "wikitext103", "wikitext2"]
    path: Place | None = None  # for WikiText a copy of it; None: it is downloaded from the hub
    hub: str | None = None  # a data set of the hub
    subset: str | None = None
    column: str = "text"
    tokenizer: Place | None = None  # "byte", "word", "bpe", "gpt2", or a folder; None: "word" for WikiText, else "bpe"
    vocab_size: Count | None = None  # of "bpe" (None: 16384) and "word" (None: all words)
    tokens: Count | None = None  # of a window or segment; None: the model's max_tokens
    stride: Count | None = None  # of windows in evaluation; None: windows do not overlap
    cache: Place | None = None  # folder for tokens; None: $LEADLINE_CACHE, or ~/.cache/leadline

    @model_validator(mode="after")
    def _one_source(self) -> TextData:
        if self.name == "text" and (self.path is None) == (self.hub is None):
            raise ValueError("give either path, a file or folder of text, or hub, the name of a data set")
        if self.name != "text" and (self.hub or self.subset):
            raise ValueError(f"hub and subset are {self.name}'s own; give name: text with others")
        if self.subset is not None and self.hub is None:
            raise ValueError(f"subset is {self.subset!r}, which belongs to hub; leave it out")
        if self.vocab_size is not None and self.tokens_by not in ("word", "bpe"):
            raise ValueError(
                f"vocab_size is {self.vocab_size} and tokenizer {self.tokens_by!r}, which has its own; set it to null"
            )
        return self

    @property
    def tokens_by(self) -> str:
        """The tokenizer: a kind, or a folder that holds one."""
        return self.tokenizer or ("bpe" if self.name == "text" else "word")
