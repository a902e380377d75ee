"""What to say to a user of another system's option names: the agrpo key, or why there is none (CLI-3, CFG 24.9)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from agrpo.config.other_keys import KEYS
from agrpo.config.other_reasons import REASONS

_REASON_OF = {name: reason for names, reason in REASONS for name in names.split()}

# How a value is said where it cannot be copied: by value, "*" for any other; `{}` is the value.
_HUB = {"*": "checkpoint.hub.push={} checkpoint.hub.model_id=OWNER/NAME"}
_EVERY_SAVE = "checkpoint.hub.push=every_save checkpoint.hub.model_id=OWNER/NAME"
_DATA = {"*": "data=hub data.path={}"}
_FUNCTIONS = {"*": "scorer.functions=[{}]"}
_ATTENTION = {
    "sdpa": "model.attention_backend=sdpa", "eager": "model.attention_backend=torch",
    "flex_attention": "model.attention_backend=flex", "flash_attention_3": "model.attention_backend=fa3",
    "*": "model.attention_backend=auto",
}  # fmt: skip
_DUAL_CLIP = {"*": "loss=grpo loss.dual_clip={}"}
_LOSS = {"true": "loss=decoupled", "false": "loss=grpo"}
_SYNC = {"disk": "sync=disk", "nccl": "sync=nccl", "xccl": "sync=nccl"}
_CONTEXT = {"*": "server=vllm server.max_model_len={}"}
_SEQUENCES = {"*": "server=vllm server.arguments=[--max-num-seqs,{}]"}
_TENSOR_PARALLEL = {"*": "server=vllm server.tensor_parallel_size={}"}
_EPOCH = {"*": "checkpoint.strategy=epoch"}
_LOGGER = {"all": "logger=[console,tensorboard]", "*": "logger={}"}
_OFFLOAD = {"true": "model.fsdp.options={{cpu_offload: true}}", "false": "model.fsdp.options={{cpu_offload: false}}"}
_FLAG_OF_PEFT = {flag: {v: f"model.lora.options={{{{{flag}: {v}}}}}" for v in ("true", "false")} for flag in ("use_dora", "use_rslora")}
VALUES: dict[str, dict[str, str]] = {
    "bf16": {"true": "model.precision=bf16", "false": "model.precision=no"},
    "fp16": {"true": "model.precision=fp16", "false": "model.precision=no"},
    "disable_tqdm": {"true": "logger.progress_bar=false", "false": "logger.progress_bar=true"},
    "attn_implementation": _ATTENTION,
    "attn_impl": _ATTENTION,
    "fsdp": {"false": "model.fsdp.enabled=false", "*": "model.fsdp.enabled=true"},
    "push_to_hub": {"true": _EVERY_SAVE, "false": "checkpoint.hub.push=no"},
    "hub_strategy": {"checkpoint": _EVERY_SAVE, "all_checkpoints": _EVERY_SAVE, **_HUB},
    "resume_from_checkpoint": {
        "true": "run.resume=auto run.output_dir=FOLDER", "false": "run.resume=null", "*": "run.resume={}",
    },
    "resume_mode": {
        "auto": "run.resume=auto run.output_dir=FOLDER", "disable": "run.resume=null",
        "resume_path": "run.resume=RUN/checkpoints/step-NNNNNN",
    },
    "train_dataset": _DATA, "dataset_name": _DATA, "train_files": _DATA, "train_dataset.path": _DATA,
    "callbacks": {"*": "run.callbacks=[{}]"}, "tools": {"*": "env.tools=[{}]"},
    "reward_funcs": _FUNCTIONS, "reward_fn": _FUNCTIONS,
    "top_k": {"-1": "sampler.top_k=0", "*": "sampler.top_k={}"},
    "adv_norm": {"true": "advantage.token_norm=batch", "false": "advantage.token_norm=null"},
    "reward_normalization": {
        "true": "advantage.rollout_time_norm=true advantage.mean_level=null advantage.std_level=null",
        "false": "advantage.rollout_time_norm=false",
    },
    "group_reward_norm": {
        "true": "advantage.mean_level=group advantage.std_level=group",
        "false": "advantage.mean_level=null advantage.std_level=null",
    },
    "norm_adv_by_std_in_grpo": {"true": "advantage.std_level=group", "false": "advantage.std_level=null"},
    "overlong_reward_penalty": {
        "true": "advantage.overlong.enabled=true advantage.overlong.tokens=NUMBER", "false": "advantage.overlong.enabled=false",
    },
    "dump_to_file": {"true": "rollout.dump_to_file=true rollout.fileroot=FOLDER", "false": "rollout.dump_to_file=false"},
    "score_centering": {"true": "loss=score_centering", "false": "loss=grpo"},
    "use_decoupled_loss": _LOSS, "recompute_logprob": _LOSS,
    "prox_logp_method": {
        "recompute": "loss=decoupled loss.proximal=recompute", "loglinear": "loss=decoupled loss.proximal=interpolate",
    },
    "ppo_n_minibatches": {
        "*": "loss=decoupled loss.updates_per_step={} run.gradient_accumulation_steps={}",
    },
    "behave_imp_weight_cap": {"*": "loss=decoupled loss.clip_max={}"},
    "behav_imp_weight_cap": {"*": "loss=decoupled loss.clip_max={}"},
    "rejection_sampling.upper": {"*": "loss=decoupled loss.clip_max={}"},
    "rejection_sampling.lower": {"*": "loss=decoupled loss.clip_min={}"},
    "use_cispo_loss": {"true": "loss=cispo", "false": "loss=grpo"},
    "optimizer.type": {"adam": "optimizer.name=adamw_torch_fused", "sgd": "optimizer.name=sgd"},
    "enable_tree_training": {"true": "packer=tree", "false": "packer=sequence"},
    "check_trajectory_format": {"true": "rollout.check_format=16", "false": "rollout.check_format=0"},
    "model_revision": {"*": "model.init_kwargs={{revision: {}}}"},
    "rollout_func": {"*": "rollout.workflow=MODULE.CLASS"},
    "main_process_ip": {"*": "run.master={}:29500"}, "main_process_port": {"*": "run.master=HOST:{}"},
    "transformer_layer_cls_to_wrap": {"*": "model.fsdp.options={{layer_classes: [{}]}}"},
    "gconfig.max_tokens": _CONTEXT, "sglang.context_length": _CONTEXT, "vllm.max_model_len": _CONTEXT,
    "mem_fraction_static": {"*": "server=vllm server.gpu_memory_utilization={}"},
    "max_running_requests": _SEQUENCES, "max_num_seqs": _SEQUENCES,
    "saver.freq_epochs": _EPOCH, "recover.freq_epochs": _EPOCH,
    "recover.mode": {"disabled": "run.resume=null", "*": "run.resume=auto run.output_dir=FOLDER"},
    "wandb.mode": {"disabled": "logger=console", "*": "logger=wandb"},
    "trackio.mode": {"disabled": "logger=console", "*": "logger=trackio"},
    "tensorboard.path": {"*": "logger=tensorboard"},
    "vllm_importance_sampling_cap": {"*": "loss=tis loss.upper={}"},
    "delta": _DUAL_CLIP, "c_clip": _DUAL_CLIP, "clip_ratio_c": _DUAL_CLIP,
    "weight_update_mode": _SYNC,
    "vllm_server_base_url": {"*": "server=external server.base_url={}"},
    "vllm_server_host": {"*": "server=external server.base_url=http://{}:8000"},
    "vllm_server_port": {"*": "server=external server.base_url=http://localhost:{}"},
    "tensor_model_parallel_size": _TENSOR_PARALLEL, "vllm.tensor_parallel_size": _TENSOR_PARALLEL,
    "gpu_memory_utilization": {"*": "server=vllm server.gpu_memory_utilization={}"},
    "loss_agg_mode": {
        "token-mean": "loss.aggregation=token", "seq-mean-token-mean": "loss.aggregation=sequence",
        "seq-mean-token-sum-norm": "loss=dr_grpo advantage.std_level=null",
    },
    "report_to": _LOGGER, "trainer.logger": _LOGGER,
    "param_offload": _OFFLOAD, "optimizer_offload": _OFFLOAD, "offload_params": _OFFLOAD, "optimizer.offload": _OFFLOAD,
    **_FLAG_OF_PEFT,
    "warmup_ratio": {"*": "optimizer.warmup_steps={} run.max_steps=NUMBER"},
    "warmup_steps_proportion": {"*": "optimizer.warmup_steps={} run.max_steps=NUMBER"},
}  # fmt: skip


def answer(key: str, value: Any = None) -> str | None:
    """The line for an option of another system, or None for any other unknown key.

    `answer("num_generations", 8)` is `num_generations is not a key of agrpo; use rollout.group_size=8`. A name is known
    wherever it stands: `actor.optimizer.lr` as `lr`.
    """
    name = _known(key)
    if name in KEYS and key != KEYS[name]:
        return f"{key} is not a key of agrpo; use {suggestion(name, value)}"
    if name in _REASON_OF:
        return f"{key} has no key in agrpo: {_REASON_OF[name]}"
    return None


def suggestion(name: str, value: Any = None) -> str:
    """What to type instead of an option of `KEYS`: overrides with this value where it has a meaning here, else the key."""
    here, typed = KEYS[name], _spell(value)
    if typed is None:
        return here
    if name in ("reward_funcs", "reward_fn") and not isinstance(value, list) and "." not in typed:
        typed = f"MODULE.{typed}"  # a name of another system's own list, or of the user's code
    if name in VALUES:
        form = VALUES[name].get(typed.strip('"'), VALUES[name].get("*"))
        if form is not None and form.startswith("data=hub") and typed.strip('"').endswith((".jsonl", ".json")):
            form = form.replace("data=hub", "data=jsonl")
        return here if form is None else _typed(form.format(*[_without_brackets(form, typed)] * form.count("{}")))
    return _typed(f"{here}={typed}") if re.fullmatch(r"[\w.]+", here) else here


def _known(key: str) -> str | None:
    """The name in the tables that `key` ends with, the longest first."""
    parts = key.split(".")
    names = (".".join(parts[i:]) for i in range(len(parts)))
    return next((name for name in names if name in KEYS or name in _REASON_OF), None)


def _spell(value: Any) -> str | None:
    """A plain value, or a list of them, as an override has it; None for any other."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return value if re.fullmatch(r"[^\s,\[\]{}()=:'\"]+|[^\s,\[\]{}()='\"]*[^\s,\[\]{}()='\":]", value) else f'"{value}"'
    if isinstance(value, list) and value and all(isinstance(v, str | int | float) for v in value):
        return "[" + ",".join(str(_spell(v)) for v in value) + "]"
    return None


def _without_brackets(form: str, typed: str) -> str:
    return typed.removeprefix("[").removesuffix("]") if "[{}]" in form else typed


def _typed(overrides: str) -> str:
    """Overrides as a shell takes them."""
    if not re.search(r"[\[{\"]", overrides):
        return overrides
    words = re.split(r" (?=[\w.]+=)", overrides)
    return " ".join(shlex.quote(word) for word in words)


def inside(key: str, value: Any) -> list[tuple[str, str | None]]:
    """Every option below an unknown section such as `actor`: its full name and its answer."""
    if not isinstance(value, Mapping):
        return []
    found: list[tuple[str, str | None]] = []
    for name, item in value.items():
        full = f"{key}.{name}"
        told = answer(full, item)
        deeper = [] if told else inside(full, item)
        found += deeper or [(full, told)]
    return found
