"""Tokenizers: bytes, words in order of frequency, or byte-pair encodings."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from leadline.data.hub import quiet_hub
from leadline.errors import LeadlineError, need
from leadline.files import read_text, whole

FILE = "tokenizer.json"  # in the format of transformers for byte-pair encodings, in ours for the other kinds
FILES = (FILE, "vocab.json", "merges.txt")  # what may lie beside a model
KINDS = ("byte", "word", "bpe", "gpt2")
LINE_END, UNKNOWN = "<eos>", "<unk>"
BETWEEN_LINES = re.compile(r"\S\n(?=\S)")


class Tokenizer(Protocol):
    """Maps text to token ids and back."""

    kind: str
    unknown: tuple[int, str] | None  # id and name of the token for what it does not know

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, (n,)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def size(self, token: int) -> int:
        """Return the number of bytes of text that a token stands for."""

    def to_json(self) -> str:
        """Return the content of the tokenizer file."""


class ByteTokenizer:
    """Tokens are the bytes of UTF-8."""

    kind = "byte"
    unknown: tuple[int, str] | None = None
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def size(self, token: int) -> int:
        return 1

    def to_json(self) -> str:
        return json.dumps({"leadline": "byte"})


class WordTokenizer:
    """Tokens are words between blanks, and ``<eos>`` for the end of every line, as WikiText is modelled.

    Ids are in order of frequency, as an adaptive softmax wants them. An unknown word is ``<unk>``.
    """

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.unknown: tuple[int, str] | None = (self.ids[UNKNOWN], UNKNOWN)

    @classmethod
    def train(cls, blocks: Iterable[str], vocab_size: int | None = None) -> WordTokenizer:
        """Make a vocabulary of all words of a text, or of the most frequent ones.

        Args:
            blocks: The text in pieces.
            vocab_size: Number of words, ``<eos>`` and ``<unk>`` among them; None: all.
        """
        special = (LINE_END, UNKNOWN)
        if vocab_size is not None and vocab_size <= len(special):
            raise LeadlineError(
                f"vocab_size is {vocab_size}; {' and '.join(special)} are two words of it, give 3 or more, or none for "
                "all words"
            )
        counts: Counter[str] = Counter()
        for block in blocks:
            counts.update(_words(block))
        words = [word for word, _ in counts.most_common()] + [word for word in special if word not in counts]
        if vocab_size is not None:
            common = [word for word in words if word not in special][: vocab_size - len(special)]
            wanted = {*common, *special}
            words = [word for word in words if word in wanted]
        return cls(words)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        known, unknown = self.ids.get, self.ids[UNKNOWN]
        return np.array([known(word, unknown) for word in _words(text)], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("\n" if self.words[i] == LINE_END else f" {self.words[i]}" for i in ids)

    def size(self, token: int) -> int:
        return len(self.decode([token]).strip(" ").encode())

    def to_json(self) -> str:
        return json.dumps({"leadline": "word", "words": self.words}, ensure_ascii=False)


class PairTokenizer:
    """Byte-pair encoding by the ``tokenizers`` library: trained here, that of GPT-2, or any other of its format."""

    kind = "bpe"

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        inner.no_truncation()  # the file may hold the last settings of both
        inner.no_padding()
        before = inner.pre_tokenizer
        self.by_bytes = isinstance(before, need("tokenizers.pre_tokenizers", "hub").ByteLevel)
        # The pre-tokenizer of GPT-2 never crosses the end of a line without blanks around it, unless it puts a blank
        # before a text (RoBERTa).
        self.parts = self.by_bytes and not before.add_prefix_space
        self.unknown = None if self.by_bytes else _unknown_in(inner)  # bytes are never unknown
        self.vocab_size = 1 + max(inner.get_vocab().values(), default=-1)  # ids may have gaps

    @classmethod
    def train(cls, blocks: Iterable[str], vocab_size: int = 16384) -> PairTokenizer:
        """Train on bytes, as GPT-2 does: no text is unknown, and decoding returns what was encoded.

        Args:
            blocks: The text in pieces.
            vocab_size: Number of tokens, at least 257.
        """
        if vocab_size < 257:
            raise LeadlineError(f"vocab_size is {vocab_size}; byte pairs begin with 256 bytes, give more than that")
        tokenizers = need("tokenizers", "hub")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        inner.train_from_iterator(blocks, trainer)
        return cls(inner)

    def encode(self, text: str) -> np.ndarray:
        pieces = _pieces(text) if self.parts else [text]
        encodings = self.inner.encode_batch_fast(pieces, add_special_tokens=False)  # on all cores
        return np.concatenate([np.array(piece.ids, dtype=np.uint32) for piece in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def size(self, token: int) -> int:
        return len(self.inner.id_to_token(token) if self.by_bytes else self.decode([token]).encode())

    def to_json(self) -> str:
        return self.inner.to_str()


def _unknown_in(inner: Any) -> tuple[int, str] | None:
    """Return id and name of the token for unknown text in a tokenizer of the library, or None."""
    model = json.loads(inner.to_str())["model"]  # some kinds name it, others give its id
    name = model.get("unk_token")
    token = model.get("unk_id") if name is None else inner.token_to_id(name)
    return None if token is None else (token, inner.id_to_token(token))


def make_tokenizer(kind: str, blocks: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Return a tokenizer by its kind, trained on the text where that is needed, or by its path.

    Args:
        kind: "byte", "word", "bpe", "gpt2", or a folder or file.
        blocks: The training text in pieces.
        vocab_size: Number of tokens of "word" and "bpe".
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "word":
        return WordTokenizer.train(blocks, vocab_size)
    if kind == "bpe":
        return PairTokenizer.train(blocks) if vocab_size is None else PairTokenizer.train(blocks, vocab_size)
    if kind == "gpt2":
        return _gpt2()
    if not Path(kind).exists():
        raise LeadlineError(f"unknown tokenizer {kind!r}; allowed: {', '.join(KINDS)}, or a folder with {FILE}")
    return load_tokenizer(kind)


def learns(kind: str) -> bool:
    """Tell whether a tokenizer of this kind is made from the training text."""
    return kind in ("word", "bpe")


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> Path:
    """Write a tokenizer into ``folder``, beside a model; ``load_tokenizer`` reads it. Returns the file."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with whole(target / FILE) as new:
        new.write_text(tokenizer.to_json(), encoding="utf-8")
    return target / FILE


def tokenizer_home(folder: Path) -> Path | None:
    """Return the folder with the tokenizer of the model in ``folder``: itself, or its run above it."""
    place = folder.resolve()
    homes = [place, *place.parents[: 2 if place.name == "ema" else 1]]
    return next((home for home in homes if any((home / name).is_file() for name in FILES)), None)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer in a folder or file: one of Leadline or any of transformers.

    Raises:
        LeadlineError: There is none, or it is damaged.
    """
    source = Path(path)
    file = source / FILE if source.is_dir() else source
    if not file.is_file():
        pairs = source / "vocab.json", source / "merges.txt"
        if all(part.is_file() for part in pairs):
            return _from_pairs(*pairs)
        raise LeadlineError(f"{file} does not exist; give a folder that holds a tokenizer")
    try:
        text = read_text(file)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise LeadlineError(f"{file} is not JSON ({error}); it is damaged") from error
    ours = content.get("leadline") if isinstance(content, dict) else None
    if ours == "byte":
        return ByteTokenizer()
    if ours == "word":
        words = content.get("words")
        if not isinstance(words, list) or UNKNOWN not in words or not all(isinstance(word, str) for word in words):
            raise LeadlineError(f"{file} lacks its list of words with {UNKNOWN} among them; it is damaged")
        return WordTokenizer(words)
    try:
        return PairTokenizer(need("tokenizers", "hub").Tokenizer.from_str(text))
    except LeadlineError:
        raise
    except Exception as error:  # the library has no exceptions of its own
        raise LeadlineError(f"{file} is no tokenizer ({error}); give one that tokenizers can read") from error


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a fingerprint of the tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def _words(text: str) -> list[str]:
    return text.replace("\n", f" {LINE_END} ").split()


def _pieces(text: str, size: int = 1 << 14) -> list[str]:
    """Split a text into parts of about ``size`` characters that byte pairs of the whole text do not cross."""
    ends, last = [], 0
    for match in BETWEEN_LINES.finditer(text):
        if match.end() - last >= size:
            ends.append(last := match.end())
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _gpt2() -> PairTokenizer:
    transformers = need("transformers", "hub")
    for offline in (True, False):
        try:
            with quiet_hub():
                loaded = transformers.AutoTokenizer.from_pretrained(
                    "openai-community/gpt2", local_files_only=offline, trust_remote_code=False
                )
            return PairTokenizer(loaded.backend_tokenizer)
        except (OSError, ValueError):
            continue
    raise LeadlineError(
        "GPT-2's tokenizer is not on this machine and could not be downloaded; give a folder that has it by "
        "data.tokenizer=FOLDER, or train one with data.tokenizer=bpe"
    )


def _from_pairs(vocabulary: Path, merges: Path) -> PairTokenizer:
    """Return the tokenizer in the two files of GPT-2."""
    tokenizers = need("tokenizers", "hub")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return PairTokenizer(inner)
