"""The mock GPU's tests (on_pretended_gpu.py) in a separate process: torch cannot unregister a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration


@pytest.mark.measures
def test_on_a_pretended_gpu() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices that are written in Python")
    tests = Path(__file__).with_name("on_pretended_gpu.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tests.parent.parent, timeout=3000)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
