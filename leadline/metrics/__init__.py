"""Metrics: functions of token matrices X (..., n, d) and attention matrices P (..., n, n)."""

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
    token_cosine,
    token_diversity,
    token_similarity,
)
from leadline.metrics.spectrum import delta, second_eigenvalue, spectral_radius

__all__ = [
    "attention_entropy",
    "delta",
    "effective_rank",
    "energy_ratios",
    "escalation_rate",
    "eta",
    "expected_energy_ratios",
    "gamma",
    "mixed_norm",
    "mixing_gains",
    "norm_1",
    "norm_inf",
    "normalized_residual",
    "omega",
    "residual",
    "second_eigenvalue",
    "spectral_radius",
    "token_cosine",
    "token_diversity",
    "token_similarity",
]
