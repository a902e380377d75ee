"""A process that is forked for a test is the one that Python would have started: what it finds, how it ends, who it belongs to."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import warm

pytestmark = pytest.mark.skipif(subprocess.Popen is not warm.WarmPopen, reason="processes start cold here")
COMMAND = [sys.executable, "-m", "tests.what_i_am"]


def described(tmp_path, popen: type, code: int, **options) -> tuple:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "AGRPO_SOMETHING": "17"}
    pipe = subprocess.PIPE
    process = popen([*COMMAND, str(code)], env=environment, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)
    out, err = process.communicate("what it reads", 60)
    return json.loads(out), err, process.returncode


@pytest.mark.parametrize("new_session", [False, True])
def test_a_forked_process_finds_what_a_new_one_finds(tmp_path, new_session):
    import torch
    import transformers  # noqa: F401 - both change the environment of whoever imports them

    assert torch.__version__
    cold = described(tmp_path, warm.Popen, 7, start_new_session=new_session)
    forked = described(tmp_path, subprocess.Popen, 7, start_new_session=new_session)
    assert {key: value for key, value in forked[0].items() if value != cold[0][key]} == {}
    assert forked[1:] == cold[1:]
    assert cold[0]["parent"] == os.getpid() and cold[0]["agrpo"] == [] and cold[2] == 7
    assert warm.nursery is not None and warm.nursery.fits(dict(os.environ)), "nothing would be forked"


def test_it_is_a_child_like_any_other_that_signals_reach():
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    process.stdin.close()


def test_variables_that_are_read_while_importing_start_a_new_interpreter():
    assert warm._home().fits({**os.environ, "RANK": "1", "PYTHONPATH": "elsewhere"})
    assert not warm._home().fits({**os.environ, "HF_HOME": "elsewhere"})
