"""`agrpo eval` on the quickstart's model: a server of its own, figures that fit together, nothing left running."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from agrpo.launch.evaluate import show

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "quickstart" / "model"


def evaluate(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "agrpo", "eval", *arguments],
        env=environment, cwd=folder, text=True, capture_output=True, timeout=240,
    )  # fmt: skip


def test_a_model_is_evaluated_alone(tmp_path):
    run = tmp_path / "run"
    settings = ("num_rollouts=4", "pass_at=[1,4]", "max_prompts=31")
    done = evaluate(tmp_path, str(MODEL), "+recipe=quickstart", f"run.output_dir={run}", *(f"eval.heldout.{s}" for s in settings), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == json.loads((run / "evaluation.json").read_text()) and answer["model"] == str(MODEL)
    found = answer["evaluations"]["heldout"]
    assert found["rollouts_count"] == 4 * 31 and found["prompts_count"] == 31 and found["failed_count"] == 0
    # Rewards are 0 or 1: pass@1 is the mean reward, and one of four passes more often than one of one.
    assert 0.2 < found["reward"] == found["pass_at_1"] < found["pass_at_4"] <= 1
    assert 0 < found["reward_ci95"] < 0.2
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]


RAISES = """
def asked(completions, **columns):
    raise KeyError("answer")
"""


def test_an_evaluation_that_scores_nothing_is_a_failure_with_its_reason(tmp_path):
    (tmp_path / "broken.py").write_text(RAISES)
    run = tmp_path / "run"
    done = evaluate(
        tmp_path, str(MODEL), "+recipe=quickstart", f"run.output_dir={run}", "eval.heldout.max_prompts=5",
        "+eval.heldout.scorer={_target_: agrpo.scorer.functions.Functions, functions: [broken.asked]}",
    )  # fmt: skip
    said = "no rollout of evaluation heldout was scored; most often (5 times) scorer_error: reward function asked raised KeyError: 'answer'"
    assert done.returncode == 4 and said in done.stderr.splitlines()[-1], done.stderr
    assert json.loads((run / "evaluation.json").read_text())["evaluations"]["heldout"]["prompts_count"] == 0


def test_a_mean_without_an_interval_is_a_dash(capsys):
    figures = {"reward": 1.0, "reward_ci95": None, "prompts_count": 1, "rollouts_count": 1, "failed_count": 0}
    show({"one": {**figures, "mean_length": 3.0, "clipped_ratio": 0.0, "duration_s": 1.0}}, Path("evaluation.json"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [["one"], ["reward", "1.0000"], ["95", "%", "-"]]


def test_the_figures_of_many_k_stay_in_80_columns(capsys):
    figures = {"reward": 0.57, "reward_ci95": 0.04, **{f"pass_at_{k}": 0.9 for k in (1, 2, 4, 8, 16, 32)}}
    more = {"prompts_count": 500, "rollouts_count": 16000, "failed_count": 0, "mean_length": 3.0, "clipped_ratio": 0.0, "duration_s": 1.0}
    show(dict.fromkeys(("heldout", "aime-2025"), {**figures, **more}), Path("evaluation.json"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[2].split() == ["95", "%", "+-0.0400", "+-0.0400"]


def test_a_configuration_without_evaluations_is_told_how_to_get_one(tmp_path):
    done = evaluate(
        tmp_path, str(MODEL), "data=jsonl", f"data.path={ROOT}/recipes/quickstart/train.jsonl", "server=embedded", "run.use_cpu=true",
        "scorer.functions=[agrpo.recipes.quickstart.rewards.correct]", "model.precision=no",
    )  # fmt: skip
    assert done.returncode == 3 and done.stderr.startswith("eval has no entries: name one, for example '+eval.heldout=")
