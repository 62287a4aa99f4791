"""The command ``leadline models``: which models can be built."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from leadline.cli.console import Json

EXAMPLES = "Example: leadline models --json"


def models(as_json: Json = False) -> None:
    """List the models that can be built, with what they are."""
    from leadline.models import MODELS

    rows = {name: description for name, (_, _, description) in sorted(MODELS.items())}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("name", "what it is", title="leadline.create_model(name, ...)", title_justify="left")
    for name, description in rows.items():
        table.add_row(name, description)
    Console().print(table)
