"""`agrpo explain` on a run that goes on, one that has ended, and one that says nothing yet."""

import fcntl
import json
import threading
import time

import pytest

from agrpo.errors import ConfigError
from agrpo.metrics.findings import closing
from agrpo.report.explain import explain
from agrpo.report.run_files import newest_run
from tests.report.test_report_page import write_run


def append(folder, first, count, **values):
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, first + count):
            file.write(json.dumps({"step": step, "perf/step_s": 2.0, **values}) + "\n")


def fresh(folder):
    write_run(folder)
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_a_verdict_has_its_figure_cause_and_an_override_to_copy(tmp_path):
    told = []
    append(fresh(tmp_path), 1, 12, **{"perf/rollout_wait_s": 1.0, "rollout/backpressure_s_per_step": 1.0})
    explain(tmp_path, False, told.append)
    assert ", step 12, finished" in told[0] and told[1].startswith(
        "warning  window-bound: training waits 1.00 s of each 2.00 s"
    )
    assert told[2].strip() == "rollout.max_staleness=8" and told[3].startswith(
        "devices  Per step, generation is busy for 1.00 s"
    )


def test_a_run_without_a_step_and_a_folder_without_a_run(tmp_path):
    told = []
    explain(fresh(tmp_path), False, told.append)
    assert told[1:] == ["No step has been logged yet."]
    with pytest.raises(ConfigError, match="holds no run"):
        explain(tmp_path / "logs", False, told.append)


def test_the_newest_run_is_the_one_whose_records_changed_last(tmp_path):
    first, second = write_run(tmp_path / "a" / "1"), write_run(tmp_path / "b" / "2")
    import os

    os.utime(second / "config.yaml", (1, 1))
    os.utime(second / "metrics.jsonl", (1, 1))
    assert newest_run(tmp_path) == first
    with pytest.raises(ConfigError, match="no run lies below"):
        newest_run(tmp_path / "a" / "1")


def test_live_prints_again_only_when_a_verdict_changes_and_ends_with_the_run(tmp_path):
    told = []
    append(fresh(tmp_path), 1, 12, **{"perf/rollout_wait_s": 1.0})
    (tmp_path / "state").mkdir(exist_ok=True)
    lock = (tmp_path / "state" / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # as the supervisor of the run does
    watching = threading.Thread(target=explain, args=(tmp_path, True, told.append, 0.02))
    watching.start()
    time.sleep(0.2)
    append(tmp_path, 13, 3, **{"perf/rollout_wait_s": 1.5})  # worse, but the same verdict
    time.sleep(0.2)
    assert sum("generation-bound" in line for line in told) == 1
    append(tmp_path, 16, 12, **{"perf/rollout_wait_s": 0.0})
    deadline = time.monotonic() + 10
    while not any("balanced" in line for line in told) and time.monotonic() < deadline:
        time.sleep(0.02)
    lock.close()
    watching.join(10)
    assert (
        not watching.is_alive() and "step 27" in " ".join(told) and told[-1].startswith("\nThe run has ended: finished")
    )


def test_live_on_a_run_that_is_over_says_so(tmp_path):
    told = []
    explain(write_run(tmp_path), True, told.append)
    assert told[-1] == "The run is not active."


def test_the_end_of_a_run_names_what_is_urgent_in_few_lines(tmp_path):
    append(fresh(tmp_path), 1, 12, **{"perf/rollout_wait_s": 1.0})
    assert [line.split(":")[0] for line in closing(tmp_path)] == ["generation-bound"]
    (tmp_path / "metrics.jsonl").write_text("")
    assert closing(tmp_path) == []
    append(tmp_path, 1, 12, **{"perf/rollout_wait_s": 0.0})
    assert [line.split(":")[0] for line in closing(tmp_path)] == ["balanced"]


def test_the_end_of_a_run_gives_the_cause_that_an_urgent_verdict_names(tmp_path):
    write_run(tmp_path, scorer={"reward_range": [0.0, 1.0]})
    (tmp_path / "metrics.jsonl").write_text("")
    equal = {"frac_reward_zero_std": 0.6, "reward": 0.9, "reward_dropped": 1.0}
    append(tmp_path, 1, 12, **{"perf/rollout_wait_s": 1.0, **equal})
    lines = closing(tmp_path)
    assert [line.split(":")[0] for line in lines] == ["few-signals", "solved"]
    assert "The verdict solved says why." in lines[0]



def test_both_commands_from_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from agrpo.cli import app

    run, shell = write_run(tmp_path / "run"), CliRunner()
    done = shell.invoke(app, ["explain", str(run)])
    assert done.exit_code == 0 and "generation-bound" in done.stdout
    done = shell.invoke(app, ["report", str(run), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and done.stdout.strip().endswith("page.html") and (tmp_path / "page.html").exists()
    for command in ("explain", "report"):
        refused = shell.invoke(app, [command, str(tmp_path / "none")])
        assert refused.exit_code == 3 and "holds no run" in refused.output
