"""Language modelling: the next token, by decoders and by Transformer-XL with its memory."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from leadline.training.recipe.section import Place, Section

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from leadline.data.text.files import Corpus
    from leadline.data.text.tokenizers import Tokenizer
    from leadline.training.recipe.recipe import Recipe
    from leadline.training.tasks.base import Carry

Count = Annotated[int, Field(ge=1)]


class TextData(Section):
    """Text from a file, a folder or the hub; see ``leadline.data.text.files.open_text``."""

    name: Literal["text", "wikitext103", "wikitext2"]
    path: Place | None = None  # for WikiText a copy of it; without one it comes from the hub
    hub: str | None = None  # a data set there
    subset: str | None = None
    column: str = "text"
    tokenizer: Place | None = None  # "byte", "word", "bpe", "gpt2", or a folder; None: "word" for WikiText, else "bpe"
    vocab_size: Count | None = None  # of "bpe" (16384 unless given) and "word" (all words unless given)
    tokens: Count | None = None  # of a window or segment; None: the model's max_tokens
    stride: Count | None = None  # of windows in evaluation; None: side by side
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

    def corpus(self) -> Corpus:
        from leadline.data.text.files import WIKITEXT, WIKITEXT_HUB, open_text

        if self.name == "text":
            return open_text(self.path, hub=self.hub, subset=self.subset, column=self.column)
        if self.path is None:
            return open_text(hub=WIKITEXT_HUB, subset=WIKITEXT[self.name])
        own = Path(self.path) / WIKITEXT[self.name]  # a copy of the hub's has a folder for each of its WikiTexts
        return open_text(own if own.is_dir() else self.path, column=self.column)

    @property
    def tokens_by(self) -> str:
        return self.tokenizer or ("bpe" if self.name == "text" else "word")


class LanguageTask:
    """Trains on shuffled windows of the text, or with a memory on lanes of it; evaluates by perplexity."""

    best: tuple[str, Literal["max", "min"]] = ("loss", "min")
    watched: Literal["valid", "test"] = "valid"  # every text has one

    def __init__(self, recipe: Recipe, device: torch.device, rank: int = 0, world: int = 1) -> None:
        import torch
        import torch.nn.functional as F

        from leadline.data.text.batches import Lanes, Windows
        from leadline.data.text.files import SPLITS
        from leadline.data.text.store import tokenised, tokenizer_for
        from leadline.errors import LeadlineError
        from leadline.models import MODELS, TransformerXL
        from leadline.models.decoder import Decoder
        from leadline.training.perplexity import LEAKY

        assert isinstance(recipe.data, TextData)
        self.recipe, self.device, self.rank, self.world = recipe, device, rank, world
        data: TextData = recipe.data
        self.data = data
        family = MODELS[recipe.model.name][0]
        self.memory = issubclass(family, TransformerXL)
        if not self.memory and not issubclass(family, Decoder):
            raise LeadlineError(
                f"model is {recipe.model.name}, which does not write text; give a decoder, such as gpt2_small"
            )
        _refuse_foreign_keys(recipe, self.memory)
        corpus = data.corpus()
        for split in SPLITS:
            corpus.check(split)
        self.left_out = len(corpus.left_out)
        if rank == 0 and corpus.notice:
            _say_once(corpus.notice)
        if rank == 0 and corpus.by_place:
            _say_once(
                f"{corpus.origin} names no split: 90 % are for training, the next 5 % for validation, the last for test"
            )
        self.tokenizer = tokenizer_for(corpus, data.tokens_by, data.vocab_size, data.cache)
        self.texts = {split: tokenised(corpus, split, self.tokenizer, data.cache) for split in SPLITS}
        for split in ("valid", "test"):
            if len(self.texts[split]) < 2:
                raise LeadlineError(f"{corpus.where(split)} has one token; perplexity needs at least 2")
        self.options = _options(recipe, self.tokenizer)
        self.notes = [LEAKY] if self.options.get("de_escalation_form") == "leaky" else []
        if rank == 0 and self.notes:
            _say_once(LEAKY)
        self.length: int = data.tokens or self.options["max_tokens"]
        if data.stride is not None and data.stride > self.length:
            raise LeadlineError(
                f"data.stride is {data.stride}; it must lie between 1 and {self.length}, the tokens of a window"
            )
        kind = Lanes if self.memory else Windows
        self.batches = kind(
            self.texts["train"].ids,
            self.length,
            recipe.batch.size,
            accumulate=recipe.batch.accumulate,
            seed=recipe.seed,
            device=device,
        )

        def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
            wide = logits.flatten(0, 1).float()
            return F.cross_entropy(wide, targets.flatten(), label_smoothing=recipe.regularise.smoothing)

        compiled = recipe.compile != "none" and device.type == "cuda"
        self._cross_entropy = torch.compile(cross_entropy) if compiled else cross_entropy
        self.origin = corpus.origin

    @cached_property
    def fingerprints(self) -> dict[str, Any]:
        return {split: text.fingerprint() for split, text in self.texts.items()}

    def settle(self, out: Path) -> None:
        from leadline.training.run_folder.folder import claim_data

        _keep_tokenizer(self.tokenizer, out)
        claim_data(out, "text", self.fingerprints, self.origin)

    def make_model(self) -> nn.Module:
        from leadline.models import create_model

        return create_model(self.recipe.model.name, **self.options)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry) -> tuple[Tensor, dict[str, Tensor], Carry]:
        if self.memory:
            loss, memory = model(batch["ids"], carry, batch["targets"])
            return loss, {}, memory
        return self._cross_entropy(model(batch["ids"]), batch["targets"]), {}, None

    def evaluate(self, model: nn.Module, split: str = "valid") -> dict[str, float]:
        """See ``leadline.training.perplexity.figures``. A Transformer-XL reads in as many lanes as a batch has."""
        from leadline.training.perplexity import figures, score_segments, score_windows

        text, size = self.texts[split], self.recipe.batch.size
        where: dict[str, Any] = {"device": self.device, "rank": self.rank, "world": self.world}
        if self.memory:
            lanes = min(size, max(1, len(text) // (4 * self.length)))
            return figures(score_segments(model, text.ids, self.length, lanes, **where), text, self.tokenizer)
        score = score_windows(model, text.ids, self.length, self.data.stride, **where)
        return figures(score, text, self.tokenizer)

    def probe_inputs(self) -> Tensor:
        """Two stretches of the validation text, (2, up to 256)."""
        return self.windows(2, 256)

    def windows(self, count: int, most: int = 512) -> Tensor:
        """``count`` stretches of the validation text, evenly spread, (count, up to ``most``)."""
        import numpy as np
        import torch

        ids = self.texts["valid"].ids
        length = min(self.length, most, len(ids) // count)
        starts = np.linspace(0, len(ids) - length, count).astype(np.int64)
        return torch.from_numpy(ids[starts[:, None] + np.arange(length)].astype(np.int64)).to(self.device)

    def describe(self) -> dict[str, Any]:
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


@cache
def _say_once(line: str) -> None:
    """On the standard error; once, however many runs this process makes of a text."""
    from rich.console import Console

    Console(stderr=True).print(line, soft_wrap=True, highlight=False, markup=False)


def _options(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """The overrides for ``create_model``: vocabulary and positions follow from the data unless given."""
    from leadline.errors import LeadlineError
    from leadline.models import MODELS

    family, settings, _ = MODELS[recipe.model.name]
    options = recipe.model_options()
    vocabulary = options.setdefault("vocab_size", tokenizer.vocab_size)
    if vocabulary < tokenizer.vocab_size:
        raise LeadlineError(
            f"model.vocab_size is {vocabulary}; the tokenizer has {tokenizer.vocab_size} tokens, give at least as many"
        )
    given = isinstance(recipe.data, TextData) and recipe.data.tokens
    defaults = {f.name: f.default for f in fields(family.Config) if f.default is not MISSING}
    options.setdefault("max_tokens", given or {**defaults, **settings}["max_tokens"])
    if given and given > options["max_tokens"] and options.get("positions", defaults.get("positions")) == "learned":
        raise LeadlineError(f"data.tokens is {given}; the model has positions for {options['max_tokens']} (max_tokens)")
    return options


def _refuse_foreign_keys(recipe: Recipe, memory: bool) -> None:
    from leadline.errors import LeadlineError

    if recipe.augment != type(recipe.augment)():
        raise LeadlineError("augment is given, but it is for images; leave it out of a recipe for text")
    if memory and recipe.regularise.smoothing:
        raise LeadlineError("regularise.smoothing is given; an adaptive softmax has no smoothed labels, set it to 0")
    if memory and isinstance(recipe.data, TextData) and recipe.data.stride:
        raise LeadlineError("data.stride is given; a model with a memory reads segment after segment, leave it out")


def _keep_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Beside the checkpoints, so that ``leadline generate`` and ``evaluate`` find it."""
    from leadline.data.text.tokenizers import FILE, fingerprint, learns, load_tokenizer, save_tokenizer
    from leadline.errors import LeadlineError
    from leadline.training.run_folder.folder import RECIPE

    begun = (out / RECIPE).is_file() and (out / FILE).is_file()
    if begun and fingerprint(load_tokenizer(out)) != fingerprint(tokenizer):
        text = ", or with another text that it is made of" if learns(tokenizer.kind) else ""
        raise LeadlineError(f"{out} holds a run with another tokenizer{text}; give what it began with, or another out=")
    try:
        save_tokenizer(tokenizer, out)
    except OSError as error:
        raise LeadlineError(f"out={out} cannot be used ({error.strerror}); give another folder") from error
