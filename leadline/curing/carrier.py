"""The state that layers of a cured model share in a forward pass: plan of the cure, carried scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError
from leadline.nn import DeEscalation
from leadline.ops import attention_weights, hopfield_attention

State = tuple[Tensor, ...]


@dataclass
class Plan:
    """The strengths in force in one cured model of another library, shared by everything that the cure put into it.

    It holds no module of the model, so that a cured model can be copied and pickled. ``alpha`` and ``alpha_prime`` may
    change while the model is in use (see ``Ramp``). What the cure put in does not change: ``mixes`` and ``carries`` say
    whether alpha and alpha' have a place in the model.
    """

    alpha: float
    alpha_prime: float
    de_escalation: float  # tau
    de_escalation_at: str
    start: str
    layers: tuple[int, ...]  # the cured ones
    depth: int  # of the model
    causal: bool

    def __post_init__(self) -> None:
        self.mixes, self.carries = self.alpha > 0, self.alpha_prime > 0
        self.de_escalate = DeEscalation(self.de_escalation, causal=self.causal) if self.de_escalation else None

    @classmethod
    def of(cls, strengths: Strengths, depth: int, causal: bool = False) -> Plan:
        """Build the plan for a model of ``depth`` layers; an argument that is not given gets its default."""
        return cls(
            alpha=float(strengths.alpha or 0),
            alpha_prime=float(strengths.alpha_prime or 0),
            de_escalation=float(strengths.de_escalation or 0),
            de_escalation_at=strengths.de_escalation_at or "block-end",
            start=strengths.start or "zero",
            layers=strengths.choose_layers(depth),
            depth=depth,
            causal=causal,
        )

    @property
    def idle(self) -> bool:
        """Return whether all strengths were 0 at the cure, so that nothing needs to be put in."""
        return not (self.mixes or self.carries or self.de_escalation)

    @property
    def strengths(self) -> Strengths:
        """The arguments of ``cure`` that lead to this plan."""
        return Strengths(
            alpha=self.alpha,
            alpha_prime=self.alpha_prime,
            de_escalation=self.de_escalation,
            de_escalation_at=self.de_escalation_at,
            start=self.start,
            layers=None if len(self.layers) == self.depth else list(self.layers),
        )

    def acts_at(self, site: str, index: int) -> bool:
        """Return whether layer ``index`` is de-escalated at ``site``."""
        return self.de_escalate is not None and self.de_escalation_at == site and index in self.layers


class Carrier:
    """The carried scores of one forward pass, a slot per layer, and its padding mask.

    A slot is written once. A layer that activation checkpointing runs again in the backward pass therefore reads the
    same state as the first time, and its gradients are those of a run without checkpointing. Without gradients no
    layer runs again, and a slot is emptied as soon as the next layer has read it.

    Args:
        plan: What the cure does.
        real: (B, N), True = a real token; None: all tokens are real.
        weights: Whether the caller asked for attention weights.
    """

    def __init__(self, plan: Plan, real: Tensor | None = None, weights: bool = False) -> None:
        self.plan = plan
        self.real = real
        self.weights = weights
        self.states: list[State | None] = [None] * plan.depth  # None: not written yet; (): read and emptied
        self.keys = [0] * plan.depth
        self.calls = 0

    def next_call(self) -> int:
        """Return the index of the next layer, where one module serves as several layers (ALBERT)."""
        index = self.calls
        if index >= self.plan.depth:
            raise LeadlineError(
                f"the shared layers of this model ran more than {self.plan.depth} times in one pass; "
                "checkpointing their calls by hand is not supported by a cure"
            )
        self.calls += 1
        return index

    def read(self, index: int, keys: int, device: torch.device) -> State | None:
        """Return the state that layer ``index``, with ``keys`` keys, continues; None if it starts without one."""
        if index == 0 or index - 1 not in self.plan.layers:
            return None
        state = self.states[index - 1]
        if state is None:
            raise LeadlineError(f"layer {index} ran before layer {index - 1}; a cure needs the layers in their order")
        if not state:
            raise reentrant_error()
        if self.keys[index - 1] != keys:
            raise LeadlineError(
                f"layer {index} has {keys} keys and layer {index - 1} has {self.keys[index - 1]}; scores can be "
                "carried only between layers with the same keys, cure with alpha_prime=0"
            )
        return tuple(part.to(device) for part in state)

    def write(self, index: int, keys: int, state: State) -> None:
        """Store the state of layer ``index``; a layer that runs a second time changes nothing."""
        first = self.states[index]
        if first is not None:
            if not first or (state[0].requires_grad and not first[0].requires_grad):
                raise reentrant_error()
            return
        self.states[index], self.keys[index] = state, keys
        if index and not torch.is_grad_enabled():
            self.states[index - 1] = ()


@dataclass
class Slot:
    """The view that one layer has of the carrier."""

    carrier: Carrier
    index: int
    stream: Tensor | None = None  # (B, N, d), what entered the block; only for de-escalation before the MLP

    @property
    def plan(self) -> Plan:
        """The plan of the cure."""
        return self.carrier.plan

    @property
    def cured(self) -> bool:
        """Return whether this layer is cured."""
        return self.index in self.carrier.plan.layers

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, dropout: float, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run Hopfield attention with this layer's state, which is read from the carrier and written to it.

        A layer that is not cured reads and writes no state.

        Args:
            q: (B, H, M, D).
            k: (B, Hkv, N, D).
            v: (B, Hkv, N, D).
            mask: Broadcastable to (B, H, M, N), True = may be attended to.
            causal: Whether a query sees only the keys up to its own place.
            dropout: Probability to drop an attention weight.
            scale: Factor of the scores; None: 1 / sqrt(D).

        Returns:
            The output (B, H, M, D) and the weights (B, H, M, N), which are None unless the caller asked for them.
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


def reentrant_error() -> LeadlineError:
    """Return the error for reentrant activation checkpointing, under which a layer reads a wrong state."""
    return LeadlineError(
        "reentrant activation checkpointing would give wrong gradients in a cured model; "
        "use gradient_checkpointing_kwargs={'use_reentrant': False}"
    )
