"""A whole run that evaluates beside training: every result is of one version, and each was put where it belongs."""

import json

from agrpo.metrics.names import undeclared
from tests.test_run import agrpo, records_of


def test_results_beside_training_are_of_one_version_each(tmp_path):
    run = tmp_path / "run"
    settings = ("every=3", "num_rollouts=2", "max_prompts=23", "pass_at=[1,2]")
    done = agrpo(
        tmp_path, "+recipe=quickstart", f"run.output_dir={run}", "run.max_steps=10", "logger.logging_steps=5",
        *(f"eval.heldout.{s}" for s in settings)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    records = records_of(run)
    assert undeclared({name for record in records for name in record}) == []
    held = sum(r.get("perf/held_sync_count", 0) for r in records)
    given_up = sum(r.get("eval/heldout/given_up_count", 0) for r in records)
    # At the start, after 3, 6 and 9 (or the first sync after it), and at the end; later where syncs were left out.
    assert lines[0]["step"] == 0 and lines[0]["version"] == 1 and lines[-1]["step"] == 10
    assert 3 <= len(lines) <= 5 and len(lines) + given_up >= 4
    steps, versions = [line["step"] for line in lines], [line["version"] for line in lines]
    assert steps == sorted(set(steps)) and versions == sorted(set(versions))
    assert all(step + 1 - held <= version <= step + 1 for step, version in zip(steps, versions, strict=True))
    assert all(line["rollouts_count"] == 46 and line["pass_at_1"] <= line["pass_at_2"] for line in lines)
    summary = json.loads((run / "summary.json").read_text())["eval"]["heldout"]
    assert summary["before"]["step"] == 0 and summary["after"] == {
        k: lines[-1][k] for k in ("reward", "reward_ci95", "version", "step")
    }
    # A record of five steps may hold several: each of them is logged.
    assert [r["eval/heldout/step"] for r in records if "eval/heldout/reward" in r] == steps
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)
    # That of the end has no figures of the few rollouts that came in after the last step.
    assert all(name == "step" or name.startswith("eval/heldout/") for name in records[-1])
