"""The recipe for two steps, with its rollouts dumped: agent, proxy, server, trainer and view together."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agrpo.report.recorded import read
from agrpo.report.view import Filter, view

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    command = [
        sys.executable, "-m", "agrpo", "train", "+recipe=agent_openai", "run.max_steps=2", "~eval.heldout",
        "packer.token_budget=384", "rollout.max_concurrent_rollouts=16", "rollout.dump_to_file=true",
        f"rollout.fileroot={folder / 'dump'}", f"run.output_dir={folder / 'run'}", "logger=none",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def test_what_the_agent_said_is_trained_and_both_sides_agree_on_it(run):
    trained = [r for r in read(run).records if r.step is not None]
    assert {r.step for r in trained} == {1, 2}
    first = [r for r in trained if r.step == 1]  # with the weights that sampled them
    gaps = [np.abs(np.subtract(r.trainer_logprobs, r.fields["sampler_logprobs"])).max() for r in first]
    assert max(gaps) < 1e-3
    assert any(len(r.fields.get("segments", ())) == 4 for r in trained), "no second try was trained"
    assert all(r.fields["rewards"].keys() == {"agent"} for r in trained)


def test_second_tries_are_shown(run):
    out = io.StringIO()
    view(run, Filter(min_reward=0.5, max_reward=0.5), None, 3, False, Console(file=out, width=150))
    name = out.getvalue().rsplit("--show ", 1)[1].strip()
    view(run, Filter(), name, 1, False, Console(file=out, width=150))
    assert "reward 0.5  (agent 0.5)" in out.getvalue() and "No. " in out.getvalue()
