"""Tokens of a text, computed once and mapped from a file under the fingerprint of the text."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from leadline.data.made_once import counted, made_once
from leadline.data.text.files import Corpus, count_words
from leadline.data.text.tokenizers import (
    Tokenizer,
    fingerprint,
    learns,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
)
from leadline.errors import LeadlineError
from leadline.files import read_json

_FORMAT = 4  # changes when what is stored changes
_VOCABULARIES = {"word": 2, "bpe": 1}  # the same for vocabularies, by kind
_TOKENS, _SIZES = "tokens.npy", "sizes.json"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Sizes:
    """The length of a text in units that do not depend on its tokens, and how much of it was unknown to a tokenizer."""

    bytes: int  # of UTF-8
    words: int  # as WikiText counts them, every line's end included
    unknown: int = 0  # words that the tokenizer replaced by its token for unknown ones


@dataclass(frozen=True)
class TokenText:
    """A split as numbers: ``ids`` (n,), uint16 or uint32, mapped from a file."""

    ids: np.ndarray
    sizes: Sizes

    def __len__(self) -> int:
        return len(self.ids)

    def fingerprint(self) -> str:
        """Return the fingerprint of the tokens alone, wherever and however the text is stored."""
        return hashlib.sha256(np.ascontiguousarray(self.ids).data).hexdigest()


def tokenizer_for(
    corpus: Corpus,
    kind: str,
    vocab_size: int | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Tokenizer:
    """Return a tokenizer, trained on the training text of the corpus where its kind needs that, and cached.

    Args:
        corpus: The text.
        kind: "byte", "word", "bpe", "gpt2" or the path of a tokenizer.
        vocab_size: Size of a vocabulary that is made.
        cache: The cache, see ``cache_folder``.

    Raises:
        LeadlineError: The kind needs a training text and the corpus has none.
    """
    if not learns(kind):
        return make_tokenizer(kind, ())
    if "train" not in corpus.splits:
        raise LeadlineError(
            f"{corpus.origin} has no train text to make a {kind} vocabulary of; give a tokenizer's folder, or 'byte'"
        )
    key = [_VOCABULARIES[kind], kind, vocab_size, corpus.fingerprint("train")]
    blocks = counted(corpus.blocks("train"), f"making a {kind} vocabulary")
    return _made(
        key,
        cache,
        lambda draft: save_tokenizer(make_tokenizer(kind, blocks, vocab_size), draft),
        load_tokenizer,
    )


def tokenised(
    corpus: Corpus, split: str, tokenizer: Tokenizer, cache: str | os.PathLike[str] | None = None
) -> TokenText:
    """Return the tokens of a split; the first call for a text and a tokenizer computes and stores them.

    Args:
        corpus: The text.
        split: "train", "valid" or "test".
        tokenizer: The tokenizer.
        cache: The cache, see ``cache_folder``.
    """
    blocks = corpus.blocks(split)  # raises now where the split is missing
    key = [_FORMAT, fingerprint(tokenizer), corpus.fingerprint(split)]
    return _made(key, cache, lambda draft: _write(blocks, corpus.where(split), tokenizer, draft), _load)


def encode_text(text: str, tokenizer: Tokenizer) -> TokenText:
    """Return the tokens of a text in memory, without a file."""
    ids = tokenizer.encode(text)
    return TokenText(ids, Sizes(len(text.encode()), count_words(text), _unknown(ids, text, tokenizer)))


def _load(folder: Path) -> TokenText:
    sizes = read_json(folder / _SIZES)
    return TokenText(np.load(folder / _TOKENS, mmap_mode="r"), Sizes(**sizes))


def _write(blocks: Iterator[str], where: str, tokenizer: Tokenizer, folder: Path) -> None:
    small = tokenizer.vocab_size <= 1 << 16
    dtype = np.dtype(np.uint16 if small else np.uint32)
    size = words = tokens = unknown = 0
    raw = folder / "tokens.raw"
    with raw.open("wb") as file:
        for block in counted(blocks, f"tokenising {where}"):
            ids = tokenizer.encode(block)
            file.write(ids.astype(dtype).tobytes())
            size, words, tokens = size + len(block.encode()), words + count_words(block), tokens + len(ids)
            unknown += _unknown(ids, block, tokenizer)
    if tokens == 0:
        raise LeadlineError(f"{where} is empty; give one with words in it")
    with (folder / _TOKENS).open("wb") as file, raw.open("rb") as source:
        np.lib.format.write_array_header_2_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)})
        shutil.copyfileobj(source, file, 1 << 22)
    raw.unlink()
    (folder / _SIZES).write_text(json.dumps(asdict(Sizes(size, words, unknown))), encoding="utf-8")


def _unknown(ids: np.ndarray, text: str, tokenizer: Tokenizer) -> int:
    if tokenizer.unknown is None:
        return 0
    token, name = tokenizer.unknown
    return max(0, int((ids == token).sum()) - text.split().count(name))


def _made(
    key: list[object], cache: str | os.PathLike[str] | None, make: Callable[[Path], object], load: Callable[[Path], _T]
) -> _T:
    """Load what is stored under ``key``; make it where it is absent or damaged."""

    def whole(folder: Path) -> bool:
        try:
            load(folder)
        except (LeadlineError, OSError, EOFError, ValueError, TypeError):
            return False
        return True

    name = f"text-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]}"
    return load(made_once(name, cache, make, "tokens", whole))
