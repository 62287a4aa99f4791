"""What a cure is, and what travels through one forward pass of a cured model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError, check_choice
from leadline.nn import DeEscalation
from leadline.nn.config import SITES
from leadline.ops import attention_weights, hopfield_attention

KEY = "leadline"  # the one keyword argument that carries the state through a model, and the key in its configuration

State = tuple[Tensor, ...]


@dataclass
class Plan:
    """The strengths of one cured model, shared by everything the cure put into it.

    Plain numbers and no modules of the model: a cured model can be copied and pickled. ``alpha`` and
    ``alpha_prime`` may change while the model is in use (see ``Ramp``); what was put in does not.
    """

    alpha: float
    alpha_prime: float
    de_escalation: float
    de_escalation_at: str
    start: str
    layers: tuple[int, ...]  # the cured ones
    depth: int
    causal: bool = False
    implementation: str | None = None  # the attention function of transformers before the cure

    def __post_init__(self) -> None:
        self.mixes, self.carries = self.alpha > 0, self.alpha_prime > 0
        self.de_escalate = DeEscalation(self.de_escalation, causal=self.causal) if self.de_escalation else None

    def acts_at(self, site: str, index: int) -> bool:
        """Whether layer ``index`` is de-escalated at ``site``."""
        return self.de_escalate is not None and self.de_escalation_at == site and index in self.layers

    def describe(self) -> dict[str, Any]:
        """The arguments of ``cure`` that lead here."""
        return {
            "alpha": self.alpha,
            "alpha_prime": self.alpha_prime,
            "de_escalation": self.de_escalation,
            "de_escalation_at": self.de_escalation_at,
            "start": self.start,
            "layers": None if len(self.layers) == self.depth else list(self.layers),
        }


def check_strengths(
    alpha: float | None,
    alpha_prime: float | None,
    de_escalation: float | None,
    de_escalation_at: str | None,
    start: str | None,
) -> None:
    """Something must be given, and each strength lie in its interval."""
    if alpha is None and alpha_prime is None and de_escalation is None:
        raise LeadlineError("no strength is given; give alpha, alpha_prime or de_escalation, such as alpha=0.5")
    for name, value, top in (
        ("alpha", alpha, False),
        ("alpha_prime", alpha_prime, False),
        ("de_escalation", de_escalation, True),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LeadlineError(f"{name} is {value!r}; it must be a number")
        if not (0 <= value < 1 or (top and value == 1)):
            raise LeadlineError(f"{name} is {value}; it must lie in {'[0, 1]' if top else '[0, 1)'}, 0 does nothing")
    if de_escalation_at is not None:
        check_choice("de_escalation_at", de_escalation_at, SITES)
    if start is not None:
        check_choice("start", start, ("zero", "scores"))


def choose_layers(layers: Iterable[int] | None, depth: int) -> tuple[int, ...]:
    """The layers to cure, in order; None is all of them, negative numbers count from the end."""
    if layers is None:
        return tuple(range(depth))
    if not isinstance(layers, Iterable):
        raise LeadlineError(f"layers is {layers!r}; give a list of them, such as [0, 1]")
    chosen = list(layers)
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -depth <= layer < depth:
            raise LeadlineError(f"layers has {layer!r}; this model's layers are the integers 0 to {depth - 1}")
    if not chosen:
        raise LeadlineError("layers is empty; leave it out to cure all of them")
    return tuple(sorted({layer % depth for layer in chosen}))


class Carrier:
    """What one forward pass hands from layer to layer: carried scores in a slot per layer, and the padding.

    A slot is written once. A layer that is recomputed in the backward pass (activation checkpointing)
    therefore reads the very state it read the first time, and the gradients are those of the plain run.
    Without gradients nothing is recomputed and a slot is emptied as soon as the next layer has read it.
    """

    def __init__(self, plan: Plan, real: Tensor | None = None, weights: bool = False) -> None:
        self.plan = plan
        self.real = real  # (B, N), True = a real token; None: all are
        self.weights = weights  # whether attention weights are asked for
        self.states: list[State | None] = [None] * plan.depth  # (): read and let go
        self.keys = [0] * plan.depth
        self.calls = 0

    def next_call(self) -> int:
        """The layer's number where one module serves as several layers (ALBERT)."""
        index = self.calls
        if index >= self.plan.depth:
            raise LeadlineError(
                f"the shared layers of this model ran more than {self.plan.depth} times in one pass; "
                "checkpointing their calls by hand is not supported by a cure"
            )
        self.calls += 1
        return index

    def read(self, index: int, keys: int, device: torch.device) -> State | None:
        """The state that layer ``index`` continues, None where it starts afresh; ``keys`` is its number of keys."""
        if index == 0 or index - 1 not in self.plan.layers:
            return None
        state = self.states[index - 1]
        if state is None:
            raise LeadlineError(f"layer {index} ran before layer {index - 1}; a cure needs the layers in their order")
        if not state:
            raise _reentrant()
        if self.keys[index - 1] != keys:
            raise LeadlineError(
                f"layer {index} has {keys} keys and layer {index - 1} has {self.keys[index - 1]}; scores can be "
                "carried only between layers with the same keys, cure with alpha_prime=0"
            )
        return tuple(part.to(device) for part in state)

    def write(self, index: int, keys: int, state: State) -> None:
        """Keep the state of layer ``index``, unless this is its recomputation."""
        kept = self.states[index]
        if kept is not None:
            if not kept or (state[0].requires_grad and not kept[0].requires_grad):
                raise _reentrant()
            return
        self.states[index], self.keys[index] = state, keys
        if index and not torch.is_grad_enabled():
            self.states[index - 1] = ()


@dataclass
class Slot:
    """A layer's view of the carrier."""

    carrier: Carrier
    index: int
    stream: Tensor | None = None  # what entered the block, where de-escalation before the MLP needs it

    @property
    def plan(self) -> Plan:
        return self.carrier.plan

    @property
    def cured(self) -> bool:
        return self.index in self.carrier.plan.layers

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, dropout: float, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hopfield attention with this layer's state, which is read from and written to the carrier.

        Returns the output (B, H, M, D) and, where asked for, the weights (B, H, M, N). A layer that is not cured
        carries nothing on.
        """
        keys, plan, weights = k.shape[2], self.plan, self.carrier.weights
        out, state = hopfield_attention(
            q,
            k,
            v,
            self.carrier.read(self.index, keys, q.device) if self.cured else None,
            alpha_prime=plan.alpha_prime if self.cured else 0.0,
            start=plan.start,
            mask=mask,
            causal=causal,
            dropout=dropout,
            scale=scale,
            backend="reference" if weights else "auto",
        )
        if self.cured:
            self.carrier.write(self.index, keys, state)
        return out, attention_weights(state[0], mask, causal).to(v.dtype) if weights else None


def _reentrant() -> LeadlineError:
    return LeadlineError(
        "reentrant activation checkpointing would give wrong gradients in a cured model; "
        "use gradient_checkpointing_kwargs={'use_reentrant': False}"
    )


def refuse_reentrant() -> None:
    raise _reentrant()
