import os
from contextlib import suppress

import pytest
import torch

if not torch.cuda.is_available():  # kernels are then run by Triton's interpreter; set before they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

with suppress(ImportError):  # the kernel tests do without it
    from hypothesis import settings

    settings.register_profile("leadline", deadline=None, max_examples=40, derandomize=True)
    settings.load_profile("leadline")


def pytest_addoption(parser):
    parser.addoption("--all-installed", action="store_true", help="a test skipped for want of a package is a failure")


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--all-installed"):
        return
    missing = {
        str(report.longrepr[2])
        for report in reporter.stats.get("skipped", ())
        if "could not import" in report.longrepr[2]
    }
    for reason in sorted(missing):
        reporter.write_line(f"--all-installed, and yet: {reason}", red=True)
    if missing and session.exitstatus == 0:
        session.exitstatus = 1


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
