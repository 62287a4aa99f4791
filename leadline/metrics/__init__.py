"""Metrics: functions of token matrices X (..., n, d) and attention matrices P (..., n, n)."""

from leadline.metrics.influence import angular_distance, block_influence, kl_divergence
from leadline.metrics.massive import (
    massive_activations,
    massive_channels,
    massive_tokens,
    relative_length,
    robust_similarity,
)
from leadline.metrics.norms import mixed_norm, norm_1, norm_inf, normalized_residual, residual
from leadline.metrics.rank import attention_entropy, effective_rank
from leadline.metrics.similarity import (
    energy_ratios,
    escalation_rate,
    eta,
    expected_energy_ratios,
    gamma,
    mixing_gains,
    omega,
    sample_cosine,
    token_cosine,
    token_diversity,
    token_similarity,
)
from leadline.metrics.sinks import attention_received, sink_share, sink_weight
from leadline.metrics.spectrum import delta, second_eigenvalue, spectral_radius

__all__ = [
    "angular_distance",
    "attention_entropy",
    "attention_received",
    "block_influence",
    "delta",
    "effective_rank",
    "energy_ratios",
    "escalation_rate",
    "eta",
    "expected_energy_ratios",
    "gamma",
    "kl_divergence",
    "massive_activations",
    "massive_channels",
    "massive_tokens",
    "mixed_norm",
    "mixing_gains",
    "norm_1",
    "norm_inf",
    "normalized_residual",
    "omega",
    "relative_length",
    "residual",
    "robust_similarity",
    "sample_cosine",
    "second_eigenvalue",
    "sink_share",
    "sink_weight",
    "spectral_radius",
    "token_cosine",
    "token_diversity",
    "token_similarity",
]
