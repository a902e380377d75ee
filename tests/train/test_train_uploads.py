"""A whole run that uploads its model to a hub on loopback at every save, of which one is refused; uploading at the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agrpo.config.checkpoint_folder import fault
from tests.hub_server import Hub
from tests.standins import tiny_dataset, tiny_qwen3
from tests.test_run import served

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.close()


def environment_of(folder, hub):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    environment.pop("HF_HUB_OFFLINE", None)
    return environment


@contextlib.contextmanager
def begun(folder, hub, *extra):
    model, data = tiny_qwen3(folder / "model"), tiny_dataset(folder / "data.jsonl")
    (folder / "odd.py").write_text("def odd(completion_ids, **columns):\n    return [float(sum(i) % 2) for i in completion_ids]\n")
    with served(model) as server:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "agrpo", "train", f"model.path={model}", "data=jsonl", f"data.path={data}",
                *server, "sync=gloo", "scorer.functions=[odd.odd]", "rollout.group_size=4", "run.max_steps=2",
                "sampler.max_completion_length=5", "packer.token_budget=256", "run.use_cpu=true", "model.precision=no",
                f"run.output_dir={folder}/run", "checkpoint.hub.model_id=me/mine", "checkpoint.hub.token=hf_mine", *extra,
            ],
            env=environment_of(folder, hub), cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_every_save_is_uploaded_in_the_background_and_a_refused_one_ends_nothing(hub, tmp_path):
    hub.refuses_commit = "step-000001"
    in_background = ("checkpoint.hub.blocking=false", "checkpoint.hub.always_push=true")
    with begun(tmp_path, hub, "checkpoint.hub.push=every_save", *in_background, "checkpoint.save_steps=1") as process:
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    # The final save is that of step 2 once more, and is not uploaded again.
    ((repository, summary, files),) = hub.commits
    assert repository == "me/mine" and summary == "End of training, step-000002"
    assert files["model.safetensors"] == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert not list((tmp_path / "run").glob(".upload/*")) and (tmp_path / "run" / "summary.json").exists()
    assert set(hub.tokens) == {"Bearer hf_mine"}
    log = (tmp_path / "run" / "logs" / "trainer0.log").read_text()
    assert log.count("upload to me/mine failed: ") == 1 and "Traceback" not in log
    assert "hf_mine" not in "".join(p.read_text() for p in (tmp_path / "run").rglob("*") if p.suffix in (".log", ".yaml", ".json", ".jsonl"))


def test_a_signal_leaves_an_upload_that_does_not_get_on_and_loses_nothing(hub, tmp_path):
    """The hub takes no byte of the first checkpoint. The rank hears the signal three times, as where a whole job is stopped."""
    hub.stalls = True
    with begun(tmp_path, hub, "checkpoint.hub.push=every_save", "checkpoint.save_steps=1") as process:
        assert hub.is_storing.wait(120)
        process.terminate()
        pid = json.loads((tmp_path / "run" / "state" / "trainer0.alive.json").read_text())["pid"]
        for _ in range(2):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
        began = time.monotonic()
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and time.monotonic() - began < 30, output
    folder = tmp_path / "run"
    assert fault(folder / "checkpoints" / "step-000001") is None and not (folder / ".upload").exists()
    assert json.loads((folder / "summary.json").read_text())["exit_reason"] == "stopped by a signal"
    log = (folder / "logs" / "trainer0.log").read_text()
    assert log.count(f"later: agrpo export {folder} --push me/mine") == 1 and "Traceback" not in log


AT_THE_END = """
import logging, sys
from pathlib import Path
from agrpo.model.hub import Uploads
from agrpo.sections import Hub

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
uploads = Uploads(Hub(push="end", model_id="me/mine"), Path("."))
assert uploads.is_due_at_end and not uploads.is_due_after_save(1)
uploads.start(Path("model"), "End of training")
while uploads.are_under_way(1.0):
    pass
"""


def test_an_upload_at_the_end_keeps_the_folder_whether_or_not_it_is_refused(hub, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for refuses in (False, True):
        hub.refuses = refuses
        done = subprocess.run([sys.executable, "-c", AT_THE_END], env=environment_of(tmp_path, hub), cwd=tmp_path, text=True, capture_output=True, timeout=120)
        assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
        assert ("upload to me/mine failed: " in done.stdout) == refuses and ("uploaded: " in done.stdout) != refuses
        assert (tmp_path / "model" / "config.json").exists()
    assert [(summary, files) for _, summary, files in hub.commits] == [("End of training", {"config.json": b"{}"})]
