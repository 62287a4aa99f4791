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


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
