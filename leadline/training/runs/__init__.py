"""Many training runs: several at a time, each recorded as soon as it ends, none made twice.

A record is one small file: the figures of a run, its curves, and the probe's report on the trained model. The weights
are deleted. Jobs with the same recipe share a run.
"""

from leadline.training.runs.jobs import Job, Setting
from leadline.training.runs.pool import run_all
from leadline.training.runs.record import Record

__all__ = ["Job", "Record", "Setting", "run_all"]
