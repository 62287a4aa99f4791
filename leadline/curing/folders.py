"""``cure_folder``: cure a checkpoint on disk and save it in a new folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from leadline.curing.entry import install_cure
from leadline.curing.makes import ours
from leadline.curing.makes.huggingface.attention import KEY
from leadline.curing.makes.huggingface.folders import copy_small_files, load_plain, read_mapping
from leadline.curing.strengths import Strengths
from leadline.data.text.tokenizers import FILES, tokenizer_home
from leadline.errors import LeadlineError
from leadline.files import whole_folder
from leadline.models.io import load_model, model_folder


def cure_folder(folder: str | os.PathLike[str], out: str | os.PathLike[str], **strengths: Any) -> Path:
    """Cure a checkpoint, ours or one of transformers, and save the cured model.

    The tokenizer is copied with it, and so are the other small files of a checkpoint of transformers.

    Args:
        folder: The folder of the checkpoint, or of a training run. Of a run the best checkpoint is taken, with its
            averaged weights where it has them.
        out: The folder for the cured model, a new or an empty one.
        **strengths: The keyword arguments of ``cure``.

    Returns:
        The path ``out``.

    Raises:
        LeadlineError: If the strengths are wrong or do nothing, the checkpoint cannot be read or cured, it has this
            cure already, or ``out`` cannot be written.
    """
    arguments = Strengths(**strengths)
    source, target = model_folder(folder), Path(out)
    description = read_mapping(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LeadlineError(f"{target} exists and is not an empty folder; give a new one for the cured model")
    if isinstance(description.get(KEY), dict):
        raise LeadlineError(f"{source} is cured already; load it with leadline.load and call leadline.uncure first")
    if KEY in description:
        _cure_ours(source, target, arguments)
    elif not any((arguments.alpha, arguments.alpha_prime, arguments.de_escalation)):
        raise LeadlineError("every strength is 0, which does nothing; nothing is written, give one above 0")
    else:
        model: Any = install_cure(load_plain(source, description), arguments)
        with _all_or_nothing(target) as new:
            model.save_pretrained(new)
            copy_small_files(source, new)
    return target


def _cure_ours(source: Path, target: Path, arguments: Strengths) -> None:
    """Cure one of our own models on disk; refuse a cure that changes nothing."""
    model: Any = load_model(source)
    before = ours.strengths_of(model.config)
    install_cure(model, arguments)
    if ours.strengths_of(model.config) == before:
        strengths = f"alpha {before.alpha}, alpha_prime {before.alpha_prime}, start {before.start}"
        if before.de_escalation:
            strengths += f", de_escalation {before.de_escalation}, at {before.de_escalation_at}"
        raise LeadlineError(f"{source} has {strengths} already; give a strength that changes it")
    home = tokenizer_home(source) if hasattr(model.config, "vocab_size") else None
    with _all_or_nothing(target) as new:
        model.save(new)
        for name in FILES:
            if home is not None and (home / name).is_file():
                shutil.copy2(home / name, new / name)


@contextmanager
def _all_or_nothing(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then becomes ``target``; a failure or a kill leaves nothing there."""
    try:
        with whole_folder(target) as new:
            yield new
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise LeadlineError(f"{target} cannot be written ({why}); give another folder by --out") from error
