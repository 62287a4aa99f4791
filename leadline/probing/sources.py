"""Opens the model that one word on the command line names, and makes example inputs for it."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import find_blocks
from leadline.anatomy.calling import first_line
from leadline.data import load_digits
from leadline.data.hub import quiet_hub
from leadline.data.text.tokenizers import load_tokenizer, tokenizer_home
from leadline.errors import LeadlineError, need, unknown_name
from leadline.files import read_json
from leadline.loading import load
from leadline.models import MODELS, create_model
from leadline.models.base import Model
from leadline.models.foreign.pretrained import check_description, load_pretrained, load_tokenizer_of
from leadline.models.io import model_folder
from leadline.nn.config import DEEPEST

Inputs = dict[str, Any] | Tensor

SAMPLES, TOKENS = 2, 128
_TOO_LARGE = 2_000_000_000  # parameters: 8 GB in float32
_SEED = 0
TEXT = (
    "A lead line is a length of rope with a plummet of lead at its end. Sailors let it down beside the ship and read "
    "from its marks how deep the water is. The hollow in the plummet was filled with tallow, to which sand or shells "
    "of the ground would stick, so that a pilot could tell not only how deep it was but also where he was.",
    "When many people talk at once and each repeats what he has just heard from the others, after a while all of them "
    "say the same. Tokens in a deep network may do this too. Whether they do is a question for a measurement, and "
    "the answer is different from one network to the next.",
)


def open_model(
    spec: str | None = None,
    depth: int | None = None,
    pretrained: str | Path | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> tuple[nn.Module, Any]:
    """Return a model in evaluation mode, and inputs for it.

    Weights are drawn after ``torch.manual_seed(0)``. If the model brings no inputs, they are two samples: token ids of
    our own text if the folder has a tokenizer, otherwise 128 random token ids, or scikit-learn's digits scaled to the
    size of an image model.

    Args:
        spec: What to open, one of

            - a name of ``leadline.list_models()``, such as vit_tiny;
            - a model type of transformers, such as bert, in its default configuration and freshly initialised;
            - timm:NAME, a model of timm, freshly initialised;
            - a folder, the same as ``pretrained``;
            - path/to/file.py:FUNCTION, a function that returns a model, or a model and its inputs; with ``depth`` it
              is called as FUNCTION(depth=depth).
        depth: Number of layers instead of the usual one.
        pretrained: A folder with weights of transformers (``spec`` is then its model type, or None) or of Leadline, or
            the folder of a training run, whose best checkpoint is taken.
        say: Called with a description of the inputs, if the model brings none.

    Raises:
        LeadlineError: If the model cannot be opened, or an argument does not apply to it.
    """
    if depth is not None and not 1 <= depth <= DEEPEST:
        raise LeadlineError(f"depth is {depth}; it must be at least 1 and at most {DEEPEST:,}")
    if pretrained is None and spec is not None and Path(spec).is_dir():
        spec, pretrained = None, spec
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        if pretrained is not None:
            if depth is not None:
                raise LeadlineError(
                    f"depth is {depth} and {pretrained} is a checkpoint, which has its own; leave it out"
                )
            model, inputs = _from_folder(Path(pretrained), spec)
            if inputs is not None:
                say("a page of text, by its own tokenizer")
        elif spec is None:
            raise LeadlineError("no model is given; name one, such as bert, timm:NAME or path/to/file.py:FUNCTION")
        elif spec.startswith("timm:"):
            model, inputs = _from_timm(spec.removeprefix("timm:"), depth), None
        elif ".py:" in spec or spec.endswith(".py"):
            model, inputs = _from_file(spec, depth)
        else:
            model, inputs = _from_name(spec, depth), None
    model.eval()
    if inputs is None:
        inputs = example_inputs(model)
        values = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        say("handwritten digits" if values.is_floating_point() else "token ids drawn at random")
    return model, inputs


def example_inputs(model: nn.Module) -> Inputs:
    """Return two samples that a model takes, made from its configuration.

    Raises:
        LeadlineError: If the configuration does not describe the inputs.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(model, "pretrained_cfg"):  # timm
        channels, height, width = model.pretrained_cfg["input_size"]  # type: ignore[index]
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        return _images(channels, *(size or (height, width)))
    if type(model).__module__.startswith("leadline."):
        if hasattr(config, "image_size"):
            return _images(config.channels, config.image_size, config.image_size)
        return _ids(config.vocab_size, config.max_tokens)
    if config is not None and hasattr(config, "model_type"):  # transformers
        size = getattr(config, "image_size", None)
        if size is not None and getattr(model, "main_input_name", "") == "pixel_values":
            height, width = (size, size) if isinstance(size, int) else size
            return {"pixel_values": _images(getattr(config, "num_channels", 3), height, width)}
        text = config.get_text_config()
        if getattr(text, "vocab_size", None):
            ids = _ids(text.vocab_size, getattr(text, "max_position_embeddings", None) or TOKENS)
            names = {"input_ids": ids}
            return {**names, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else names
    raise LeadlineError(
        f"cannot make inputs for {type(model).__name__}; let the function return the model and its inputs"
    )


def _ids(vocabulary: int, limit: int) -> Tensor:
    """Return random token ids (2, up to 128)."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, vocabulary, (SAMPLES, min(TOKENS, limit)), generator=generator)


def _images(channels: int, height: int, width: int) -> Tensor:
    """Return handwritten digits (2, channels, height, width), each image of mean 0 and standard deviation 1."""
    images = load_digits(_SEED)[0].images[:SAMPLES]
    images = nn.functional.interpolate(images, (height, width), mode="bilinear")
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    return images.expand(-1, channels, -1, -1).contiguous()


def _from_name(name: str, depth: int | None) -> nn.Module:
    if name in MODELS:
        return create_model(name, **({} if depth is None else {"depth": depth}))
    transformers = need("transformers", "hub")
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if name not in types and ("/" in name or Path(name).exists()):
        raise LeadlineError(f"{name} is no folder; give that of a checkpoint or of a run, or the name of a model")
    if name not in types:
        known = sorted([*MODELS, *(kind for kind in ("bert", "gpt2", "albert", "roberta", "vit", "deit", "qwen2"))])
        raise unknown_name("model", name, known)
    config = transformers.AutoConfig.for_model(name)
    if depth is not None:
        if not hasattr(config, "num_hidden_layers"):
            raise LeadlineError(f"{name} has no number of layers to set; leave out depth")
        config.num_hidden_layers = depth
        if hasattr(config, "num_decoder_layers"):
            config.num_decoder_layers = depth
        if hasattr(config, "layer_types"):  # a list with an entry per layer, made for the default depth
            settings = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
            config = type(config).from_dict(settings)
    try:
        with torch.device("meta"):
            skeleton = transformers.AutoModel.from_config(config, trust_remote_code=False)
            size, blocks = sum(p.numel() for p in skeleton.parameters()), len(find_blocks(skeleton))
    except LeadlineError:
        raise
    except ValueError as error:
        raise LeadlineError(f"transformers cannot build a bare {name}; write a file.py:FUNCTION for it") from error
    if depth is not None and depth % blocks:  # layers that share a block (ALBERT) divide the depth
        raise LeadlineError(f"{name} has {blocks} blocks whatever its depth; leave out depth")
    if size > _TOO_LARGE:
        raise LeadlineError(
            f"{name} has {size / 1e9:.1f} billion parameters by default; give a smaller depth, "
            "or a file.py:FUNCTION that builds a narrower one"
        )
    return transformers.AutoModel.from_config(config, trust_remote_code=False)


def _from_timm(name: str, depth: int | None) -> nn.Module:
    timm = need("timm", "timm")
    if name not in timm.list_models():
        longer = [known for known in timm.list_models() if name and known.startswith(name)]
        near = sorted(longer, key=len)[:3] or difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has the names"
        raise LeadlineError(f"unknown timm model {name!r}; {hint}")
    try:
        return timm.create_model(name, pretrained=False, **({} if depth is None else {"depth": depth}))
    except TypeError as error:
        raise LeadlineError(f"timm:{name} takes no depth; leave it out") from error


def _from_file(spec: str, depth: int | None) -> tuple[nn.Module, Any]:
    path, _, function = spec.rpartition(":")
    file = Path(path)
    if not path or not function or not file.is_file():
        raise LeadlineError(
            f"{spec} names no function in a file; write path/to/file.py:FUNCTION, with a file that exists"
        )
    loader = importlib.util.spec_from_file_location(file.stem, file)
    assert loader is not None  # a .py file always has one
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise LeadlineError(f"{file} cannot be run: {first_line(error)}") from error
    build = getattr(module, function, None)
    if not callable(build):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown_name(f"function of {file}", function, functions)
    if depth is not None and "depth" not in inspect.signature(build).parameters:
        raise LeadlineError(f"{function} in {file} takes no depth; leave out depth, or give it that argument")
    try:
        with quiet_hub():  # the function may load a model from the hub
            result = build() if depth is None else build(depth=depth)
    except LeadlineError:
        raise
    except Exception as error:
        raise LeadlineError(f"{function} in {file} failed: {first_line(error)}") from error
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise LeadlineError(
            f"{function} in {file} returns {type(model).__name__}; it must return a model, or model, inputs"
        )
    return model, inputs


def _from_folder(path: Path, spec: str | None) -> tuple[nn.Module, Any]:
    folder = model_folder(path)
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise LeadlineError(f"{folder} is no checkpoint: it has no readable config.json") from error
    if not isinstance(config, dict):
        raise LeadlineError(
            f"{folder} is no checkpoint: its config.json holds a {type(config).__name__}, not a mapping"
        )
    if "leadline" in config:
        own = load(folder)
        return own, _ids_of_text(folder, own)
    kind = config.get("model_type")
    if spec is not None and kind != spec:
        raise LeadlineError(f"{folder} holds a model of type {kind!r}, not {spec!r}; name that type")
    transformers = need("transformers", "hub")
    try:
        check_description(config, folder)
        model = load_pretrained(transformers.AutoModel, folder)
        inputs = _encoded_text(folder, model)
    except LeadlineError:
        raise
    except Exception as error:  # transformers has no one kind of error for a damaged folder
        raise LeadlineError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
    return model, inputs


def _ids_of_text(folder: Path, model: nn.Module) -> Tensor | None:
    """Return ids (2, up to 128) of our text by the tokenizer of one of our models, if it has one."""
    config: Any = model.config
    home = tokenizer_home(folder)
    if home is None or not isinstance(model, Model) or not hasattr(config, "vocab_size"):
        return None
    tokenizer = load_tokenizer(home)
    if tokenizer.vocab_size > config.vocab_size:
        return None
    rows = [torch.from_numpy(tokenizer.encode(text).astype("int64")) for text in TEXT]
    length = min(TOKENS, config.max_tokens, *map(len, rows))
    return torch.stack([row[:length] for row in rows]) if length > 1 else None


def _encoded_text(folder: Path, model: nn.Module) -> Inputs | None:
    """Return our text encoded by the tokenizer of a checkpoint of transformers, if it has one."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")):
        return None
    tokenizer = load_tokenizer_of(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    parameters = inspect.signature(model.forward).parameters
    encoded = tokenizer(
        list(TEXT), return_tensors="pt", truncation=True, max_length=TOKENS, padding=tokenizer.pad_token is not None
    )
    return {name: value for name, value in encoded.items() if name in parameters}
