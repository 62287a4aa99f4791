"""``cure`` and ``uncure``: put a cure into a model, take it out, change its strengths; the makes of models."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import nn

from leadline.curing.makes.huggingface.families import FAMILIES, refuse_features
from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError

PLACE = "_leadline_cure"  # attribute that holds the ``Cure``, of the module that ``find_make`` returns

Module = TypeVar("Module", bound=nn.Module)


class Cure(Protocol):
    """A cure inside a model, as one make puts it in. It is copied and pickled with the model."""

    @property
    def strengths(self) -> Strengths:
        """The strengths in force."""
        ...

    def set_strengths(self, alpha: float, alpha_prime: float) -> None:
        """Change alpha and alpha'."""
        ...

    def remove(self) -> None:
        """Make the model what it was before the cure."""
        ...


class Make(NamedTuple):
    """One make of models: how it is recognised, and the Python module that cures it.

    The Python module offers two functions:

    - ``find_part(model)`` returns the part of ``model`` that carries the cure, or None if it is not of this make.
    - ``install(model, part, strengths)`` puts the cure in and returns it, a ``Cure``. It refuses what cannot be cured
      before the first change.

    Attributes:
        library: The package that defines the classes of such models. It may not be installed, so the make is tried, and
            its Python module imported, only for a model with such classes.
        module: The Python module.
        models: What can be cured, for error messages.
    """

    library: str
    module: str
    models: str


MAKES = (
    Make("leadline", "leadline.curing.makes.ours", "our own models"),
    Make("timm", "leadline.curing.makes.timm", "timm's VisionTransformer with its usual blocks"),
    Make(
        "transformers",
        "leadline.curing.makes.huggingface.install",
        f"transformers' {', '.join(sorted(name.removesuffix('Model') for name in FAMILIES))}",
    ),
)


def find_make(model: nn.Module) -> tuple[Any, Any]:
    """Return the Python module that cures ``model``, and the part of ``model`` that carries the cure.

    Raises:
        LeadlineError: If the model is of no make that can be cured.
    """
    libraries = {type(module).__module__.partition(".")[0] for module in model.modules()}
    for make in MAKES:
        if make.library in libraries:
            module = import_module(make.module)
            part = module.find_part(model)
            if part is not None:
                return module, part
    refuse_features(model)
    *others, last = (make.models for make in MAKES)
    raise LeadlineError(f"{type(model).__name__} cannot be cured; known are {', '.join(others)}, and {last}")


def cure(
    model: Module,
    *,
    alpha: float | None = None,
    alpha_prime: float | None = None,
    de_escalation: float | None = None,
    layers: Iterable[int] | None = None,
    de_escalation_at: str | None = None,
    start: str | None = None,
) -> Module:
    """Put Hopfield attention, de-escalation or both into a model, in place.

    At least one strength must be given: alpha, alpha_prime or de_escalation. In models of other libraries, 0 does
    nothing and keeps the original attention function. In ours, an argument that is given replaces what the model has,
    and 0 takes it out. A model that cannot be cured is left untouched.

    ``uncure`` takes the cure out. ``save_pretrained`` of transformers writes it into the configuration, and
    ``leadline.load`` reads it back.

    Args:
        model: One of ours; timm's VisionTransformer; transformers' GPT-2, LLaMA, Mistral, Mixtral, Qwen2, Qwen3, Gemma,
            BERT, RoBERTa, XLM-RoBERTa, ELECTRA, ALBERT, ViT or DeiT, with or without a head.
        alpha: Weight of the layer's own input x, in [0, 1): y = alpha x + (1 - alpha) attention(x).
        alpha_prime: Weight of the scores carried from the layers before, in [0, 1).
        de_escalation: tau, the part of the token mean that is subtracted, in [0, 1]. In a causal model the mean is that
            of the tokens before.
        layers: The layers to cure, from 0; negative numbers count from the end. All unless given. Scores are carried
            within each run of consecutive cured layers. Not for our own models.
        de_escalation_at: "block-end", "ffn-input" or "attention-input". Unless given, our own models use the place in
            their configuration, and others the end of the block.
        start: What the first layer does without carried scores, "zero" or "scores". Unless given, our own models use
            their configuration, and others "zero".

    Returns:
        The same model.

    Raises:
        LeadlineError: If an argument is wrong, or the model cannot be cured, is cured already or is compiled.

    Example:
        >>> cure(AutoModelForCausalLM.from_pretrained("gpt2"), alpha=0.5, alpha_prime=0.5)
    """
    strengths = Strengths(
        alpha=alpha,
        alpha_prime=alpha_prime,
        de_escalation=de_escalation,
        de_escalation_at=de_escalation_at,
        start=start,
        layers=layers,
    )
    return install_cure(model, strengths)


def install_cure(model: Module, strengths: Strengths) -> Module:
    """Cure a model in place with arguments that are checked already; see ``cure``."""
    _check_model(model)
    if _cured_part(model) is not None:
        raise LeadlineError(f"this {type(model).__name__} is cured already; call leadline.uncure(model) first")
    make, part = find_make(model)
    part.__dict__[PLACE] = make.install(model, part, strengths)
    return model


def uncure(model: Module) -> Module:
    """Take the cure out of a model, in place: the model is what it was before, bit for bit.

    Returns:
        The same model.

    Raises:
        LeadlineError: If the model is not cured or is compiled.
    """
    _check_model(model)
    part = _cured_part(model)
    if part is None:
        raise LeadlineError(f"this {type(model).__name__} is not cured; there is nothing to undo")
    part.__dict__.pop(PLACE).remove()
    return model


def strengths(model: nn.Module) -> Strengths:
    """Return the strengths in force in a cured model."""
    return _cure_of(model).strengths


def set_strengths(model: nn.Module, alpha: float, alpha_prime: float) -> None:
    """Change alpha and alpha' of a cured model.

    A strength that was 0 when a model of another library was cured has no place in it, and stays without effect.
    """
    _cure_of(model).set_strengths(alpha, alpha_prime)


def _cure_of(model: nn.Module) -> Cure:
    part = _cured_part(model)
    if part is None:
        raise LeadlineError(f"this {type(model).__name__} is not cured; call leadline.cure(model, ...) first")
    return part.__dict__[PLACE]


def _cured_part(model: nn.Module) -> Any | None:
    """The module in ``model`` that carries a cure, if any."""
    return next((module for module in model.modules() if PLACE in module.__dict__), None)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise LeadlineError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
        raise LeadlineError(
            "the model is compiled, and its compiled code would not notice; cure it first, then compile"
        )
