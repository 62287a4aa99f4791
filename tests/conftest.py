import pytest
import torch
from hypothesis import settings

settings.register_profile("leadline", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("leadline")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
