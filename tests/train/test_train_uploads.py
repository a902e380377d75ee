"""A whole run that uploads its model to a hub on loopback, at every save and at the end, and one whose hub refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import Hub
from tests.standins import tiny_dataset, tiny_qwen3

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.close()


def run(folder, hub, *extra):
    model, data = tiny_qwen3(folder / "model"), tiny_dataset(folder / "data.jsonl")
    (folder / "odd.py").write_text("def odd(completion_ids, **columns):\n    return [float(sum(i) % 2) for i in completion_ids]\n")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [
            sys.executable, "-m", "agrpo", "train", f"model.path={model}", "data=jsonl", f"data.path={data}",
            "server=embedded", "sync=gloo", "scorer.functions=[odd.odd]", "rollout.group_size=4", "run.max_steps=2",
            "sampler.max_completion_length=5", "packer.token_budget=256", "run.use_cpu=true", "model.precision=no",
            f"run.output_dir={folder}/run", "checkpoint.hub.model_id=me/mine", "checkpoint.hub.token=hf_mine", *extra,
        ],
        env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip


def test_every_save_is_uploaded_in_the_background(hub, tmp_path):
    done = run(tmp_path, hub, "checkpoint.hub.push=every_save", "checkpoint.hub.blocking=false", "checkpoint.hub.always_push=true", "checkpoint.save_steps=1")
    assert done.returncode == 0, done.stdout
    # The final save is that of step 2 once more, and is not uploaded again.
    assert sorted(summary for _, summary, _ in hub.commits) == ["End of training, step-000001", "End of training, step-000002"]
    weights = {summary: files["model.safetensors"] for _, summary, files in hub.commits}
    assert len(set(weights.values())) == 2
    assert weights["End of training, step-000002"] == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert not list((tmp_path / "run").glob(".upload/*"))
    assert set(hub.tokens) == {"Bearer hf_mine"}
    assert "hf_mine" not in "".join(p.read_text() for p in (tmp_path / "run").rglob("*") if p.suffix in (".log", ".yaml", ".json", ".jsonl"))


def test_a_refused_upload_at_the_end_leaves_a_finished_run(hub, tmp_path):
    hub.refuses = True
    done = run(tmp_path, hub, "checkpoint.hub.push=end")
    assert done.returncode == 0, done.stdout
    log = (tmp_path / "run" / "logs" / "trainer0.log").read_text()
    assert "upload to me/mine failed: " in log and "Traceback" not in log
    assert (tmp_path / "run" / "model" / "model.safetensors").exists() and (tmp_path / "run" / "summary.json").exists()
