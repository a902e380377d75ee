"""Composition, reading and the rules: every YAML has its class's keys, every fault is one line."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from agrpo.config import build, check, compose, detect, load, read, save, to_tree
from agrpo.config.build import GROUPS, locate, read_section
from agrpo.config.checkpoint_folder import start_of
from agrpo.config.choices import conf_dir, options
from agrpo.config.devices import Devices, Gpu, _visible, assumed
from agrpo.config.hints import KEYS, REASONS, VALUES, answer, suggestion
from agrpo.config.model_shape import shape_of
from agrpo.errors import ConfigError
from agrpo.schema import setting
from agrpo.sections import Checkpoint, Logger, Model, Optimizer, Rollout, Run

CONF = conf_dir()
SECTIONS = {"model": Model, "optimizer": Optimizer, "logger": Logger}
COMPONENT_FILES = sorted(p for g in GROUPS for p in (CONF / g).glob("*.yaml"))
SECTION_FILES = sorted(p for g in SECTIONS for p in (CONF / g).glob("*.yaml"))
# A complete configuration that needs no file, no network and no GPU.
SMALL = [
    "model.path=owner/some-model", "data=hub", "data.path=owner/some-data", "server=embedded",
    "scorer.functions=[agrpo.scorer.rewards.accuracy_reward]", "run.output_dir=/tmp/agrpo-test-never-made",
]  # fmt: skip
GPUS = Devices(tuple(Gpu(str(i), "test GPU", 81920, 9.0) for i in range(4)))


def problems(*overrides: str, devices: Devices = Devices()) -> list[str]:
    try:
        check(compose([*SMALL, *overrides]), devices)
    except ConfigError as error:
        return error.problems
    return []


def id_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", COMPONENT_FILES, ids=id_of)
def test_a_component_file_has_exactly_the_fields_and_defaults_of_its_class(path):
    node = yaml.safe_load(path.read_text())
    cls = locate(node.pop("_target_"))
    assert cls.__module__.startswith(f"agrpo.{'serve' if path.parent.name == 'server' else path.parent.name}")
    _has_exactly_the_fields(node, cls)


@pytest.mark.parametrize("path", SECTION_FILES, ids=id_of)
def test_a_section_file_has_exactly_the_fields_of_its_section(path):
    node = yaml.safe_load(path.read_text())
    cls = SECTIONS[path.parent.name]
    assert set(node) == {f.name for f in dataclasses.fields(cls)}


@pytest.mark.parametrize(("name", "cls"), [("run", Run), ("rollout", Rollout), ("checkpoint", Checkpoint)])
def test_the_root_file_has_exactly_the_fields_and_defaults_of_each_fixed_section(name, cls):
    node = yaml.safe_load((CONF / "train.yaml").read_text())[name]
    node.pop("output_dir", None)
    _has_exactly_the_fields(node, cls, but=("output_dir",))


def _has_exactly_the_fields(node: dict, cls: type, but: tuple[str, ...] = ()) -> None:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in but}
    assert set(node) == set(fields)
    given = {k: v for k, v in node.items() if v != "???"}
    for name, value in given.items():
        result, found = read_section({name: value}, cls, "x")
        assert not [line for line in found if f"x.{name}" in line], found
        field = fields[name]
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        if result is not None:
            assert getattr(result, name) == default, name


@pytest.mark.parametrize("path", COMPONENT_FILES + SECTION_FILES + [CONF / "train.yaml"], ids=id_of)
def test_every_key_is_commented_in_its_file(path):
    for line in path.read_text().splitlines():
        if (
            line.strip()
            and not line.lstrip().startswith(("#", "_target_", "- ", "defaults:", "hydra:"))
            and line[-1] != ":"
        ):
            assert "#" in line or path.name == "train.yaml" and line.startswith("    "), line


COMPANIONS = {"dr_grpo": ["advantage.std_level=null"]}  # what an option refuses to go without


@pytest.mark.parametrize("group", [g for g in GROUPS if g not in ("data", "server")])
def test_every_option_composes_and_builds(group):
    for name in options(group):
        if name != "nccl":
            assert problems(f"{group}={name}", *COMPANIONS.get(name, ())) == [], name


def test_the_default_configuration_passes_and_survives_the_way_to_disk(tmp_path):
    config, _ = check(compose([*SMALL, f"run.output_dir={tmp_path}", "checkpoint.hub.token=secret"]), detect())
    save(config, tmp_path, ["a=1", "checkpoint.hub.token=secret", "checkpoint.hub={token: secret}"])
    again = load(tmp_path)
    assert to_tree(again) == to_tree(config)
    assert again.loss == config.loss and again.optimizer.learning_rate == 1e-6
    assert "secret" not in (tmp_path / "config.yaml").read_text()


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


def test_all_faults_are_reported_together():
    found = problems("loss.epsilom=0.1", "run.max_steps=-5", "beta=0.1", "foo=1", "optimizer.adam_beta1=1")
    assert len(found) == 5


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


def test_a_finished_run_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "run.resume=auto" in problems(f"run.output_dir={tmp_path}")[0]
    assert problems(f"run.output_dir={tmp_path}", "run.resume=auto") == []


def _checkpoint(folder: Path, can_be_resumed: bool = True) -> Path:
    """The files by which a checkpoint is known, without their content."""
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / ".metadata").touch()
    if can_be_resumed:
        (folder / "updater.json").touch()
    return folder


def test_what_cannot_be_resumed_is_refused_before_the_run(tmp_path):
    first, last = (_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{n:06d}") for n in (7, 11))
    model_only = _checkpoint(tmp_path / "small" / "checkpoints" / "step-000003", can_be_resumed=False)
    (tmp_path / "notes").mkdir()

    def found(value):
        return problems(f"run.output_dir={tmp_path / 'new'}", f"run.resume={value}")

    assert found(first) == found("auto") == []
    assert found(tmp_path / "run") == [f"run.resume: {tmp_path}/run is no checkpoint; its newest is run.resume={last}"]
    assert found(model_only) == [
        f"run.resume: {model_only} was saved with checkpoint.save_only_model=true and cannot be resumed"
    ]
    for folder in ("notes", "nowhere"):
        assert found(tmp_path / folder) == [
            f"run.resume: {tmp_path / folder} is no checkpoint; give a folder RUN/checkpoints/step-NNNNNN, or auto"
        ]


def test_where_a_run_starts_is_said_and_an_empty_auto_is_warned_of(tmp_path):
    def told(*overrides):
        config, warnings = check(compose([*SMALL, f"run.output_dir={tmp_path}", *overrides]), Devices())
        return start_of(config.run.resume, tmp_path), warnings

    assert told() == ("fresh, from step 0", [])
    start, (warning,) = told("run.resume=auto")
    assert start == "fresh, from step 0"
    assert warning.startswith(f"run.resume=auto found no checkpoint in {tmp_path}/checkpoints") and "run.output_dir" in warning
    _checkpoint(tmp_path / "checkpoints" / "step-000013")
    _checkpoint(tmp_path / "checkpoints" / "step-000017", can_be_resumed=False)
    assert told("run.resume=auto") == (f"step 13 ({tmp_path}/checkpoints/step-000013)", [])


@pytest.mark.parametrize(
    "name",
    "use_vllm vllm_mode per_device_train_batch_size beta use_liger_kernel deepspeed torch_compile "
    "remove_unused_columns ignore_data_skip repetition_penalty stop eval_steps label_smoothing_factor cp_size "
    "reward_weights".split(),
)
def test_options_without_a_key_are_answered_with_the_reason(name):
    for key in (name, f"sampler.{name}"):
        found = problems(f"{key}=1")
        assert len(found) == 1 and found[0].startswith(f"{key} has no key in agrpo: ")


def test_every_hint_leads_to_a_key_that_exists():
    trees = [compose([*SMALL, "server=external", "loss=grpo"])]
    trees += [compose([*SMALL, "server=vllm", f"loss={name}"]) for name in ("tis", "decoupled")]
    for name, here in KEYS.items():
        if here.startswith(("the group ", "loss=")):
            continue
        assert any(_has(tree, here.split(" ")[0]) for tree in trees), (name, here)
    assert answer("no_such_option") is None
    assert not {n for names, _ in REASONS for n in names.split()} & set(KEYS)
    assert set(VALUES) <= set(KEYS)


def _has(tree: dict, key: str) -> bool:
    for part in key.split("."):
        if part not in tree:
            return False
        tree = tree[part]
    return True


# What users of the other systems write, beside what the table of values names. Placeholders of an answer are filled in.
PLAUSIBLE = {
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "optim": "adamw_torch", "optimizers": "sgd", "save_strategy": "epoch",
    "lr_scheduler_type": "cosine", "log_level": "info", "hub_strategy": "end", "fsdp": "full_shard auto_wrap",
    "attn_implementation": "flash_attention_2", "attn_impl": "kernels-community/vllm-flash-attn3",
    "vllm_server_base_url": "http://node7:8000", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8001,
    "reward_funcs": ["agrpo.scorer.rewards.accuracy_reward"], "reward_fn": "agrpo.scorer.rewards.boxed_match",
    "resume_from_checkpoint": True, "dataset_name": "owner/some-data", "train_files": "owner/other-data", "report_to": "wandb",
    "trainer.logger": ["console", "tensorboard"], "epsilon_high": 0.28, "eps_clip_higher": 0.28, "clip_ratio_high": 0.28,
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": 0.1, "vllm_importance_sampling_cap": 3.0,
    "clip_ratio": 0.1, "clip_ratio_low": 0.1, "epsilon": 0.1, "eps_clip": 0.1, "min_p": 0, "top_p": 1.0, "top_k": -1,
    "temperature": 0.7, "adam_beta1": 0.8, "adam_beta2": 0.98, "beta1": 0.8, "beta2": 0.98, "lora_dropout": 0.05,
    "warmup_ratio": 0.1, "warmup_steps_proportion": 0.1, "hub_model_id": "owner/name", "gpu_memory_utilization": 0.6,
    "lora_target_modules": ["q_proj", "v_proj"], "target_modules": "all-linear", "tensor_model_parallel_size": 1,
    "callbacks": "agrpo.scorer.rewards.text_of", "nnodes": 1, "n_nodes": 1,
    "token_budget": 8192, "max_tokens_per_mb": 8192, "ppo_max_token_len_per_gpu": 8192, "num_processes": 1,
    "min_usable_group_size": 2, "loss_agg_mode": "seq-mean-token-mean", "overlong_penalty_factor": 0.5,
}  # fmt: skip
FILLED = {"OWNER/NAME": "owner/name", "NUMBER": "1000", "FOLDER": "/tmp/agrpo-test-never-made"}
NEEDS_MORE = {  # what the answer says to do is code, a file or a folder that this test has not
    "loop_cls", "workflow", "should_accept_fn", "environment_factory", "model_init_kwargs", "resume_mode", "trial", "tools",
}  # fmt: skip


@pytest.fixture(scope="module")
def defaults():
    """The default of every key, as the value that a user of another system may give."""
    return [compose([*SMALL, "server=external", "loss=grpo"])]


def _values_of(name: str, here: str, tree: dict) -> list:
    flags = {"true": True, "false": False}
    listed = [flags.get(v, v) for v in VALUES.get(name, {}) if v != "*"]
    if name in PLAUSIBLE:
        return [*listed, PLAUSIBLE[name]]
    if not listed and re.fullmatch(r"[\w.]+", here) and _has(tree, here):
        for part in here.split("."):
            tree = tree[part]
        return [3 if tree is None and name.startswith(("max", "num", "save", "total", "overlong")) else tree]
    return listed or [3]


def test_what_a_hint_says_to_type_is_accepted(defaults):
    alone, together = [], [{}]
    for name, here in KEYS.items():
        for value in [] if name in NEEDS_MORE else _values_of(name, here, defaults[0]):
            said = suggestion(name, value)
            if said == here or value is None or ("fa3" in said and not importlib.util.find_spec("kernels")):
                continue
            for placeholder, filled in FILLED.items():
                said = said.replace(placeholder, filled)
            words = dict(word.split("=", 1) for word in shlex.split(said))
            if all("." in key for key in words):
                # Composing takes time: answers to different keys are typed on one command line.
                batch = next((b for b in together if not set(b) & set(words)), None)
                together += [batch := {}] if batch is None else []
                batch.update(words)
            else:
                alone.append(words)
    assert len(alone) > 25 and sum(map(len, together)) > 80
    for words in [*together, *{tuple(w.items()): w for w in alone}.values()]:
        typed = [f"{key}={value}" for key, value in words.items()]
        try:
            check(compose([*SMALL, "run.max_steps=1000", "packer.token_budget=8192", *typed]), GPUS)
        except ConfigError as error:
            raise AssertionError(f"{' '.join(typed)}: {error.problems}") from None


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("actor.eps_clip=0.1", "actor.eps_clip is not a key of agrpo; use loss.epsilon=0.1"),
        ("actor.optimizer.lr=1e-5", "actor.optimizer.lr is not a key of agrpo; use optimizer.learning_rate=1e-05"),
        ("gconfig.n_samples=4", "gconfig.n_samples is not a key of agrpo; use rollout.group_size=4"),
        ("actor.adv_norm.mean_level=batch", "actor.adv_norm is not a key of agrpo; use advantage.token_norm (batch, group"),
        ("actor.path=owner/model", "actor.path is not a key of agrpo; use model.path=owner/model"),
        ("rollout.consumer_batch_size=32", "rollout.consumer_batch_size has no key in agrpo: it has no effect under a token"),
        ("allocation_mode=vllm:d4+fsdp:d4", "allocation_mode has no key in agrpo: every visible GPU is used"),
        ("critic.path=x", "critic has no key in agrpo: there is no critic"),
        ("delta=3", "delta is not a key of agrpo; use loss=grpo loss.dual_clip=3"),
        ("top_entropy_quantile=0.2", "top_entropy_quantile has no key in agrpo: "),
        ("disable_tqdm=true", "disable_tqdm is not a key of agrpo; use logger.progress_bar=false"),
        ("report_to=all", "report_to is not a key of agrpo; use 'logger=[console,tensorboard]'"),
        ("bf16=false", "bf16 is not a key of agrpo; use model.precision=no"),
        ("use_peft=false", "use_peft is not a key of agrpo; use model.lora.enabled=false"),
        ("dataset_name=a/b", "dataset_name is not a key of agrpo; use data=hub data.path=a/b"),
        ("dataset_name=x.jsonl", "dataset_name is not a key of agrpo; use data=jsonl data.path=x.jsonl"),
        ("reward_funcs=accuracy", "reward_funcs is not a key of agrpo; use 'scorer.functions=[MODULE.accuracy]'"),
        ("actor_rollout_ref.rollout.n=5", "actor_rollout_ref.rollout.n is not a key of agrpo; use rollout.group_size=5"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator has no key in agrpo: advantages are those of a group"),
        ("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node has no key in agrpo: every visible GPU is used"),
        ("actor.some_knob=1 actor.lr=1e-5", "actor.some_knob is not a key of agrpo; agrpo train --cfg job lists every key"),
    ],
)
def test_options_of_other_systems_are_answered_wherever_they_stood(typed, line):
    found = problems(*typed.split())
    assert found[0].startswith(line) and len(found) == len(typed.split()), found


def test_a_section_of_nobodys_is_one_line():
    assert problems("foo.a=1", "foo.b=2")[0].startswith("foo is not a key; top-level keys: ")


def test_devices_are_split_disjointly():
    run = read(compose(SMALL)).run
    assert GPUS.split(run, server_wants_gpu=True) == {"trainer": [2, 3], "server": [0, 1]}
    assert GPUS.split(run, server_wants_gpu=False) == {"trainer": [0, 1, 2, 3], "server": []}
    three = dataclasses.replace(run, num_processes=3)
    assert GPUS.split(three, server_wants_gpu=True) == {"trainer": [1, 2, 3], "server": [0]}
    assert Devices().split(run, True) == {"trainer": [], "server": []}
    given = dataclasses.replace(run, devices={"trainer": [0], "server": [3]})
    assert GPUS.split(given, True) == {"trainer": [0], "server": [3]}


def test_visible_devices_follow_the_drivers_rules():
    gpus = [("GPU-aaaa11", GPUS.gpus[0]), ("GPU-bbbb22", GPUS.gpus[1]), ("GPU-cccc33", GPUS.gpus[2])]
    assert [g.visible_id for _, g in _visible(gpus, "2,0")] == ["2", "0"]
    assert [g.visible_id for _, g in _visible(gpus, "GPU-bbbb22")] == ["1"]
    assert _visible(gpus, "") == [] and len(_visible(gpus, "0,9,1")) == 1


def test_size_of_a_model_from_its_config_and_from_its_name(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 5,'
        ' "vocab_size": 11, "intermediate_size": 7, "tie_word_embeddings": true}'
    )
    # per layer: q, o 8 x 10 each, k, v 8 x 5 each, three 8 x 7, two norms of 8; embedding 11 x 8; last norm
    assert shape_of(str(tmp_path)).num_parameters == 3 * (2 * 80 + 2 * 40 + 3 * 56 + 16) + 88 + 8
    assert shape_of("nobody/Some-Model-0.6B").num_parameters == 600_000_000
    assert shape_of("nobody/SmolThing-135M-Instruct").num_parameters == 135_000_000
    assert shape_of("nobody/plain") is None


def test_a_users_own_component_is_built_from_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine:\n"
        "    scale: float = 1.0\n"
        "    def __call__(self, terms): return terms\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build({"_target_": "my_losses.Mine", "scale": "2e-1"}, "loss").scale == 0.2
    with pytest.raises(ConfigError, match="loss.scales is not a key; did you mean loss.scale?"):
        build({"_target_": "my_losses.Mine", "scales": 1}, "loss")


def test_containers_and_unions_are_checked():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Example:
        ids: list[int] = setting(factory=list)
        names: dict[str, float] = setting(factory=dict)
        pair: tuple[float, float] | None = setting(None)
        modules: str | list[str] = setting("all")

    def found(**node):
        return read_section(node, Example, "x")[1]

    assert found(ids=[1, 2.0], names={"a": "1e3"}, pair=[0, 1], modules=["a"]) == []
    assert found(ids=[1, "b"]) == ["x.ids[1] must be an integer, got 'b'"]
    assert found(names={"a": None}) == ["x.names.a must be a number, got null"]
    assert found(pair=[1]) and found(modules={"a": 1})


def test_faults_of_keys_and_of_rules_are_reported_together():
    found = problems("loss.epsilom=0.1", "sampler.temperature=0", "rollout.group_size=1", "data.path=missing.jsonl")
    for start in ("loss.epsilom", "sampler.temperature", "rollout.group_size", "data.path"):
        assert [line for line in found if line.startswith(start)], start
    assert len(found) == 4


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        ({}, 2),
        ({"run": {"num_processes": 3}, "server": {"tensor_parallel_size": 2}}, 5),
        ({"run": {"devices": {"server": [0], "trainer": [1, 6]}}}, 7),
        ({"run": {"devices": {"trainer": ["x", None], "server": 3}}, "server": None}, 2),  # faults that the checks name
        ({"run": {"devices": {"trainer": [10**9]}}}, 1024),
    ],
)
def test_a_plan_without_gpu_assumes_as_many_as_the_configuration_names(tree, count):
    assert len(assumed(tree)) == count and assumed(tree).assumed
