"""Results of the papers: expected escalation rates (TSE) and bounds on the residual (HOP)."""

from leadline.metrics import expected_energy_ratios
from leadline.theory.bounds import LayerBound, largest_leaf, layer_bound, network_bound
from leadline.theory.escalation import critical_tau, expected_rate, premise_holds, rate_estimate, rate_lower_bound
from leadline.theory.layers import AttentionLayer, attention_layers

__all__ = [
    "AttentionLayer",
    "LayerBound",
    "attention_layers",
    "critical_tau",
    "expected_energy_ratios",
    "expected_rate",
    "largest_leaf",
    "layer_bound",
    "network_bound",
    "premise_holds",
    "rate_estimate",
    "rate_lower_bound",
]
