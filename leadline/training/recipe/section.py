"""``Section``, the base of a recipe's sections, and the types of their values, such as ``Span``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

from leadline.errors import excerpt

Place = Annotated[str, AfterValidator(os.path.expanduser)]  # a file or folder; ~ is the user's own
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
LONGEST = 10**9  # epochs or steps; at a millisecond per step that many steps take 12 days
_SPAN = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(epochs?|steps?|%)?\s*")


class Section(BaseModel):
    """Base of a recipe's sections: plain values that cannot be changed, and no keys but the declared ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, given: Any) -> Any:
        """Refuse true and false where a number is needed: in Python True is 1, and YAML reads yes as True."""
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and _numeric(field.annotation):
                raise ValueError(f"{name} is {str(value).lower()}, which is no number")
        return given


def _numeric(annotation: Any) -> bool:
    return annotation in (int, float) or any(_numeric(part) for part in get_args(annotation))


def refuse_idle(section: Section, why: Mapping[str, str | None]) -> None:
    """Raise an error for a key that is given but has no effect.

    Args:
        section: The section.
        why: For each key the reason why it has no effect; None: it has one.

    Raises:
        ValueError: A key with a reason differs from its default.
    """
    for name, reason in why.items():
        if reason is not None and getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} is given and {reason}, so it would do nothing; leave it out")


class Span:
    """A duration in a training run: ``5`` or ``5 epochs``, ``300 steps``, or ``10 %`` of the run.

    Args:
        given: The duration as in a recipe.

    Attributes:
        text: The duration as given.
        number: The number in it.
        unit: "epoch", "step" or "%".
    """

    def __init__(self, given: object) -> None:
        text = str(given)
        match = None if isinstance(given, bool) else _SPAN.fullmatch(text)
        if match is None:
            raise ValueError(f"{excerpt(given)} is no span; write 5 (epochs), '300 steps' or '10 %'")
        self.text: str = text.strip()
        self.number = float(match[1])
        if self.number > LONGEST:
            raise ValueError(f"{excerpt(given)} is no span; write a number up to {LONGEST:,}")
        unit = (match[2] or "epochs").rstrip("s")
        self.unit: Literal["epoch", "step", "%"] = "%" if unit == "%" else "step" if unit == "step" else "epoch"

    def steps(self, steps_per_epoch: int, total: int) -> int:
        """Return the duration as a number of optimizer steps in a run of ``total`` steps, rounded down."""
        unit = {"epoch": steps_per_epoch, "step": 1, "%": total / 100}[self.unit]
        return math.floor(self.number * unit + 1e-9)  # 1e-9: for products such as 69.999... steps instead of 70

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and (self.number, self.unit) == (other.number, other.unit)

    def __hash__(self) -> int:
        return hash((self.number, self.unit))

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(lambda span: span.text)
        )
