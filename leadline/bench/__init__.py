"""Benchmarks of attention operators and of whole models: speed, memory and error as ratios within one run."""

from leadline.bench.run import METHODS, SUITES, bench_attention

__all__ = ["METHODS", "SUITES", "bench_attention"]
