"""Cured models on disk: loading them, and curing a checkpoint folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from leadline.curing.makes.huggingface.install import forget
from leadline.curing.operate import cure
from leadline.curing.plan import KEY, check_strengths
from leadline.data.text.tokenizers import FILES, tokenizer_home
from leadline.errors import LeadlineError, need
from leadline.models.io import model_folder

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


def is_cured_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether ``folder`` holds a cured transformers model: its config.json has a mapping under "leadline"."""
    try:
        return isinstance(json.loads((Path(folder) / "config.json").read_text()).get(KEY), dict)
    except (OSError, ValueError, AttributeError):
        return False


def load_cured(folder: str | os.PathLike[str], **options: Any) -> nn.Module:
    """The cured transformers model that ``save_pretrained`` wrote into ``folder``, cured as it was.

    ``options`` go to ``from_pretrained``: device_map, dtype and so on. The dtype is the saved one unless given.
    """
    description = _read_config(model_folder(folder))
    strengths = description.get(KEY)
    if not isinstance(strengths, dict):
        raise LeadlineError(f"{folder} holds no cured model of transformers; leadline.load takes any model")
    wanted = ("alpha", "alpha_prime", "de_escalation", "de_escalation_at", "start", "layers")
    missing = [name for name in wanted if name not in strengths]
    if missing:
        raise LeadlineError(f"the {KEY!r} entry of {folder}/config.json lacks {', '.join(missing)}; save it again")
    model = _load_plain(Path(folder), description, strengths.get("attn_implementation"), options)
    return cure(model, **{name: strengths[name] for name in wanted})


def cure_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    alpha_prime: float | None = None,
    de_escalation: float | None = None,
    layers: Iterable[int] | None = None,
    de_escalation_at: str | None = None,
    start: str | None = None,
) -> Path:
    """Cure the checkpoint in ``folder``, ours or one of transformers, and save it in ``out``; returns ``out``.
    The other arguments are those of ``cure``.

    ``folder`` may be that of a training run: its best checkpoint is taken, averaged weights where it has them.
    The tokenizer is copied along, with the other small files of a checkpoint of transformers.
    """
    check_strengths(alpha, alpha_prime, de_escalation, de_escalation_at, start)
    source, target = model_folder(folder), Path(out)
    description = _read_config(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LeadlineError(f"{target} exists and is not an empty folder; give a new one for the cured model")
    if isinstance(description.get(KEY), dict):
        raise LeadlineError(f"{source} is cured already; load it with leadline.load and call leadline.uncure first")
    options: dict[str, Any] = {
        "alpha": alpha,
        "alpha_prime": alpha_prime,
        "de_escalation": de_escalation,
        "layers": layers,
        "de_escalation_at": de_escalation_at,
        "start": start,
    }
    if KEY in description:
        from leadline.models import load

        own: Any = load(source)
        before = _strengths(own.config)
        cure(own, **options)
        if _strengths(own.config) == before:
            has = ", ".join(f"{name} {value}" for name, value in before.items())
            raise LeadlineError(f"{source} has {has} already; give a strength that changes it")
        home = tokenizer_home(source) if hasattr(own.config, "vocab_size") else None
        with _whole(target):
            own.save(target)
            for name in FILES:
                if home is not None and (home / name).is_file():
                    shutil.copy2(home / name, target / name)
        return target
    model: Any = cure(_load_plain(source, description, None, {}), **options)
    with _whole(target):
        model.save_pretrained(target)
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and not (target / file.name).exists():
                shutil.copy2(file, target / file.name)
    return target


@contextmanager
def _whole(target: Path) -> Iterator[None]:
    """Inside, a new or empty folder is filled; if that fails nothing is left in it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        for file in target.glob("*"):
            with suppress(OSError):
                file.unlink()
        why = error.strerror if isinstance(error, OSError) else error
        raise LeadlineError(f"{target} cannot be written ({why}); give another folder by --out") from error


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        description = json.loads(file.read_text())
    except ValueError as error:
        raise LeadlineError(f"{file} is not JSON ({error}); it is damaged, save the model again") from error
    if not isinstance(description, dict):
        raise LeadlineError(f"{file} holds a {type(description).__name__}; a checkpoint's is a mapping")
    return description


def _load_plain(folder: Path, description: dict[str, Any], attention: str | None, options: dict[str, Any]) -> nn.Module:
    """The transformers model in ``folder``, without its cure."""
    names = description.get("architectures") or []
    if "model_type" not in description or not names:
        raise LeadlineError(f"{folder / 'config.json'} names no model_type and architectures; it is not transformers'")
    transformers = need("transformers", "hub")
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise LeadlineError(f"{folder} holds a {names[0]}, which this transformers does not have; update it")
    plain = dict(description)
    forget(plain)
    try:
        config = kind.config_class.from_dict(plain)
        config._attn_implementation = options.pop("attn_implementation", attention)
        return kind.from_pretrained(folder, config=config, local_files_only=True, **{"dtype": "auto", **options})
    except LeadlineError:
        raise
    except Exception as error:  # transformers has no one kind of error for a damaged folder
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise LeadlineError(f"{folder} cannot be loaded: {first}") from error


def _strengths(config: Any) -> dict[str, Any]:
    """How one of our models is cured."""
    alpha, alpha_prime = config.strengths
    tau = {"de_escalation": config.de_escalation, "at": config.de_escalation_at} if config.de_escalation else {}
    return {"alpha": alpha, "alpha_prime": alpha_prime, "start": config.start, **tau}
