"""What is refused: every fault is one line, and all of them come at once."""

import pytest

from agrpo.config import check, compose
from agrpo.config.devices import Devices
from tests.config.small import SMALL, problems


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("loss.epsilom=0.1", "loss.epsilom is not a key; did you mean loss.epsilon?"),
        ("run.max_steps=-5", "run.max_steps must be >= 1, got -5"),
        ("run.max_steps=1.5", "run.max_steps must be an integer or null, got 1.5"),
        ("run.use_cpu=1", "run.use_cpu must be true or false, got 1"),
        ("run.seed=true", "run.seed must be an integer, got True"),
        ("run.resume=true", "run.resume must be text or null, got True: null = fresh run, auto = newest checkpoint in output_dir, or a checkpoint's path"),
        ("run.callbacks=[nowhere.f]", "run.callbacks: nowhere.f cannot be imported (ModuleNotFoundError: No module named 'nowhere'); is its folder on PYTHONPATH?"),
        ("checkpoint.hub.push=true", "checkpoint.hub.push must be one of no, end, every_save, got True"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number, got 'fast'"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate must be >= 0, got -1.0"),
        ("model.precision=bf8", "model.precision must be one of bf16, fp16, no, got 'bf8'"),
        ("rollout.concurrency.poll_interval=0", "rollout.concurrency.poll_interval must be > 0, got 0.0"),
        (
            "rollout.concurrency.pollinterval=0",
            "rollout.concurrency.pollinterval is not a key; did you mean rollout.concurrency.poll_interval?",
        ),
        ("checkpoint.save_steps=0", "checkpoint.save_steps must be >= 1, got 0"),
        ("sampler.temperature=0", "sampler.temperature must be >= 0.01, got 0.0"),
        ("loss.epsilon=1.5", "loss.epsilon must be in (0, 1), got 1.5"),
        ("num_generations=8", "num_generations is not a key of agrpo; use rollout.group_size=8"),
        ("run.callbacks=x", "run.callbacks must be a list, got 'x'"),
        (
            "model.path=null",
            "model.path is required: Hub id, or a folder written by save_pretrained; give model.path=VALUE",
        ),
        ("loss._target_=agrpo.loss.grpo.Nope", None),
        ("loss._target_=nodots", None),
        ("packer._target_=agrpo.loss.grpo.Grpo", None),
    ],
)
def test_one_fault_is_one_line(override, line):
    found = problems(override)
    assert len(found) == 1
    assert line is None or found == [line]
    assert override.split("=")[0].removeprefix("+") in found[0]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["run.seed=1,2"], ["add -m", """'run.seed="1,2"'"""]),
        (["server.base_url=http://a:8000,http://b:8000"], ["""'server.base_url="http://a:8000,http://b:8000"'"""]),
        (["rollout.max_staleness", "=", "2"], ["without blanks", "no blanks", "KEY=VALUE"]),
        (["rollout.max_staleness:"], ["write rollout.max_staleness=VALUE"]),
        (["scorer.functions=[x"], ["the closing ] is missing"]),
        (["quickstart"], ["use +recipe=quickstart"]),
    ],
)
def test_a_slip_of_form_is_named(typed, words):
    found = problems(*typed)
    assert len(found) == len(typed) and all(word in "\n".join(found) for word in words), found
    assert not any("\n" in line for line in found)


def test_a_launcher_that_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("agrpo.config.overrides.LAUNCHERS", {"slurm": "no-such-launcher"})
    assert problems("hydra/launcher=submitit_slurm", "run.max_steps=-5") == [
        "hydra/launcher=submitit_slurm needs the package no-such-launcher; run: pip install 'agrpo[slurm]'"
    ]
    monkeypatch.setattr("agrpo.config.overrides.LAUNCHERS", {"slurm": "hydra-core"})  # one that is installed
    monkeypatch.setenv("PATH", "")
    assert problems("hydra/launcher=submitit_slurm")[0].startswith("hydra/launcher=submitit_slurm: there is no srun here")


def test_all_faults_are_reported_together():
    found = problems("loss.epsilom=0.1", "run.max_steps=-5", "beta=0.1", "foo=1", "optimizer.adam_beta1=1")
    assert len(found) == 5


def test_faults_of_keys_and_of_rules_are_reported_together():
    found = problems("loss.epsilom=0.1", "sampler.temperature=0", "rollout.group_size=1", "data.path=missing.jsonl")
    for start in ("loss.epsilom", "sampler.temperature", "rollout.group_size", "data.path"):
        assert [line for line in found if line.startswith(start)], start
    assert len(found) == 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_size=1"], ["rollout.group_size"]),
        (["optimizer.lr_scheduler_type=linear"], ["optimizer.lr_scheduler_type=linear", "run.max_steps"]),
        (["optimizer.lr_scheduler_type=wavy"], ["'wavy'", "cosine"]),
        (["optimizer.warmup_steps=0.1"], ["optimizer.warmup_steps=0.1", "run.max_steps"]),
        (["optimizer.name=adamx"], ["'adamx'", "adamw_torch_fused"]),
        (["sampler.top_p=0.9"], ["sampler.top_p", "top_k"]),
        (["packer.token_budget=100"], ["packer.token_budget", "2048"]),
        (["checkpoint.hub.push=end"], ["checkpoint.hub.model_id=owner/name"]),
        (["checkpoint.hub.model_id=plain"], ["owner/name", "'plain'"]),
        (["rollout.dump_to_file=true", "rollout.fileroot=null"], ["rollout.fileroot"]),
        (["rollout.dump_to_file=true", "rollout.fileroot=/proc/dump"], ["rollout.fileroot", "cannot be written"]),
        (["run.num_processes=2", "model.fsdp.enabled=false"], ["model.fsdp.enabled=false", "run.num_processes=1"]),
        (["model.fsdp.options={cp_size: 2}"], ["cp_size"]),
        (["model.fsdp.options={replicate: 3}", "run.num_processes=2"], ["model.fsdp.options.replicate", "ranks (2), got 3"]),
        (["model.fsdp.options={prefetch: some}"], ["model.fsdp.options.prefetch", "got some"]),
        (["model.lora.target_modules=[q_proj,lm_head]", "model=lora"], ["lm_head"]),
        (["sync=nccl"], ["sync=nccl needs a GPU", "gloo"]),
        (["server=vllm"], ["server=vllm needs a GPU", "server=embedded"]),
        (["server=external", "server.base_url=localhost:8000"], ["server.base_url", "http"]),
        (["model.precision=fp16"], ["model.precision=fp16 needs a GPU"]),
        (["model.attention_backend=fa3"], ["model.attention_backend=fa3 needs a GPU"]),
        (["model.path=/no/such/folder"], ["model.path", "/no/such/folder does not exist"]),
        (["run.resume=/no/such/checkpoint"], ["run.resume", "auto"]),
        (["run.output_dir=/proc/run"], ["run.output_dir", "cannot be written"]),
        (["run.output_dir=/etc/passwd/run"], ["run.output_dir", "/etc/passwd is a file"]),
        (["run.devices={trainer: [0], server: [0]}"], ["run.devices"]),
        (["scorer.functions=[]"], ["scorer.functions"]),
        (["scorer.functions=[no.such.reward]"], ["scorer.functions", "no.such.reward"]),
        (["data=none", "env.factory=null"], ["run.max_steps"]),
        (["sync.mode=lora"], ["sync.mode", "lora"]),
        # What this version has no use for is refused, never ignored.
        (["model=lora", "model.lora.options={rank: 3}"], ["model.lora.options.rank", "use_dora"]),
        (["model=lora", "model.lora.options={lora_alpha: 3}"], ["model.lora.alpha"]),
        (["model=lora", "model.lora.options={init_lora_weights: pissa}"], ["init_lora_weights", "gaussian"]),
        (["model=lora", "model.lora.options={modules_to_save: [lm_head]}"], ["modules_to_save", "lm_head"]),
        (["model=lora", "sync.mode=lora", "model.lora.options={use_dora: true}"], ["use_dora", "sync.mode=merged"]),
        (["model=lora", "server=embedded", "server.max_loras=5"], ["server.max_loras", "6"]),
        (["model=lora", "server=embedded", "server.max_lora_rank=8"], ["server.max_lora_rank", "32"]),
        (["optimizer.target_modules=[mlp]"], ["optimizer.target_modules", "null"]),
        (["optimizer.lr_scheduler_type=math.sqrt"], ["optimizer.lr_scheduler_type", "cosine", "'math.sqrt'"]),
        (["data.streaming=true"], ["run.max_steps", "data.streaming=true"]),
    ],
)
def test_rules_between_keys_name_key_and_remedy(overrides, words):
    overrides = [*overrides, *(["~data.path"] if "data=none" in overrides else [])]
    found = "\n".join(problems(*overrides))
    assert all(word in found for word in words), found


def test_values_that_are_read_kindly():
    assert problems("run.max_steps=-1") == problems("run.max_steps=0") == []
    config, _ = check(
        compose([*SMALL, "run.max_steps=-1", "rollout.group_size=4.0", "optimizer.learning_rate=1e-5"]), Devices()
    )
    assert config.run.max_steps is None and config.rollout.group_size == 4
    assert config.optimizer.learning_rate == 1e-5


def test_a_model_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert problems(f"model.path={tmp_path}") == [
        f"model.path: folder {tmp_path} has no weights (*.safetensors); give a folder written by save_pretrained"
    ]


def test_a_section_of_nobodys_is_one_line():
    assert problems("foo.a=1", "foo.b=2")[0].startswith("foo is not a key; top-level keys: ")
