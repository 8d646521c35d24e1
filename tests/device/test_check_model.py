"""The device check runs where there is no accelerator too, and says what it left out."""

import subprocess
import sys
from pathlib import Path


def test_the_device_check_passes_on_this_machine_and_names_what_it_skips():
    script = Path(__file__).with_name("check_model.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    if "(cpu)" in done.stdout:
        assert "skipped  attention cudnn bfloat16: needs a gpu, these are cpu devices" in done.stdout
        assert "interpreted, not the real kernel" in done.stdout
