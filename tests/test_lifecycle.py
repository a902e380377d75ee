"""What every process of a run shares and no whole run shows."""

import gc
import json
import subprocess
import sys

import pytest

from agrpo.lifecycle import without_collector


def test_the_collector_is_on_again_after_loading_also_after_a_failure():
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OSError), without_collector():
        raise OSError
    assert gc.isenabled()
    gc.unfreeze()


LEFT_RUNNING = """
import sys, threading, time
from pathlib import Path
from agrpo import lifecycle

lifecycle.END_S = 1.0

def main(run_dir, life):
    threading.Thread(target=time.sleep, args=(60,)).start()

sys.exit(lifecycle.run_process("rollout", Path(sys.argv[1]), main))
"""


def test_a_process_ends_with_its_code_although_a_library_has_left_something_running(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEFT_RUNNING, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "still running" in done.stderr, done.stderr
    assert json.loads((tmp_path / "state" / "rollout.exit.json").read_text())["code"] == 0
