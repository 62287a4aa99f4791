"""The package of modules loads lazily, and its configuration without torch."""

import subprocess
import sys

import pytest

from leadline import nn


def test_the_configuration_loads_and_checks_its_options_without_torch():
    code = "import sys; from leadline.nn import BlockConfig; BlockConfig(norm='post'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_public_name_loads_and_others_do_not():
    assert dir(nn) == sorted(nn.__all__)
    assert [getattr(nn, name).__name__ for name in nn.__all__] == nn.__all__
    with pytest.raises(AttributeError, match=r"module 'leadline.nn' has no attribute 'Attention'"):
        _ = nn.Attention
