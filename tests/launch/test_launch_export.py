"""From a checkpoint to a folder that transformers or PEFT loads with the same weights, and its upload to a hub."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from agrpo.config import Devices, check, compose, save
from agrpo.errors import AgrpoError, ConfigError
from agrpo.launch.export import export, source_of
from agrpo.lifecycle import tell_exported
from agrpo.model import checkpoint as checkpoints
from agrpo.model.load import load_model
from tests.hub_server import Hub
from tests.standins import tiny_dataset, tiny_qwen3


def saved_run(folder, *extra):
    """A run's folder with one checkpoint of changed weights, and the model that was saved."""
    model_path, data = tiny_qwen3(folder / "start"), tiny_dataset(folder / "data.jsonl")
    run_dir = folder / "run"
    config, _ = check(
        compose([
            f"model.path={model_path}", "data=jsonl", f"data.path={data}", "server=embedded", "sync=gloo",
            "scorer.functions=[agrpo.scorer.rewards.accuracy_reward]", "run.use_cpu=true", "model.precision=no",
            f"run.output_dir={run_dir}", *extra,
        ]),
        Devices(),
    )  # fmt: skip
    save(config, run_dir, [])
    model = load_model(config.model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.02)
    checkpoints.save(checkpoints.folder_of(run_dir / "checkpoints", 7), model, None, {})
    return run_dir, model


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("lora"), "model=lora", "model.lora.r=3")


def expected(model):
    """The weights by hand: of an adapted layer its own and alpha / r times B A, of anything else what it holds."""
    weights = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            weights[f"{name}.weight"] = module.base_layer.weight.detach() + 64.0 / 3 * (b @ a).detach()
    own = {n: p.detach() for n, p in model.named_parameters() if "lora_" not in n and "base_layer" not in n}
    assert len(weights) == 14 or not weights  # seven linear layers in each of two
    return own | weights


def logits(model):
    with torch.no_grad():
        return model(torch.arange(2, 13)[None]).logits


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_checkpoint_becomes_a_folder_with_the_same_model(kind, request, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, model = request.getfixturevalue(kind)
    for source in (run_dir, run_dir / "checkpoints" / "step-000007"):
        folder = export(source, tmp_path / source.name, None, None)
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, tensor in expected(model).items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)
        assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "adapter").exists()


def test_an_adapter_alone_is_loaded_by_peft_and_gives_what_the_merged_model_does(lora, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_dir, _ = lora
    folder = export(run_dir, None, "adapter", None)
    assert folder == run_dir / "export" / "step-000007-adapter"
    base = AutoModelForCausalLM.from_pretrained(run_dir.parent / "start")
    merged = AutoModelForCausalLM.from_pretrained(export(run_dir, tmp_path / "merged", "merged", None))
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, folder)), logits(merged), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_exported_is_said_in_one_line(full, tmp_path):
    run_dir, _ = full
    with pytest.raises(ConfigError, match="is neither a run's folder nor"):
        export(tmp_path, None, None, None)
    with pytest.raises(ConfigError, match="--adapter: this run trained the whole model"):
        export(run_dir, None, "adapter", None)
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="mine exists already"):
        export(run_dir, tmp_path / "mine", None, None)
    empty = tmp_path / "run"
    empty.mkdir()
    (empty / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="neither a folder model nor a checkpoint"):
        export(empty, None, None, None)


def test_a_run_that_was_continued_gives_its_newest_model(full, tmp_path):
    """Its folder `model` is of the step at which it first ended."""
    run = tmp_path / "run"
    shutil.copytree(full[0], run)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert source_of(run).name == "end"  # of a run that does not say
    for exported, name in ((3, "step-000007"), (7, "end"), (10, "end")):
        tell_exported(run, exported)
        assert source_of(run).name == name
    (run / "checkpoints" / "step-000007.mine").mkdir()
    shutil.copytree(run / "checkpoints" / "step-000007", run / "checkpoints" / "step-1000000")
    assert source_of(run).name == "step-1000000"


def test_every_file_is_uploaded_and_a_refused_upload_leaves_the_folder(full, tmp_path):
    run_dir, _ = full
    hub = Hub()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_mine", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_OFFLINE", None)

    def pushed(output):
        command = [sys.executable, "-m", "agrpo", "export", str(run_dir), "--output", str(output), "--push", "me/mine", "--private"]
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)

    try:
        done = pushed(tmp_path / "out")
        assert done.returncode == 0, done.stderr
        ((repository, summary, files),) = hub.commits
        assert repository == "me/mine" and summary == "agrpo run, step-000007" and hub.repositories["me/mine"].get("visibility", "private") == "private"
        assert set(hub.tokens) == {"Bearer hf_mine"}
        assert files == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
        assert json.loads(files["config.json"])["model_type"] == "qwen3"
        hub.refuses = True
        done = pushed(tmp_path / "again")
        assert done.returncode == 1 and "upload to me/mine failed: " in done.stderr and "Traceback" not in done.stderr
        assert "hf_mine" not in done.stderr and (tmp_path / "again" / "config.json").exists()
    finally:
        hub.close()


def test_no_upload_is_tried_offline(full, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AgrpoError, match="HF_HUB_OFFLINE is set"):
        export(full[0], tmp_path / "out", None, "me/mine")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_refused_in_one_line_that_names_the_others(full, damage, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(full[0], run_dir)
    shutil.copytree(run_dir / "checkpoints" / "step-000007", run_dir / "checkpoints" / "step-000005")
    shard = next((run_dir / "checkpoints" / "step-000007" / "shards").glob("*.distcp"))
    if damage == "cut":
        os.truncate(shard, 5000)
    else:
        shard.unlink()
    with pytest.raises(ConfigError, match="step-000007 is damaged.*take another: step-000005") as refused:
        export(run_dir, tmp_path / "out", None, None)
    assert "\n" not in str(refused.value) and "CheckpointException" not in str(refused.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_what_cannot_be_read_or_written_is_said_in_one_line(full, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output: .* could not be written: Not a directory; choose another folder"):
        export(full[0], tmp_path / "file" / "out", None, None)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="config.yaml is damaged: ") as refused:
        export(tmp_path / "run", None, None, None)
    assert "\n" not in str(refused.value)
