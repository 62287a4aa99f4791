"""``leadline generate``: a language model and its tokenizer from a folder, and the text it writes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leadline.anatomy.calling import first_line
from leadline.data.text.tokenizers import FILE, Tokenizer, load_tokenizer, tokenizer_home
from leadline.errors import LeadlineError, need
from leadline.files import read_json
from leadline.loading import load
from leadline.machine import choose_device
from leadline.models import TransformerXL, convert
from leadline.models.base import CONFIG_FILE
from leadline.models.decoder import Decoder
from leadline.models.foreign.pretrained import check_description, load_pretrained
from leadline.models.generation import stream_tokens
from leadline.models.io import averaged, model_folder

_BROKEN = "\ufffd"  # the replacement character, for bytes that are no whole character, or not yet


def open_language_model(
    folder: str | os.PathLike[str], device: str | None = None, which: str = "best"
) -> tuple[nn.Module, Tokenizer]:
    """Load a language model and its tokenizer.

    Args:
        folder: The folder of a run, of one of its checkpoints, of ``model.save``, or of a GPT-2 or LLaMA of
            transformers. The tokenizer lies in it or in the folder above.
        device: "cpu" or "cuda". None: a GPU if there is one.
        which: The checkpoint of a run: "best" or "last".

    Returns:
        A decoder or Transformer-XL in evaluation mode, with averaged weights where the run has them; its tokenizer.

    Raises:
        LeadlineError: There is no language model or no tokenizer, or they do not belong together.
    """
    source = Path(folder)
    place = weights_in(source, which)
    model = _model(place)
    if not isinstance(model, Decoder | TransformerXL):
        if not hasattr(model, "family"):
            raise LeadlineError(
                f"{place} holds a cured {type(model).__name__}; use it in Python, by leadline.load({str(place)!r})"
            )
        raise LeadlineError(f"{place} holds a {model.family} model, which does not write text; give a decoder's folder")
    home = tokenizer_home(place)
    if home is None:
        raise LeadlineError(f"{source} has no {FILE}, neither has the folder above; put the model's tokenizer there")
    tokenizer = load_tokenizer(home)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise LeadlineError(
            f"{home / FILE} has {tokenizer.vocab_size} tokens and the model {model.config.vocab_size}; they do not "
            "belong together"
        )
    return model.to(choose_device(device)).eval(), tokenizer


def weights_in(folder: Path, which: str = "best") -> Path:
    """Find the folder with the weights: this one or that of a run's checkpoint, averaged weights if there are any."""
    return averaged(model_folder(folder, "last" if which == "last" else "best"))


def write(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, tokens: int, cache: bool = True, **options: Any
) -> Iterator[str]:
    """Continue a prompt, and yield the new text piece by piece, in whole characters.

    Args:
        model: A decoder or Transformer-XL.
        tokenizer: Its tokenizer.
        prompt: The text to continue. Only its end is used if the model has too few positions.
        tokens: Number of tokens to write.
        cache: Store the past instead of computing it again.
        **options: ``temperature``, ``top_k``, ``top_p``, ``stop`` and ``generator``, see
            ``leadline.models.generation.stream_tokens``.
    """
    ids = tokenizer.encode(prompt)
    if len(ids) == 0:
        raise LeadlineError("the prompt is empty; give a few words to begin with")
    device = next(model.parameters()).device
    most = model.positions.limit if isinstance(model, Decoder) else None
    if most is not None and len(ids) > most:
        warnings.warn(f"the prompt has {len(ids)} tokens; the model sees the last {most} of them", stacklevel=2)
        ids = ids[-most:]
    first = torch.tensor(ids.astype("int64"), device=device)[None]
    options["vocabulary"] = tokenizer.vocab_size  # the model's may be padded with ids that no token has
    stream = stream_tokens(model, first, tokens, cache, **options)  # type: ignore[arg-type]
    return _decoded(stream, tokenizer, ids.tolist())


def _decoded(stream: Iterator[torch.Tensor], tokenizer: Tokenizer, before: list[int]) -> Iterator[str]:
    """Decode a stream of tokens into pieces of text.

    Each piece is decoded together with the tokens of the piece before, on which its text may depend. It ends at the
    end of a character, since tokenizers that fall back to bytes decode a row of byte tokens as a whole.
    """
    fresh: list[int] = []
    for new in stream:
        fresh.append(int(new))
        piece = tokenizer.decode(before + fresh)[len(tokenizer.decode(before)) :]
        if piece and not piece.endswith(_BROKEN):
            yield piece
            before, fresh = fresh, []
    rest = tokenizer.decode(before + fresh)[len(tokenizer.decode(before)) :]
    if rest:
        yield rest


def _model(folder: Path) -> Any:
    """Load the model in a folder, ours or one of transformers, which is converted."""
    try:
        config = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise LeadlineError(f"{folder / CONFIG_FILE} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise LeadlineError(f"{folder / CONFIG_FILE} holds a {type(config).__name__}; a model's is a mapping")
    if "leadline" in config:
        return load(folder)
    transformers = need("transformers", "hub")
    try:
        check_description(config, folder)
        theirs = load_pretrained(transformers.AutoModelForCausalLM, folder)
    except LeadlineError:
        raise
    except Exception as error:  # transformers has no one kind of error for a damaged folder
        raise LeadlineError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
    return convert(theirs)
