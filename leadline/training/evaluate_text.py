"""``leadline evaluate`` of a language model: perplexity on a text, its own or another, and the probe's report."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from leadline.data.text.files import SPLITS, Corpus, open_text
from leadline.data.text.store import TokenText, tokenised
from leadline.errors import LeadlineError, check_choice
from leadline.models import MODELS, TransformerXL
from leadline.models.base import CONFIG_FILE
from leadline.models.checkpoints import STATE, Saved, check
from leadline.models.decoder import Decoder
from leadline.probing import probe
from leadline.training.evaluate import Evaluation, load_for, recipe_of, write_evaluation
from leadline.training.perplexity import LEAKY, at_least, perplexity, sees_future
from leadline.training.recipe.recipe import parse_recipe
from leadline.training.run_folder.folder import check_data
from leadline.training.step import DTYPES
from leadline.training.tasks.language import TextData
from leadline.training.writing import open_language_model, weights_in

_WRITERS = {family.family for family, _, _ in MODELS.values() if issubclass(family, Decoder | TransformerXL)}
_PROBED, _MOST = 4, 512  # stretches of the text for the probe, and their tokens


def is_language_model(folder: str | os.PathLike[str], which: str = "best") -> bool:
    """Whether the weights in a folder, or of a run's checkpoint in it, are those of a language model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged checkpoints, which are told when they are read
            place = weights_in(Path(folder), which)
        config = json.loads((place / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and (config.get("family") in _WRITERS or "model_type" in config)


def evaluate_text(
    folder: str | os.PathLike[str],
    *,
    which: str = "best",
    split: str = "test",
    data: str | os.PathLike[str] | None = None,
    recipe: str | os.PathLike[str] | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    context: int | None = None,
    stride: int | None = None,
    memory: int | None = None,
    lanes: int | None = None,
) -> Evaluation:
    """Evaluate a run's checkpoint, in the precision it was trained in, or a saved model.

    data     a file or a folder of text, such as WikiText-103's own; None: that of the run.
    recipe   whose data and precision are taken instead of the run's.
    context  tokens of a window, the run's unless given; of a segment for Transformer-XL.
    stride   by how much the window moves; the run's, or ``context``, unless given.
    memory   tokens that a Transformer-XL remembers, its own number unless given.
    lanes    stretches in which a Transformer-XL reads the text side by side; 1 unless given.

    The figures are those of ``leadline.training.perplexity``, with the tokens, words and bytes of the text; ``notes``
    say where they are not what they seem.
    """
    check_choice("which", which, ("best", "last"))
    at_least(1, context=context, stride=stride, lanes=lanes)
    at_least(0, memory=memory)
    place = weights_in(Path(folder), which)
    saved = _saved(place)
    state = {} if saved is None else saved.state
    tree = recipe_of(state) if recipe is None else load_for(recipe, TextData, "text")
    settings = cast(TextData, parse_recipe(tree).data) if tree else None
    model, tokenizer = open_language_model(folder, device, which)
    if isinstance(model, TransformerXL):
        model.memory_length = model.memory_length if memory is None else memory
    elif memory is not None or lanes is not None:
        raise LeadlineError("memory or lanes are given; only Transformer-XL has a memory, leave them out")
    elif stride is None and settings is not None:
        stride = settings.stride if settings.stride is None or context is None else min(settings.stride, context)
    limit = model.positions.limit if isinstance(model, Decoder) else None
    if context is not None and limit is not None and context > limit:
        raise LeadlineError(f"context is {context}; the model has positions for {limit} tokens, give at most these")
    length = settings.tokens if context is None and settings is not None else context
    corpus = _corpus(data, settings)
    check_choice("split", split, SPLITS)
    if split not in corpus.splits:
        there = " or ".join(corpus.splits)
        raise LeadlineError(f"{corpus.origin} has no {split} text, only {there}; give --split {there}, or other text")
    text = tokenised(corpus, split, tokenizer, None if settings is None else settings.cache)
    if saved is not None and data is None and recipe is None:
        check_data(saved.run, "text", split, text.fingerprint(), corpus.origin)
    where = next(model.parameters()).device
    dtype = DTYPES.get(tree.get("precision", "float32"))
    with nullcontext() if dtype is None else torch.autocast(where.type, dtype):
        figures = perplexity(model, text, tokenizer, length=length, stride=stride, batch=lanes)
    figures |= {"tokens": len(text), "words": text.sizes.words, "bytes": text.sizes.bytes}
    config: Any = model.config
    stretches = _stretches(text, max(length or config.max_tokens, 2)).to(where)
    notes = [LEAKY] if sees_future(model) else []
    notes += [corpus.notice] if corpus.notice else []
    if data is not None and corpus.by_place:
        notes.append(f"{data} names no split: this is its part for {split}; to score all of it call it {split}.txt")
    report = probe(model, stretches)
    found = Evaluation(place, state.get("step", 0), split, corpus.origin, figures, report, notes=notes)
    if out is not None:
        found.files = write_evaluation(found, Path(out))
    return found


def _saved(place: Path) -> Saved | None:
    """The checkpoint that the weights are of; None for a model that was saved by itself."""
    home = next((home for home in (place, place.parent) if (home / STATE).is_file()), None)
    return None if home is None else check(home)


def _corpus(data: str | os.PathLike[str] | None, settings: TextData | None) -> Corpus:
    if data is not None:
        return open_text(data, column="text" if settings is None else settings.column)
    if settings is None:
        raise LeadlineError("this model does not know its text; give a file or folder of it by --data, or its --recipe")
    if settings.path is not None and not Path(settings.path).exists():
        raise LeadlineError(f"{settings.path}, where this model's text was, does not exist; give --data or --recipe")
    return settings.corpus()


def _stretches(text: TokenText, length: int) -> Tensor:
    """(up to 4, up to 512) tokens, evenly spread over the text."""
    count = max(1, min(_PROBED, len(text) // 2))
    length = min(length, _MOST, len(text) // count)
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return torch.from_numpy(text.ids[starts[:, None] + np.arange(length)].astype(np.int64))
