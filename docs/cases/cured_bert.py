"""The BERT of the first case with the recommended cure, for a page that shows it before and after.

leadline probe docs/cases/cured_bert.py:make_model --before bert.json --out cured.html
"""

from __future__ import annotations

from transformers import BertConfig, BertModel

import leadline as ll


def make_model(depth: int = 100) -> BertModel:
    """Return a cured BERT at initialisation."""
    return ll.cure(BertModel(BertConfig(num_hidden_layers=depth)), de_escalation=0.1)
