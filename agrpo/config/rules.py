"""Rules between keys, and between keys and this machine, that can be known without a server (COMPAT, CFG).

A rule that belongs to one component is a `problems(config)` method of that component; the rest is here. Each line names
the key, what was found, and what to write instead.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agrpo.config import checkpoint_folder
from agrpo.config.build import GROUPS, locate
from agrpo.config.devices import Devices
from agrpo.config.model_folder import model_problems
from agrpo.errors import ConfigError
from agrpo.sections import LORA_OPTIONS, LORA_STARTS, Run

if TYPE_CHECKING:
    from agrpo.config import Config

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd")
OLDEST_TRANSFORMERS = (5, 2, 0)


def problems(config: Config) -> list[str]:
    """Every violation, the components' own included; empty if the configuration can start."""
    lines = [*_run(config.run, config.devices), *_rollout(config), *_checkpoint(config), *_model(config)]
    lines += _optimizer(config)
    lines += _without_effect(config)
    for name in GROUPS:
        component = getattr(config, name)
        lines += component.problems(config) if hasattr(component, "problems") else []
    for name, evaluation in config.eval.items():
        found = evaluation.problems(config) if hasattr(evaluation, "problems") else []
        lines += [f"eval.{name}.{line}" for line in found]
    return list(dict.fromkeys(lines))


def problems_of_parts(parts: dict[str, Any], devices: Devices) -> list[str]:
    """What can be said while some part could not be read: rules of single sections only."""
    lines = []
    if parts["run"] is not None and parts["run"].output_dir:
        lines += _run(parts["run"], devices)
    if parts["model"] is not None and parts["model"].path:
        lines += model_problems(parts["model"])
    return lines


def warnings(config: Config) -> list[str]:
    """Lines for the log; the run goes on."""
    lines = []
    if config.rollout.max_concurrent_rollouts > 1024:
        lines.append(
            f"rollout.max_concurrent_rollouts={config.rollout.max_concurrent_rollouts}: above 1024, tools and "
            "connections may exhaust this machine's threads and file handles"
        )
    if config.model.lora.enabled and config.model.lora.dropout > 0:
        lines.append("model.lora.dropout > 0: trainer and server compute different log-probabilities")
    run_dir = Path(config.run.output_dir)
    start = checkpoint_folder.resumed(config.run.resume, run_dir)
    if start is not None and getattr(config.data, "streaming", False):  # RES-6
        lines.append("run.resume: a stream (data.streaming=true) has no position, so its prompts begin again with the first one")
    if config.run.resume == "auto" and start is None:
        lines.append(
            f"run.resume=auto found no checkpoint in {run_dir / 'checkpoints'}, so the run starts from step 0; if it should "
            "continue one, set run.output_dir to that run's folder"
        )
    return lines


def _run(run: Run, devices: Devices) -> Iterator[str]:
    yield from _output_dir(run)
    found = tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("transformers"))[:3])
    if found < OLDEST_TRANSFORMERS:
        yield f"transformers {'.'.join(map(str, found))} is too old; run: pip install 'transformers>=5.2.0'"  # COMPAT-5
    if run.resume not in (None, "auto") and (line := checkpoint_folder.fault(Path(run.resume))):
        yield line
    for path in run.callbacks:
        yield from _importable("run.callbacks", path)
    if run.num_nodes > 1 and not re.fullmatch(r"[\w.-]+:\d{1,5}", run.master or ""):
        yield (
            f"run.num_nodes={run.num_nodes} needs the place where the nodes meet: set run.master=HOST:PORT, an address of this "
            f"machine that the others reach and a free port, got {run.master}"
        )
    num_gpus = 0 if run.use_cpu else len(devices.gpus)
    if run.devices is not None:
        yield from _device_split(run.devices, num_gpus)
    if num_gpus and (run.num_processes or 1) > num_gpus:
        yield f"run.num_processes must be at most {num_gpus}, the number of GPUs here, got {run.num_processes}"


def _output_dir(run: Run) -> Iterator[str]:
    folder = Path(run.output_dir).expanduser()
    faults = list(_writable("run.output_dir", folder))
    yield from faults
    if not faults and run.resume is None and (folder / "metrics.jsonl").exists():
        yield (
            f"run.output_dir: {folder} already holds a run; continue it with run.resume=auto, or choose another folder"
        )


def _writable(key: str, folder: Path) -> Iterator[str]:
    existing = next(p for p in [folder, *folder.parents] if p.exists())
    if not existing.is_dir():
        yield f"{key}: {folder} cannot be created because {existing} is a file; choose another folder"
    elif not os.access(existing, os.W_OK) or str(existing.resolve()).startswith(("/proc", "/sys")):
        yield f"{key}: {folder} cannot be written; choose a folder you may write to"


def _device_split(split: dict[str, list[int]], num_gpus: int) -> Iterator[str]:
    unknown = sorted(set(split) - {"trainer", "server"})
    if unknown:
        yield f"run.devices must be {{trainer: [..], server: [..]}}, got the name(s) {', '.join(unknown)}"
    shared = sorted(set(split.get("trainer", [])) & set(split.get("server", [])))
    if shared:
        yield f"run.devices: trainer and server must not share a device, got {shared} in both"
    missing = sorted({i for ids in split.values() for i in ids if not 0 <= i < num_gpus})
    if missing:
        yield f"run.devices: no GPU with index {missing}; there are {num_gpus}, counted from 0"


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.dump_to_file and rollout.fileroot is None:
        yield "rollout.dump_to_file=true needs a folder: set rollout.fileroot=FOLDER"  # COMPAT-35
    if rollout.dump_to_file and rollout.fileroot is not None:
        yield from _writable("rollout.fileroot", Path(rollout.fileroot).expanduser())
    for key in ("experiment_name", "trial_name"):
        name = getattr(rollout, key)
        if name is not None and not re.fullmatch(r"[\w.-]+", name):
            yield f"rollout.{key} must be a plain folder name (letters, digits, - _ .), got {name!r}"
    if rollout.accept_fn:
        yield from _importable("rollout.accept_fn", rollout.accept_fn)


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    hub = checkpoint.hub
    if hub.push != "no" and hub.model_id is None:
        yield f"checkpoint.hub.push={hub.push} needs the repository: set checkpoint.hub.model_id=owner/name"
    if hub.model_id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", hub.model_id):
        yield f"checkpoint.hub.model_id must be owner/name, got {hub.model_id!r}"
    if not hub.commit_message.strip():
        yield "checkpoint.hub.commit_message must not be empty"
    if checkpoint.strategy == "no" and not checkpoint.save_final and config.model.lora.enabled:
        yield (
            "checkpoint.strategy=no with checkpoint.save_final=false would lose the trained adapter; set one of them "
            "otherwise"
        )  # LORA-15
    if not config.logger.project.strip():
        yield "logger.project must not be empty"


def _model(config: Config) -> Iterator[str]:
    model, run = config.model, config.run
    yield from model_problems(model)
    if model.fsdp.enabled is False and run.num_ranks > 1:
        yield f"model.fsdp.enabled=false needs run.num_processes=1, got {run.num_ranks} ranks: FSDP2 joins them"
    if str(model.fsdp.options.get("version", model.fsdp.options.get("fsdp_version", 2))) != "2":
        yield "model.fsdp.options: only FSDP2 is supported; leave the version out"  # COMPAT-6
    for key in ("cp_size", "sp_size"):
        if model.fsdp.options.get(key, 1) != 1:
            yield f"model.fsdp.options.{key} must be 1: context and sequence parallelism are not supported"  # COMPAT-7
    yield from _fsdp_counts(model.fsdp.options, run)
    if getattr(config.sync, "mode", None) == "lora" and not model.lora.enabled:
        yield "sync.mode=lora sends an adapter, and none is trained: use sync.mode=merged, or auto"
    if model.lora.enabled:
        yield from _lora(model.lora, getattr(config.sync, "mode", None))
    on_gpu = config.devices.has_gpu and not run.use_cpu
    yield from _attention(model.attention_backend, config.devices.gpus if on_gpu else None)
    if not on_gpu and model.precision == "fp16":
        yield "model.precision=fp16 needs a GPU; use bf16, or no for float32"
    weak = [g.name for g in config.devices.gpus if 0 < g.compute_capability < 8.0]
    if on_gpu and weak and model.precision == "bf16":
        yield f"model.precision=bf16 is not supported by {weak[0]}; use model.precision=fp16 or no"  # COMPAT-36


def _fsdp_counts(options: dict[str, Any], run: Run) -> Iterator[str]:
    copies, ahead = options.get("replicate", 1), options.get("prefetch", 1)
    if type(copies) is not int or copies < 1 or (run.num_processes and run.num_ranks % copies):
        ranks = f" ({run.num_ranks})" if run.num_processes else ""
        yield f"model.fsdp.options.replicate must divide the number of ranks{ranks}, got {copies}"
    if type(ahead) is not int or ahead < 0:
        yield f"model.fsdp.options.prefetch must be a number of layers >= 0, got {ahead}"


def _attention(backend: str, gpus: Any) -> Iterator[str]:
    """`gpus` is None on CPU. What depends on the model is refused when it is loaded."""
    if gpus is None and backend not in ("auto", "sdpa", "torch"):
        yield f"model.attention_backend={backend} needs a GPU; on CPU use auto"
    elif backend in ("fa3", "fa4", "aiter") and importlib.util.find_spec("kernels") is None:
        yield f"model.attention_backend={backend} needs the package kernels; run: pip install kernels, or use auto"


def _lora(lora: Any, mode: str | None) -> Iterator[str]:
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    if any(_names_head(target) for target in targets):
        yield "model.lora.target_modules must not include lm_head: the chunked head reads its base weights; remove it"
    if not targets:
        yield "model.lora.target_modules must name at least one module, or all-linear"
    own = {"lora_alpha": "alpha", "lora_dropout": "dropout", "r": "r", "target_modules": "target_modules"}
    for name, value in lora.options.items():
        if name in own:
            yield f"model.lora.options.{name} has a key of its own: set model.lora.{own[name]}"
        elif name not in LORA_OPTIONS:
            yield f"model.lora.options.{name} is not supported, allowed: {', '.join(LORA_OPTIONS)}"
        elif name == "init_lora_weights" and value not in LORA_STARTS:
            known = ", ".join(map(str, LORA_STARTS)).lower()
            yield (
                f"model.lora.options.init_lora_weights must be one of {known}, which leave the base weights as they are, "
                f"got {value!r}"
            )
    saved = lora.options.get("modules_to_save") or ()
    if any(_names_head(name) for name in ([saved] if isinstance(saved, str) else saved)):
        yield "model.lora.options.modules_to_save must not include lm_head: the chunked head reads its weights; remove it"
    if mode == "lora" and lora.merged_only is not None:
        yield f"{lora.merged_only} makes an adapter that servers cannot load: set sync.mode=merged, or auto"
    if importlib.util.find_spec("peft") is None:
        yield "model.lora.enabled=true needs the package peft; run: pip install 'agrpo[peft]'"


def _names_head(target: str) -> bool:
    if target in ("lm_head", "all-linear"):
        return target == "lm_head"
    try:
        return re.fullmatch(target, "lm_head") is not None
    except re.error:
        return fnmatch.fnmatch("lm_head", target)


def _optimizer(config: Config) -> Iterator[str]:
    optimizer, max_steps = config.optimizer, config.run.max_steps
    if "." in optimizer.name:
        yield from _importable("optimizer.name", optimizer.name)
    elif optimizer.name not in OPTIMIZERS:
        yield f"optimizer.name must be one of {', '.join(OPTIMIZERS)}, or an import path, got {optimizer.name!r}"
    if optimizer.lr_scheduler_type not in SCHEDULES:
        yield f"optimizer.lr_scheduler_type must be one of {', '.join(SCHEDULES)}, got {optimizer.lr_scheduler_type!r}"
    if optimizer.lr_scheduler_type in ("linear", "cosine") and max_steps is None:
        yield (
            f"optimizer.lr_scheduler_type={optimizer.lr_scheduler_type} decays over the run, so it needs its length: "
            "set run.max_steps=N, or use constant"
        )  # COMPAT-23
    if 0 < optimizer.warmup_steps < 1 and max_steps is None:
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps:g} is a share of run.max_steps, which is not set; set "
            "run.max_steps=N, or give whole steps"
        )


def _without_effect(config: Config) -> Iterator[str]:
    """Keys whose feature is not part of this version: a value that would change nothing is refused, never ignored."""
    optimizer = config.optimizer
    if optimizer.target_modules is not None:
        yield "optimizer.target_modules is not used by this version; leave it null"


def _importable(key: str, path: str) -> Iterator[str]:
    try:
        locate(path)
    except ConfigError as error:
        yield from (f"{key}: {line}" for line in error.problems)
