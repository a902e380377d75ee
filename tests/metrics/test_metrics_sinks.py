"""Records on their way out: the file, TensorBoard, sinks that fail, and the summary of a run."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest

from agrpo.errors import ConfigError
from agrpo.metrics.background import Background
from agrpo.metrics.sinks import _options, open_sinks, problems, read_lines, read_records
from agrpo.metrics.summary import read_summary, write_summary

ROOT = Path(__file__).parents[2]


def make_section(*names: str, **options):
    return types.SimpleNamespace(sinks=dict.fromkeys(names, True), options=options, project="agrpo", run_name=None)


class Recorder:
    """A sink of a user: fails from the second record on if its option says so."""

    opened: list = []

    def __init__(self, section, run_dir, options):
        self.options, self.records = options, []
        Recorder.opened.append(self)

    def write(self, step, record):
        if self.options.get("fails") and self.records:
            raise OSError("no space")
        self.records.append((step, dict(record)))

    def close(self):
        self.records.append("closed")


def write(sinks, *records):
    for record in records:
        for sink in sinks:
            sink.write(record["step"], record)
    for sink in sinks:
        sink.close()


def test_file_holds_one_object_per_record_with_null_for_what_is_not_finite(tmp_path):
    write(
        open_sinks(make_section(), tmp_path),
        {"step": 1, "reward": 0.5, "tools/failure_frequency": math.nan},
        {"step": 2},
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward": 0.5, "tools/failure_frequency": None},
        {"step": 2},
    ]


def test_resume_drops_half_a_line_and_the_steps_that_come_again(tmp_path):
    write(open_sinks(make_section(), tmp_path), *({"step": i, "reward": i / 10} for i in range(1, 8)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    write(open_sinks(make_section(), tmp_path, resumed_step=5), {"step": 6, "reward": 0.9})
    assert [(r["step"], r["reward"]) for r in read_records(tmp_path)][-2:] == [(5, 0.5), (6, 0.9)]


def test_options_of_one_sink_are_not_given_to_another():
    recorder = f"{__name__}.Recorder"
    both = make_section("tensorboard", recorder, **{recorder: {"fails": False}, "flush_secs": 7})
    assert _options(both, recorder) == {"fails": False} and _options(both, "tensorboard") == {"flush_secs": 7}


def test_sink_by_import_path_gets_the_same_records_and_its_options(tmp_path):
    Recorder.opened.clear()
    section = make_section("test_metrics_sinks.Recorder", tag="a")
    record = {"step": 3, "reward": 0.25, "diag/bottleneck": "balanced"}
    write(open_sinks(section, tmp_path), record)
    (sink,) = Recorder.opened
    assert sink.records == [(3, record), "closed"] and sink.options == {"tag": "a"}
    assert read_records(tmp_path) == [record]


def test_failing_sink_is_a_warning_and_the_file_goes_on(tmp_path, caplog):
    Recorder.opened.clear()
    section = make_section("test_metrics_sinks.Recorder", "test_metrics_sinks.Missing", fails=True)
    with caplog.at_level(logging.WARNING):
        write(open_sinks(section, tmp_path), *({"step": i} for i in range(1, 6)))
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2, 3, 4, 5]
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == 2 and "Missing is off: AttributeError" in texts[0]
    assert texts[1] == "logger test_metrics_sinks.Recorder is off from step 2: OSError: no space"


class Stuck:
    """A service that takes nothing until it is told to."""

    def __init__(self):
        self.goes_on, self.steps, self.threads = threading.Event(), [], set()

    def write(self, step, record):
        self.threads.add(threading.current_thread())
        self.goes_on.wait(30)
        self.steps.append(step)

    def close(self):
        self.steps.append("closed")


@pytest.mark.parametrize("recovers", [True, False])
def test_a_sink_that_hangs_costs_records_of_its_own_and_never_a_step(caplog, recovers):
    stuck = Stuck()
    sink = Background("slow", lambda: stuck, close_s=10.0 if recovers else 0.2, most_waiting=5)
    began = time.monotonic()
    sink.write(1, {})
    while not stuck.threads:  # it has the first
        assert time.monotonic() < began + 10
        time.sleep(0.01)
    for step in range(2, 12):
        sink.write(step, {})
    if recovers:
        stuck.goes_on.set()
    sink.close()
    assert time.monotonic() - began < 10
    texts = [r.getMessage() for r in caplog.records]
    assert texts[0] == "logger slow does not keep up: 5 records wait, and from step 7 on some are left out"
    assert texts[-1] == "logger slow lacks 5 records"
    if recovers:
        assert stuck.steps == [1, 2, 3, 4, 5, 6, "closed"] and len(texts) == 2
    else:
        assert texts[1] == "logger slow did not end within 0.2 s; its last records may be missing" and len(texts) == 3
    stuck.goes_on.set()
    assert threading.current_thread() not in stuck.threads


def test_a_service_that_does_not_answer_at_the_start_is_not_waited_for_long(caplog):
    answers, stuck = threading.Event(), Stuck()
    stuck.goes_on.set()
    sink = Background("late", lambda: answers.wait(30) and stuck, start_s=0.1)
    sink.write(1, {})
    assert [r.getMessage() for r in caplog.records] == ["logger late has not begun after 0.1 s; training goes on meanwhile"]
    answers.set()
    sink.close()
    assert stuck.steps == [1, "closed"]


def test_unknown_sink_is_refused_with_the_allowed_ones(tmp_path):
    assert problems(make_section("console", "tensorboard")) == []
    (line,) = problems(make_section("tensorbord"))
    assert line.startswith(
        "logger.sinks: unknown sink 'tensorbord'; allowed: console, none, tensorboard, wandb, trackio"
    )
    with pytest.raises(ConfigError):
        open_sinks(make_section("tensorbord"), tmp_path)


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = [{"step": i, "reward": i / 8, "diag/bottleneck": "balanced"} for i in (1, 3, 5)]
    write(open_sinks(make_section("tensorboard"), tmp_path), *records)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.125), (3, 0.375), (5, 0.625)]
    assert events.Tags()["scalars"] == ["reward"]


def run_with_small_files(tmp_path, code: str) -> str:
    """What a process prints in which no file may grow beyond 6,000 bytes, as on a full disk."""
    start = (
        "import logging, resource, sys, types; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))\n"
        "logging.basicConfig(format='%(message)s', stream=sys.stdout)\n"
        "from agrpo.metrics.sinks import open_sinks, read_records\n"
        "section = types.SimpleNamespace(sinks={'tensorboard': True}, options={}, project='agrpo', run_name=None)\n"
        "folder = Path(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", start + textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sink_on_a_full_disk_is_one_warning_and_the_run_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    out = run_with_small_files(
        tmp_path,
        """
        import time
        sinks = open_sinks(section, folder)
        for step in range(1, 41):
            for sink in sinks:
                sink.write(step, {"step": step, **{f"eval/e{i}/reward": 0.5 for i in range(9)}, "reward": 0.25})
            time.sleep(0.005)  # TensorBoard writes in a thread of its own
            if (folder / "metrics.jsonl").stat().st_size > 5000:
                break
        for sink in sinks:
            sink.close()
        print(len(read_records(folder)) == step, step > 15)
        """,
    )
    (warning,) = [line for line in out.splitlines() if line.startswith("logger tensorboard")]
    assert "is off from step" in warning and "File too large" in warning and out.splitlines()[-1] == "True True"


def test_records_that_found_no_room_are_written_when_there_is_some(tmp_path):
    out = run_with_small_files(
        tmp_path,
        """
        section.sinks = {}
        (sink,) = open_sinks(section, folder)
        for step in range(1, 201):
            if step == 180:
                resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
            sink.write(step, {"step": step, "reward": step / 3})
        sink.close()
        print([r["step"] for r in read_records(folder)] == list(range(1, 201)))
        """,
    )
    warning, complete = out.splitlines()
    assert warning.startswith("metrics.jsonl cannot be written from step") and complete == "True"


def test_wandb_offline_holds_what_was_written(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'agrpo[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    records = [{"step": i, "reward": i / 8, "diag/bottleneck": "balanced"} for i in (1, 3, 5)]
    write(open_sinks(make_section("wandb"), tmp_path), *records)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")

    def entries():
        data, at = path.read_bytes(), 7  # a LevelDB log: a header, then checksum, length, type and record
        while at + 7 <= len(data) and (end := at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")) <= len(data):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(data[at + 7 : end])
            yield entry
            at = end

    deadline = time.monotonic() + 60  # its service writes the file to the end after the run has finished
    while "exit" not in [e.WhichOneof("record_type") for e in entries()]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in entry.history.item}
        for entry in entries()
        if entry.WhichOneof("record_type") == "history"
    ]
    assert [(f["_step"], f["reward"], f["diag/bottleneck"]) for f in found] == [
        (1, 0.125, "balanced"), (3, 0.375, "balanced"), (5, 0.625, "balanced"),
    ]  # fmt: skip
    assert read_records(tmp_path) == records


def test_trackio_on_this_machine_holds_what_was_written(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'agrpo[trackio]'")
    code = (
        "import sys, types; from pathlib import Path\n"
        "from agrpo.metrics.sinks import open_sinks\n"
        "section = types.SimpleNamespace(sinks={'trackio': True}, options={}, project='agrpo', run_name='first')\n"
        "sinks = open_sinks(section, Path(sys.argv[1]))\n"
        "for step in (1, 3, 5):\n"
        "    for sink in sinks:\n"
        "        sink.write(step, {'step': step, 'reward': step / 8})\n"
        "for sink in sinks:\n"
        "    sink.close()\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print([(row['step'], row['reward']) for row in SQLiteStorage.get_logs('agrpo', 'first')])\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[(1, 0.125), (3, 0.375), (5, 0.625)]", done.stdout


def test_summary_holds_the_last_values_and_each_evaluation_before_and_after(tmp_path):
    records = [
        {"step": 0, "eval/heldout/reward": 0.5, "eval/heldout/version": 0},
        {"step": 1, "reward": 0.25, "loss": 0.5, "rollout/failed_count": 2},
        {"step": 2, "reward": 0.75, "loss": -0.25, "eval/heldout/reward": 0.875, "eval/heldout/version": 2},
    ]
    write(open_sinks(make_section(), tmp_path), *records)
    summary = write_summary(tmp_path, "max_steps", model=str(tmp_path / "model"))
    assert (
        summary
        == read_summary(tmp_path)
        == {
            "global_step": 2,
            "exit_reason": "max_steps",
            "training_loss": 0.125,
            "eval": {
                "heldout": {
                    "before": {"reward": 0.5, "version": 0, "step": 0},
                    "after": {"reward": 0.875, "version": 2, "step": 2},
                }
            },
            "metrics": {
                "eval/heldout/reward": 0.875,
                "eval/heldout/version": 2,
                "reward": 0.75,
                "loss": -0.25,
                "rollout/failed_count": 2,
            },
            "model": str(tmp_path / "model"),
        }
    )


def test_run_without_records_has_an_empty_summary(tmp_path):
    assert write_summary(tmp_path, "error")["global_step"] == 0 and read_records(tmp_path) == []


def test_lines_that_a_killed_process_left_are_passed_over(tmp_path):
    path = tmp_path / "spans.jsonl"
    path.write_bytes(b'{"start": 1}\n{"start": 2, "wh{"start": 3}\n7\n{"start": 4}\n{"start": 5, "what": "\xc3')
    assert [span["start"] for span in read_lines(path)] == [1, 4]
    assert list(read_lines(tmp_path / "none.jsonl")) == []
