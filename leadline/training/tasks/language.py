"""Language modelling: training a decoder or Transformer-XL on text, and evaluating saved models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from leadline.data.text.batches import Lanes, Windows
from leadline.data.text.files import SPLITS, WIKITEXT, WIKITEXT_HUB, Corpus, open_text
from leadline.data.text.store import TokenText, tokenised, tokenizer_for
from leadline.data.text.tokenizers import FILE, Tokenizer, fingerprint, learns, load_tokenizer, save_tokenizer
from leadline.errors import LeadlineError, check_choice
from leadline.models import TransformerXL, create_model
from leadline.models.configs import DecoderConfig, TransformerXLConfig
from leadline.models.decoder import Decoder
from leadline.models.table import MODELS
from leadline.training.perplexity import (
    LEAKY,
    at_least,
    figures,
    perplexity,
    score_segments,
    score_windows,
    sees_future,
)
from leadline.training.recipe import Augment, Recipe, TextData
from leadline.training.run_folder.folder import RECIPE, claim_data
from leadline.training.tasks.base import Carry, SavedModel
from leadline.training.writing import open_language_model

_CONFIGS = (DecoderConfig, TransformerXLConfig)  # of the models that write text
_FAMILIES = {model.config.family for model in MODELS.values() if issubclass(model.config, _CONFIGS)}
_WATCHED, _WATCHED_TOKENS = 2, 256  # stretches of text for the probe during training, and their tokens at most
_PROBED, _PROBED_TOKENS = 4, 512  # for a probe after the training


class LanguageTask:
    """Trains on shuffled windows of a text, or with a memory on lanes of it; the loss selects the best checkpoint.

    Args:
        recipe: The recipe.
        device: Where to train.
        rank: Number of this process.
        world: Number of processes.
    """

    kind: ClassVar[str] = "text"
    probed_on_cpu: ClassVar[bool] = False
    best: tuple[str, Literal["max", "min"]] = ("loss", "min")
    watched: Literal["valid", "test"] = "valid"  # every text has this split

    def __init__(self, recipe: Recipe, device: torch.device, rank: int = 0, world: int = 1) -> None:
        assert isinstance(recipe.data, TextData)
        self.recipe, self.data, self.device, self.rank, self.world = recipe, recipe.data, device, rank, world
        config = MODELS[recipe.model.name].config
        if not issubclass(config, _CONFIGS):
            raise LeadlineError(
                f"model is {recipe.model.name}, which does not write text; give a decoder, such as gpt2_small"
            )
        self.memory = issubclass(config, TransformerXLConfig)
        _refuse_idle_keys(recipe, self.memory)
        self._read_text()
        self.options = _options(recipe, self.data, self.tokenizer)
        self.notes = [LEAKY] if self.options.get("de_escalation_form") == "leaky" else []
        if rank == 0 and self.notes:
            _print_once(LEAKY)
        self.length: int = self.data.tokens or self.options["max_tokens"]
        if self.data.stride is not None and self.data.stride > self.length:
            raise LeadlineError(
                f"data.stride is {self.data.stride}; it must lie between 1 and {self.length}, the tokens of a window"
            )
        self.batches = (Lanes if self.memory else Windows)(
            self.texts["train"].ids,
            self.length,
            recipe.batch.size,
            accumulate=recipe.batch.accumulate,
            seed=recipe.seed,
            device=device,
        )
        compiled = recipe.compile != "none" and device.type == "cuda"
        self._cross_entropy = _cross_entropy(recipe.regularise.smoothing, compiled)

    def _read_text(self) -> None:
        """Set the tokenizer and the tokens of every split, which are read from a cache where they are in one."""
        corpus = open_corpus(self.data)
        for split in SPLITS:
            corpus.check(split)
        self.origin, self.left_out = corpus.origin, len(corpus.left_out)
        if self.rank == 0 and corpus.notice:
            _print_once(corpus.notice)
        if self.rank == 0 and corpus.by_place:
            _print_once(
                f"{corpus.origin} names no split: 90 % are for training, the next 5 % for validation, the last for test"
            )
        self.tokenizer = tokenizer_for(corpus, self.data.tokens_by, self.data.vocab_size, self.data.cache)
        self.texts = {split: tokenised(corpus, split, self.tokenizer, self.data.cache) for split in SPLITS}
        for split in ("valid", "test"):
            if len(self.texts[split]) < 2:
                raise LeadlineError(f"{corpus.where(split)} has one token; perplexity needs at least 2")

    @cached_property
    def fingerprints(self) -> dict[str, Any]:
        """Fingerprints of the splits."""
        return {split: text.fingerprint() for split, text in self.texts.items()}

    def settle(self, out: Path) -> None:
        """Write tokenizer and fingerprints into the folder of the run; refuse other text than it began with."""
        _keep_tokenizer(self.tokenizer, out)
        claim_data(out, self.kind, self.fingerprints, self.origin)

    def make_model(self) -> nn.Module:
        """Build the model of the recipe, with the vocabulary of the tokenizer."""
        return create_model(self.recipe.model.name, **self.options)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry) -> tuple[Tensor, dict[str, Tensor], Carry]:
        """Compute the cross-entropy of the next tokens; the carry is Transformer-XL's memory."""
        if self.memory:
            loss, memory = model(batch["ids"], carry, batch["targets"])
            return loss, {}, memory
        return self._cross_entropy(model(batch["ids"]), batch["targets"]), {}, None

    def evaluate(self, model: nn.Module, split: str = "valid") -> dict[str, float]:
        """Compute the figures of ``leadline.training.perplexity.figures`` on a split.

        A Transformer-XL reads the text in as many lanes as a batch has, at most.
        """
        text, size = self.texts[split], self.recipe.batch.size
        where: dict[str, Any] = {"device": self.device, "rank": self.rank, "world": self.world}
        if self.memory:
            lanes = min(size, max(1, len(text) // (4 * self.length)))
            return figures(score_segments(model, text.ids, self.length, lanes, **where), text, self.tokenizer)
        score = score_windows(model, text.ids, self.length, self.data.stride, **where)
        return figures(score, text, self.tokenizer)

    def probe_inputs(self) -> Tensor:
        """Return two stretches of the validation text, (2, up to 256)."""
        return self._stretches(_WATCHED, _WATCHED_TOKENS)

    def samples(self, count: int) -> Tensor:
        """Return ``count`` stretches of the validation text, evenly spread, (count, up to 512)."""
        return self._stretches(count, _PROBED_TOKENS)

    def _stretches(self, count: int, most: int) -> Tensor:
        return _stretches(self.texts["valid"], count, min(self.length, most)).to(self.device)

    def describe(self) -> dict[str, Any]:
        """Return the text, its tokenizer and its sizes, for summary.json."""
        return {
            "name": self.data.name,
            "tokenizer": self.data.tokens_by,
            "vocab_size": self.tokenizer.vocab_size,
            "tokens": self.length,
            "tokens_per_step": self.length * self.recipe.batch.size,
            **{f"{split}_tokens": len(text) for split, text in self.texts.items()},
            **{f"{split}_bytes": text.sizes.bytes for split, text in self.texts.items()},
            **({"files_left_out": self.left_out} if self.left_out else {}),
            **({"notes": self.notes} if self.notes else {}),
        }

    @classmethod
    def takes(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a saved model with this config.json is one of our language models, or one of transformers."""
        return config.get("family") in _FAMILIES or "model_type" in config

    @classmethod
    def evaluator(cls, source: SavedModel, split: str, device: torch.device, **options: Any) -> LanguageEvaluator:
        """Load a saved language model and a split of its text; for the options see ``LanguageEvaluator``."""
        return LanguageEvaluator(source, split, device, **options)


class Reading(NamedTuple):
    """The way in which a saved model reads a text; see ``leadline.training.perplexity.perplexity``."""

    length: int | None
    stride: int | None
    lanes: int | None


class LanguageEvaluator:
    """A saved language model on one split of a text.

    Args:
        source: The model. Its recipe may be missing where ``source.data``, a file or folder of text, is given.
        split: "train", "valid" or "test".
        device: Where to evaluate.
        context: Tokens of a window, or of a segment for Transformer-XL. None: those of the recipe.
        stride: By how many tokens the window moves. None: that of the recipe, or ``context``.
        memory: Tokens that a Transformer-XL remembers. None: as many as in training.
        lanes: Number of stretches in which a Transformer-XL reads the text side by side. None: 1.
    """

    def __init__(
        self,
        source: SavedModel,
        split: str,
        device: torch.device,
        *,
        context: int | None = None,
        stride: int | None = None,
        memory: int | None = None,
        lanes: int | None = None,
    ) -> None:
        at_least(1, context=context, stride=stride, lanes=lanes)
        at_least(0, memory=memory)
        settings = None if source.recipe is None else source.recipe.data
        assert settings is None or isinstance(settings, TextData)
        self.model, self.tokenizer = open_language_model(source.folder, str(device))
        if isinstance(self.model, TransformerXL) and memory is not None:
            self.model.memory_length = memory
        elif memory is not None or (lanes is not None and not isinstance(self.model, TransformerXL)):
            raise LeadlineError("memory or lanes are given; only Transformer-XL has a memory, leave them out")
        self.reading = Reading(*_window(self.model, settings, context, stride), lanes)
        corpus = _given_corpus(source, settings)
        check_choice("split", split, SPLITS)
        if split not in corpus.splits:
            there = " or ".join(corpus.splits)
            raise LeadlineError(
                f"{corpus.origin} has no {split} text, only {there}; give --split {there}, or other text"
            )
        self.text = tokenised(corpus, split, self.tokenizer, None if settings is None else settings.cache)
        source.check_data(LanguageTask.kind, split, self.text.fingerprint(), corpus.origin)
        self.place, self.origin, self.device = source.folder, corpus.origin, device
        self.notes = [LEAKY] if sees_future(self.model) else []
        self.notes += [corpus.notice] if corpus.notice else []
        if source.data is not None and corpus.by_place:
            self.notes.append(
                f"{source.data} names no split: this is its part for {split}; to score all of it call it {split}.txt"
            )

    def figures(self) -> dict[str, float]:
        """Compute the figures of ``perplexity``, and count the tokens, words and bytes of the text."""
        length, stride, lanes = self.reading
        scores = perplexity(self.model, self.text, self.tokenizer, length=length, stride=stride, batch=lanes)
        sizes = self.text.sizes
        return {**scores, "tokens": len(self.text), "words": sizes.words, "bytes": sizes.bytes}

    def probe_inputs(self) -> Tensor:
        """Return stretches of the text, evenly spread, (up to 4, up to 512)."""
        config: Any = self.model.config
        count = max(1, min(_PROBED, len(self.text) // 2))
        length = min(max(self.reading.length or config.max_tokens, 2), _PROBED_TOKENS)
        return _stretches(self.text, count, length).to(self.device)


def open_corpus(data: TextData) -> Corpus:
    """Open the text of a recipe."""
    if data.name == "text":
        return open_text(data.path, hub=data.hub, subset=data.subset, column=data.column)
    if data.path is None:
        return open_text(hub=WIKITEXT_HUB, subset=WIKITEXT[data.name])
    own = Path(data.path) / WIKITEXT[data.name]  # a copy of the hub's has a folder for each of its WikiTexts
    return open_text(own if own.is_dir() else data.path, column=data.column)


def _given_corpus(source: SavedModel, settings: TextData | None) -> Corpus:
    """Open the text that the user gave for an evaluation, or else that of the recipe."""
    if source.data is not None:
        return open_text(source.data, column="text" if settings is None else settings.column)
    if settings is None:
        raise LeadlineError("this model does not know its text; give a file or folder of it by --data, or its --recipe")
    if settings.path is not None and not Path(settings.path).exists():
        raise LeadlineError(f"{settings.path}, where this model's text was, does not exist; give --data or --recipe")
    return open_corpus(settings)


def _window(
    model: nn.Module, settings: TextData | None, context: int | None, stride: int | None
) -> tuple[int | None, int | None]:
    """Choose length and stride of an evaluation's windows: those given, or else the recipe's."""
    limit = model.positions.limit if isinstance(model, Decoder) else None
    if context is not None and limit is not None and context > limit:
        raise LeadlineError(f"context is {context}; the model has positions for {limit} tokens, give at most these")
    if settings is None:
        return context, stride
    if stride is None and isinstance(model, Decoder) and settings.stride is not None:
        stride = settings.stride if context is None else min(settings.stride, context)
    return settings.tokens if context is None else context, stride


def _stretches(text: TokenText, count: int, length: int) -> Tensor:
    """Cut ``count`` evenly spread stretches out of a text, (count, up to ``length``)."""
    length = min(length, len(text) // count)
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return torch.from_numpy(text.ids[starts[:, None] + np.arange(length)].astype(np.int64))


def _cross_entropy(smoothing: float, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the loss of logits (B, N, V) and targets (B, N)."""

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=smoothing)

    return torch.compile(cross_entropy) if compiled else cross_entropy


@cache
def _print_once(line: str) -> None:
    """Print a line to the standard error; only once, however many runs this process makes of a text."""
    Console(stderr=True).print(line, soft_wrap=True, highlight=False, markup=False)


def _options(recipe: Recipe, data: TextData, tokenizer: Tokenizer) -> dict[str, Any]:
    """Make the options for ``create_model``: vocabulary and positions follow from the data unless given."""
    config, settings, _ = MODELS[recipe.model.name]
    options = recipe.model_options()
    vocabulary = options.setdefault("vocab_size", tokenizer.vocab_size)
    if vocabulary < tokenizer.vocab_size:
        raise LeadlineError(
            f"model.vocab_size is {vocabulary}; the tokenizer has {tokenizer.vocab_size} tokens, give at least as many"
        )
    tokens = data.tokens
    defaults = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    options.setdefault("max_tokens", tokens or {**defaults, **settings}["max_tokens"])
    if tokens and tokens > options["max_tokens"] and options.get("positions", defaults.get("positions")) == "learned":
        raise LeadlineError(
            f"data.tokens is {tokens}; the model has positions for {options['max_tokens']} (max_tokens)"
        )
    return options


def _refuse_idle_keys(recipe: Recipe, memory: bool) -> None:
    """Raise an error for keys that have no effect on text, or on a model with a memory."""
    if recipe.augment != Augment():
        raise LeadlineError("augment is given, but it is for images; leave it out of a recipe for text")
    if memory and recipe.regularise.smoothing:
        raise LeadlineError("regularise.smoothing is given; an adaptive softmax has no smoothed labels, set it to 0")
    if memory and isinstance(recipe.data, TextData) and recipe.data.stride:
        raise LeadlineError("data.stride is given; a model with a memory reads segment after segment, leave it out")


def _keep_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Save the tokenizer beside the checkpoints, where ``leadline generate`` and ``evaluate`` look for it."""
    begun = (out / RECIPE).is_file() and (out / FILE).is_file()
    if begun and fingerprint(load_tokenizer(out)) != fingerprint(tokenizer):
        text = ", or with another text that it is made of" if learns(tokenizer.kind) else ""
        raise LeadlineError(f"{out} holds a run with another tokenizer{text}; give what it began with, or another out=")
    try:
        save_tokenizer(tokenizer, out)
    except OSError as error:
        raise LeadlineError(f"out={out} cannot be used ({error.strerror}); give another folder") from error
