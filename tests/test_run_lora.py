"""A whole run that trains an adapter and sends it alone, continued from its checkpoint."""

import json

import pytest

from tests.test_run import agrpo, assert_complete

ARGUMENTS = (
    "+recipe=quickstart", "model.lora.enabled=true", "model.lora.r=4", "sync.mode=lora", "rollout.max_staleness=1",
    "optimizer.learning_rate=3e-3", "sync.verify_every=1", "checkpoint.save_steps=2", "~eval.heldout",
)  # fmt: skip


def test_a_run_trains_an_adapter_and_resumes_with_it(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run = tmp_path / "run"
    first = agrpo(tmp_path, *ARGUMENTS, "run.max_steps=2", f"run.output_dir={run}")
    assert first.returncode == 0, first.stdout
    second = agrpo(tmp_path, *ARGUMENTS, "run.max_steps=4", f"run.output_dir={run}", "run.resume=auto")
    assert second.returncode == 0, second.stdout
    records = assert_complete(run, 4)
    assert "weight sync sends the adapter" in (run / "logs" / "trainer0.log").read_text()
    for record in records:
        # Nothing was paused, and what the server drew is what the trainer computes for the version each rollout kept.
        assert record["perf/weight_sync_pause_s"] == 0 and record["perf/weight_sync_parity"] < 1e-4
        assert record["sample/staleness_max"] <= 1
    assert records[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert [r["perf/weight_sync_version"] for r in records][-1] >= 5
    assert not (run / ".vllm_lora").exists()
    path = json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    for folder in (run / "adapter", run / "checkpoints" / "step-000004" / "adapter"):
        base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        folded = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
        assert all(float((folded[n] - t).abs().max()) < 1e-5 for n, t in merged.items())
