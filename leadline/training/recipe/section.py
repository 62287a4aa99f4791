"""The parts recipes are made of: a section that knows its keys, and spans of training."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

Place = Annotated[str, AfterValidator(os.path.expanduser)]  # a file or folder; ~ is the user's own
_SPAN = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(epochs?|steps?|%)?\s*")


class Section(BaseModel):
    """A section of a recipe: plain values, fixed once read, nothing but the keys that are declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, given: Any) -> Any:
        """Python's True is 1, and YAML's yes is True."""
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and _numeric(field.annotation):
                raise ValueError(f"{name} is {str(value).lower()}, which is no number")
        return given


def _numeric(annotation: Any) -> bool:
    return annotation in (int, float) or any(_numeric(part) for part in get_args(annotation))


def refuse_idle(section: Section, why: Mapping[str, str | None]) -> None:
    """A key that is given and would do nothing is an error. ``why`` it would, by key; None: it does something."""
    for name, reason in why.items():
        if reason is not None and getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} is given and {reason}, so it would do nothing; leave it out")


class Span:
    """A stretch of training: ``5`` or ``5 epochs``, ``300 steps``, or ``10 %`` of the run."""

    def __init__(self, given: object) -> None:
        text = str(given)
        found = None if isinstance(given, bool) else _SPAN.fullmatch(text)
        if found is None:
            raise ValueError(f"{given!r} is no span; write 5 (epochs), '300 steps' or '10 %'")
        self.text: str = text.strip()
        self.number = float(found[1])
        if math.isinf(self.number):
            raise ValueError(f"{given!r} is no span; write a smaller number")
        unit = (found[2] or "epochs").rstrip("s")
        self.unit: Literal["epoch", "step", "%"] = "%" if unit == "%" else "step" if unit == "step" else "epoch"

    def steps(self, steps_per_epoch: int, total: int) -> int:
        """As a number of optimizer steps in a run of ``total`` steps, rounded down; 5e-10 saves 70 % from 69.99..."""
        unit = {"epoch": steps_per_epoch, "step": 1, "%": total / 100}[self.unit]
        return math.floor(self.number * unit + 1e-9)

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
