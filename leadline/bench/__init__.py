"""Speed, memory and error of the attention operators and of whole models, as ratios within one run."""

from leadline.bench.run import METHODS, SUITES, bench_attention

__all__ = ["METHODS", "SUITES", "bench_attention"]
