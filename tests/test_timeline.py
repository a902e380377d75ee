"""The phases of a process as lines of its timeline."""

import json
import time

from agrpo.lifecycle import Life


def spans(run_dir, name):
    return [json.loads(line) for line in (run_dir / "timeline" / f"{name}.jsonl").read_text().splitlines()]


def test_each_phase_becomes_one_span_when_it_ends(tmp_path):
    life = Life(tmp_path, "trainer0")
    began = time.time()
    for phase in ("starting", "training", "training", "waiting"):
        life.beat(phase)
        time.sleep(0.02)
    assert [s["what"] for s in spans(tmp_path, "trainer0")] == ["starting", "training"]
    life.leave(0, "finished")
    first, second, third = spans(tmp_path, "trainer0")
    assert third["what"] == "waiting" and began - 0.001 <= first["start"]
    assert first["end"] == second["start"] and second["end"] == third["start"]
    assert second["end"] - second["start"] >= 0.04  # a repeated beat neither ends nor restarts a phase


def test_other_spans_stand_beside_the_phases(tmp_path):
    life = Life(tmp_path, "rollout")
    life.span("group", 1.0, 3.5, group=7, played=3.0)
    assert spans(tmp_path, "rollout") == [{"what": "group", "start": 1.0, "end": 3.5, "group": 7, "played": 3.0}]


def test_a_timeline_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "timeline").write_text("a file where the folder should be")
    life = Life(tmp_path, "rollout")
    life.beat("generating")
    life.beat("waiting")
    assert json.loads((tmp_path / "state" / "rollout.alive.json").read_text())["phase"] == "waiting"
