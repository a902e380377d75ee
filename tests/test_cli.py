"""The command line as a user meets it: help without torch, one line and exit code 3 for bad input, plans, sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.bench.help import loaded

ROOT = Path(__file__).parents[1]
QUESTION = {"role": "user", "content": "1 + 1 ="}


def agrpo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "agrpo", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def base(tmp_path) -> list[str]:
    """Overrides of a run that could start on this machine, without the model's weights being read."""
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": [QUESTION], "answer": "2"}) + "\n")
    (tmp_path / "rewards.py").write_text(
        "def length(completions, **columns):\n    return [0.0 for _ in completions]\n"
        "def wrong(no_such_column, **columns):\n    return [0.0]\n"
    )
    return [
        "train", "data=jsonl", "data.path=good.jsonl", "server=embedded", "model.path=owner/model",
        "scorer.functions=[rewards.length]",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_neither_torch_nor_hydra(arguments):
    assert loaded(arguments) == []


def test_help_shows_examples_and_how_to_list_options(tmp_path):
    result = agrpo("train", "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "agrpo train +recipe=quickstart" in result.stdout and "--cfg job" in result.stdout


def test_cfg_job_prints_the_configuration_without_torch(tmp_path):
    result = agrpo("train", "+recipe=quickstart", "loss=grpo", "rollout.group_size=5", "--cfg", "job", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    tree = yaml.safe_load(result.stdout)
    assert tree["loss"]["_target_"] == "agrpo.loss.grpo.Grpo" and tree["rollout"]["group_size"] == 5
    assert loaded(["train", "+recipe=quickstart", "--cfg", "job"], ("torch", "vllm")) == []


BAD = {
    "loss.epsilom=0.1": "loss.epsilom is not a key; did you mean loss.epsilon?",
    "+foo=1": "foo is not a key; top-level keys: ",
    "run.max_steps=-5": "run.max_steps must be >= 1, got -5",
    "data.path=missing.jsonl": "data.path: missing.jsonl does not exist",
    "data.path=broken.jsonl": "data.path: broken.jsonl line 17",
    "data.path=no_prompt.jsonl": "prompt",
    "data.path=plain.jsonl": "prompt",
    "scorer.functions=[no.such.reward]": "no.such.reward",
    "scorer.functions=[rewards.wrong]": "no_such_column",
    "rollout.group_size=1": "rollout.group_size",
    "num_generations=8": "num_generations is not a key of agrpo; use rollout.group_size=8",
    "+num_generations=8": "num_generations is not a key of agrpo; use rollout.group_size=8",
    "sampler.temperature=0": "sampler.temperature must be >= 0.01, got 0.0",
    "sync=nccl": "sync=nccl needs a GPU",
    "model.path=empty": "no config.json and no weights (*.safetensors); give a folder written by save_pretrained",
    "model.path=run": "no config.json and no weights (*.safetensors); give the model in it: run/model",
    "model.path=unfinished": "give what this writes: agrpo export unfinished --output FOLDER",
    "run.output_dir=good.jsonl/run": "run.output_dir: ",
    "run.output_dir=/proc/agrpo": "run.output_dir: /proc/agrpo cannot be written",
    "loss=grop": "loss=grop does not exist; did you mean loss=grpo?",
    "+recipe=quikstart": "recipe=quikstart does not exist; did you mean recipe=quickstart?",
    "run.resume=auto": "run.resume=auto looks for checkpoints in run.output_dir, and its default is a new folder",
    "beta=0.04": "beta has no key in agrpo: there is no KL term",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_3(tmp_path, base, override):
    row = json.dumps({"prompt": [QUESTION], "answer": "2"}) + "\n"
    (tmp_path / "broken.jsonl").write_text(row * 16 + '{"prompt": \n' + row)
    (tmp_path / "no_prompt.jsonl").write_text('{"question": "1 + 1"}\n')
    (tmp_path / "plain.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    for folder in ("empty", "run/model", "unfinished/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    before = sorted(p.name for p in tmp_path.iterdir())
    result = agrpo(*base, override, cwd=tmp_path)
    assert result.returncode == 3, result.stdout + result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and BAD[override] in lines[0], result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    after = sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__")
    assert after == before, "a refused run leaves nothing behind"


def test_all_faults_of_a_command_line_come_together(tmp_path, base):
    result = agrpo(*base, "loss=grop", "run.max_steps=-5", "use_vllm=true", "run.output_dir=/proc/agrpo", cwd=tmp_path)
    assert result.returncode == 3
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    for word in ("loss=grop", "run.max_steps", "use_vllm", "run.output_dir"):
        assert any(line.startswith(word) for line in lines), word


def test_wrong_usage_is_exit_code_2(tmp_path):
    assert agrpo("trian", cwd=tmp_path).returncode == 2
    assert agrpo("train", "--dry-rum", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("command", ["train", "serve", "serve-check", "doctor", "eval MODEL"])
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--recipe quickstart", "a recipe is chosen with +recipe=quickstart, without dashes"),
        ("--recipe=quickstart", "a recipe is chosen with +recipe=quickstart, without dashes"),
        ("--run.seed=1", "keys are given without dashes: run.seed=1"),
        ("--learning-rate 1e-6", "use optimizer.learning_rate=1e-6"),
        ("--beta --dry-run", "beta has no key in agrpo"),
        ("--nonsense 3", "No such option: --nonsense"),
    ],
)
def test_a_key_typed_as_an_option_is_answered_with_its_form(command, typed, line):
    from typer.testing import CliRunner

    from agrpo.cli import app

    result = CliRunner().invoke(app, [*command.split(), *typed.split()])
    assert result.exit_code == 2 and line in result.output


def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path):
    result = agrpo("train", "+recipe=deepmath", "run.num_processes=1", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for text in (
        "VLLM_SERVER_DEV_MODE=1", "--weight-transfer-config '{\"backend\": \"nccl\"}'",
        "--logprobs-mode processed_logprobs",
        "--api-server-count 8", "--max-model-len 4096", "-m agrpo.rollout", "-m agrpo.train", "2.00 billion parameters",
        "packer.token_budget    4096", "constant, peak 1e-06", "groups of 8 rollouts", "run.output_dir",
        "admission window",
        "server=vllm needs a GPU",
    ):  # fmt: skip
        assert text in result.stdout, text
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_named_devices_assumes_as_many_and_says_what_a_step_holds(tmp_path):
    split = "run.devices={server: [0], trainer: [1, 2, 3]}"
    result = agrpo("train", "+recipe=deepmath", split, "model.precision=no", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for text in (
        "server    on GPU 0 (assumed GPU)", "trainer2  on GPU 3 (assumed GPU)", "planned for 4 GPUs of 80 GiB: this machine has none",
        # 3 rows of 4,096 tokens against 8 completions of 2,048
        "at most 12,288 tokens per step", "16,384 tokens or fewer beside the prompt; one of that length fills 2 steps",
        "a step holds 12,288 tokens, less than a group of 16,384", "weights float32, forward and backward float32",
        "not estimated: they need the sizes in config.json\n",
    ):  # fmt: skip
        assert text in result.stdout, text


def test_serve_prints_a_server_for_gpus_where_it_is_to_run_elsewhere(tmp_path):
    external = ["serve", "+recipe=deepmath", "server=external", "--print"]
    result = agrpo(*external, "server.base_url=http://node7:8000", cwd=tmp_path)
    assert result.returncode == 0 and "planned for a server and a trainer with GPUs, sync=nccl" in result.stderr
    assert "--gpu-memory-utilization" in result.stdout and '{"backend": "nccl"}' in result.stdout
    assert "--enforce-eager" not in result.stdout and "VLLM_CPU" not in result.stdout
    result = agrpo(*external, "server.base_url=http://localhost:8000", cwd=tmp_path)
    assert "--enforce-eager" in result.stdout and result.stderr == "planned for a CPU build of vllm: this machine has no GPU\n"


def test_dry_run_lists_what_it_takes_on_trust_and_an_objective_that_nothing_logs(tmp_path, base):
    heldout = "eval.heldout={_target_: agrpo.eval.Evaluation, data: {_target_: agrpo.data.jsonl.Jsonl, path: good.jsonl}}"
    hub = ["data=hub", "data.path=nosuch/dataset_zz", "run.objective=eval/heldout/rewrad", heldout]
    result = agrpo(*base, *hub, "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for text in (
        "not checked (agrpo doctor does)\n  model.path=owner/model: not on this machine\n",
        "  data.path=nosuch/dataset_zz, and its columns: not on this machine\n\n",
        "run.objective=eval/heldout/rewrad is no metric of agrpo, only one that your own code logs; did you mean eval/heldout/reward?",
    ):
        assert text in result.stdout, text
    result = agrpo("train", "+recipe=quickstart", "run.objective=rewards/any_name/mean", "--dry-run", cwd=tmp_path)
    assert "not checked" not in result.stdout and "run.objective" not in result.stdout


def test_dry_run_of_truncated_sampling_and_lora_adds_their_flags(tmp_path):
    overrides = ["sampler.top_k=40", "packer.token_budget=8192", "server.arguments=[--enforce-eager]"]
    text = agrpo("train", "+recipe=deepmath", *overrides, "--dry-run", cwd=tmp_path).stdout
    for flag in ("--return-sampling-mask --", "--enable-scale-out", "--max-model-len 8192", "--enforce-eager"):
        assert flag in text + "--", flag


def test_dry_run_still_refuses_what_no_machine_could_run(tmp_path):
    result = agrpo("train", "+recipe=deepmath", "loss.epsilon=2", "--dry-run", cwd=tmp_path)
    assert result.returncode == 3 and result.stderr == "loss.epsilon must be in (0, 1), got 2.0\n"


def test_a_sweep_makes_one_plan_per_job_and_a_bad_job_does_not_stop_it(tmp_path, base):
    result = agrpo(*base, "-m", "--dry-run", "loss=score_centering,grpo", "loss.epsilon=0.1,7", cwd=tmp_path)
    assert result.returncode == 3
    assert result.stdout.count("dry run: nothing was started") == 2
    assert "loss.epsilon must be in (0, 1), got 7.0" in result.stderr


def test_own_options_come_from_a_config_dir(tmp_path, base):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom agrpo.loss.grpo import Grpo\n"
        "@dataclass(frozen=True, slots=True, kw_only=True)\nclass Mine(Grpo):\n    pass\n"
    )
    (tmp_path / "more" / "loss").mkdir(parents=True)
    text = (ROOT / "conf" / "loss" / "grpo.yaml").read_text().replace("agrpo.loss.grpo.Grpo", "mine.Mine")
    (tmp_path / "more" / "loss" / "mine.yaml").write_text(text)
    result = agrpo(*base, "--config-dir", "more", "loss=mine", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "loss                   mine" in result.stdout
    assert agrpo(*base, "--config-dir", "nowhere", "--dry-run", cwd=tmp_path).returncode == 3


@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "conf" / "recipe").glob("*.yaml")))
def test_every_recipe_composes_from_any_folder(tmp_path, recipe):
    result = agrpo("train", f"+recipe={recipe}", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
