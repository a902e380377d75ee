"""Whole runs from the command line, each with all its processes: what they leave behind, and that the figures are sane."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agrpo.ledger import replay
from agrpo.metrics.names import undeclared
from agrpo.serve.embedded import EmbeddedServer
from agrpo.sync.gloo import Gloo
from tests import metric_list
from tests.standins import tiny_dataset, tiny_qwen3, tiny_qwen3_5

ROOT = Path(__file__).parents[1]
SMALL = (
    "sampler.max_completion_length=5", "packer.token_budget=256", "run.use_cpu=true", "model.precision=no",
    "rollout.max_staleness=1",
)  # fmt: skip


def agrpo(folder: Path, *arguments: str, limit_s: float = 240) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "agrpo", "train", *arguments],
        env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s,
    )  # fmt: skip


@contextlib.contextmanager
def served(model: Path):
    """Overrides for a server in this process: a start of one takes a third of a short run, and other tests make it."""
    with EmbeddedServer(model, receiver=Gloo.receiver) as server:
        yield "server=external", f"server.base_url={server.url}"


def records_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_complete(run: Path, num_steps: int, processes: tuple = ("server", "rollout", "trainer0")) -> list[dict]:
    """A finished run's folder: records of every step, a summary, a ledger without double training, a model that loads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    records = records_of(run)
    assert [r["step"] for r in records][:num_steps] == list(range(1, num_steps + 1))
    assert undeclared({name for record in records for name in record}) == []
    # Figures that are looked at every few seconds may be missing from a run that is over before.
    assert num_steps < 3 or metric_list.absent(records) == []
    assert metric_list.outside(records) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens"]["unaccounted"] == 0 < summary["tokens"]["trained"]
    assert summary["global_step"] == num_steps and summary["exit_reason"] == "finished"
    for name in ("config.yaml", "versions.json", "ledger.jsonl", *(f"logs/{process}.log" for process in processes)):
        assert (run / name).exists(), name
    assert list((run / "checkpoints").glob("step-*"))
    assert all(g["trained"] + g["dropped"] <= max(g["ready"], g["dropped"]) for g in replay(run / "ledger.jsonl").values())
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").eos_token_id is not None
    assert sum(p.numel() for p in model.parameters()) > 10_000
    return records


def test_a_sweep_gives_two_complete_runs(tmp_path):
    out = tmp_path / "sweep"
    done = agrpo(
        tmp_path, "-m", "+recipe=quickstart", "loss=score_centering,grpo", "run.max_steps=3", f"run.output_dir={out}"
    )
    assert done.returncode == 0, done.stdout
    for job, loss in enumerate(("score_centering", "grpo")):
        records = assert_complete(out / str(job), 3)
        assert f"agrpo.loss.{loss}." in (out / str(job) / "config.yaml").read_text()
        assert ("sampling/sampler_mass" in records[0]) == (loss == "score_centering")
        kinds = ("centering", "tail") if loss == "score_centering" else ()
        assert metric_list.absent(records, "eval", *kinds) == []
        first = records[0]
        # At staleness 0 trainer and sampler hold the same weights in the same precision (DIAG-6).
        assert first["sample/staleness_max"] == 0
        assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert first["sampling/sampling_logp_difference/max"] < 1e-4
        assert first["perf/weight_sync_parity"] < 1e-4
        evaluation = json.loads((out / str(job) / "summary.json").read_text())["eval"]["heldout"]
        assert evaluation["before"]["version"] == 1 and evaluation["after"]["version"] == 4


def test_the_deepmath_recipe_on_stand_ins_and_the_complete_run_resumed(tmp_path):
    """Model, data and server of the recipe replaced through overrides only; the model has the recipe's architecture.

    RES-12, with an evaluation at the end, which is asked for before the rollout process is there.
    """
    model, data = tiny_qwen3_5(tmp_path / "model"), tiny_dataset(tmp_path / "data.jsonl")
    (tmp_path / "odd.py").write_text("def odd(completion_ids, **columns):\n    return [float(sum(i) % 2) for i in completion_ids]\n")
    run = tmp_path / "run"
    arguments = (
        "+recipe=deepmath", f"model.path={model}", "data=jsonl", f"data.path={data}", "server=embedded",
        # A random model never solves a problem: a second reward gives the groups something to differ in.
        "scorer.functions=[agrpo.scorer.rewards.accuracy_reward,odd.odd]", "sync=gloo", "run.max_steps=2",
        f"run.output_dir={run}", "rollout.progress_timeout=30",
        f"+eval.held={{_target_: agrpo.eval.Evaluation, data: {{_target_: agrpo.data.jsonl.Jsonl, path: {data}}}}}", *SMALL,
    )  # fmt: skip
    done = agrpo(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    records = assert_complete(run, 2)
    assert records[0]["rewards/accuracy_reward/mean"] == 0.0
    assert 0 < records[0]["rewards/odd/mean"] < 1
    assert records[0]["perf/weight_sync_parity"] < 1e-4 and records[0]["sampling/sampling_logp_difference/max"] < 1e-4

    done = agrpo(tmp_path, *arguments, "run.resume=auto", "--quiet")
    assert done.returncode == 0, done.stdout
    first, *others = done.stdout.splitlines()
    assert first == f"run {run}, 2 steps" and not any("trainer0: " in line for line in others), done.stdout
    assert "complete already: 2 steps" in (run / "logs" / "trainer0.log").read_text()
    assert json.loads((run / "summary.json").read_text())["global_step"] == 2


def test_an_epoch_ends_when_every_prompt_is_resolved_and_disk_sync_carries_the_weights(tmp_path, cold):
    model, data = tiny_qwen3(tmp_path / "model"), tiny_dataset(tmp_path / "data.jsonl", num_rows=11)
    (tmp_path / "odd.py").write_text("def odd(completion_ids, **columns):\n    return [float(sum(i) % 2) for i in completion_ids]\n")
    run = tmp_path / "run"
    with served(model) as server:
        done = agrpo(
            tmp_path, f"model.path={model}", "data=jsonl", f"data.path={data}", *server, "sync=disk",
            "scorer.functions=[odd.odd]", "rollout.group_size=4", "run.num_train_epochs=1", f"run.output_dir={run}", *SMALL,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    records = records_of(run)
    assert_complete(run, records[-1]["step"], ("rollout", "trainer0"))
    assert records[-1]["epoch"] >= 1 > records[-2]["epoch"]  # RUN-1: the first step at which they are resolved
    assert records[0]["perf/weight_sync_parity"] < 1e-4


def test_what_was_trained_is_saved_when_a_reward_breaks_its_contract(tmp_path):
    model, data = tiny_qwen3(tmp_path / "model"), tiny_dataset(tmp_path / "data.jsonl", num_rows=60)
    (tmp_path / "late.py").write_text(
        "def late(prompts, completion_ids, **columns):\n"
        "    values = [float(sum(i) % 2) for i in completion_ids]\n"
        "    return values[1:] if 'Problem 40.' in prompts[0][0]['content'] else values\n"
    )
    run = tmp_path / "run"
    with served(model) as server:
        done = agrpo(
            tmp_path, f"model.path={model}", "data=jsonl", f"data.path={data}", *server, "sync=gloo",
            "scorer.functions=[late.late]", "rollout.group_size=4", "run.max_steps=500", f"run.output_dir={run}", *SMALL,
        )  # fmt: skip
    assert done.returncode == 5 and "late" in done.stdout, done.stdout
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == records_of(run)[-1]["step"] > 2
    assert (checkpoint / "ready_groups.bin").exists()


def test_a_run_without_signal_ends_with_its_counts_and_saves(tmp_path):
    """RUN-7: no batch can arrive any more."""
    model, data = tiny_qwen3(tmp_path / "model"), tiny_dataset(tmp_path / "data.jsonl", num_rows=13)
    (tmp_path / "same.py").write_text("def same(completion_ids, **columns):\n    return [1.0 for _ in completion_ids]\n")
    run = tmp_path / "run"
    with served(model) as server:
        done = agrpo(
            tmp_path, f"model.path={model}", "data=jsonl", f"data.path={data}", *server, "sync=gloo",
            "scorer.functions=[same.same]", "rollout.group_size=2", "run.max_steps=500", f"run.output_dir={run}", *SMALL,
        )  # fmt: skip
    assert done.returncode == 6 and "no group of a whole epoch of 13 prompts could be trained (zero_std: " in done.stdout
    assert (run / "checkpoints" / "step-000000" / "rollout_state.json").exists()
