"""What `--dry-run` prints: processes, exact commands, the shape of a step, memory, and every derived value."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from agrpo.config import Config, secrets
from agrpo.config.checkpoint_folder import start_of
from agrpo.config.model_folder import read_config
from agrpo.config.model_shape import Shape, shape_of
from agrpo.launch.plan import (
    Ports,
    context_length,
    is_managed,
    option_name,
    other_nodes,
    processes,
    server_urls,
    token_budget,
)
from agrpo.launch.processes import Launch
from agrpo.model.memory import BYTES, Memory, estimate
from agrpo.serve.flags import trainer_dtype

GIB = 2**30
EXAMPLE_PORTS = Ports(server=8000, master=8001)


def preview(config: Config, warnings: list[str]) -> str:
    """The plan as text; `config` is resolved (its devices split and its processes counted)."""
    sections = [
        ("processes", _processes(config)),
        ("step", _step(config)),
        ("memory (estimate)", _memory(config)),
        ("derived values", _derived(config)),
    ]
    if unseen := _unchecked(config):
        sections.append(("not checked (agrpo doctor does)", unseen))
    lines = []
    for title, body in sections:
        lines += [title, *("  " + line for line in body), ""]
    warnings = [*warnings, *small_step(config)]
    if warnings:
        lines += ["warnings", *("  " + line for line in warnings), ""]
    lines.append("dry run: nothing was started")
    return "\n".join(lines)


def _unchecked(config: Config) -> list[str]:
    """What this plan takes on trust, because it is not on this machine or cannot be looked at without starting it."""
    lines = []
    if read_config(config.model.path) is None:
        lines.append(f"model.path={config.model.path}: not on this machine")
    for key, data in [("data", config.data), *((f"eval.{name}.data", e.data) for name, e in config.eval.items())]:
        if getattr(data, "columns", lambda: None)() is None:
            lines.append(f"{key}.path={data.path}, and its columns: not on this machine" if hasattr(data, "path") else f"{key}: its columns")
    return lines + ([] if is_managed(config) else [f"the server at {', '.join(server_urls(config, EXAMPLE_PORTS))}"])


def _processes(config: Config) -> list[str]:
    planned = processes(config, Path(config.run.output_dir), EXAMPLE_PORTS)
    lines = []
    if planned.server is None:
        lines += [f"server    {', '.join(server_urls(config, EXAMPLE_PORTS))}, started by you, not by this run"]
    else:
        lines += _shown(planned.server)
    for launch in (planned.rollout, *planned.trainers):
        lines += _shown(launch)
    lines += other_nodes(config, Path(config.run.output_dir))
    return lines + ["(ports are chosen at start; 8000 and 8001 stand for them)"]


def _shown(launch: Launch) -> list[str]:
    command: dict[str, Any] = {"variables": dict(launch.environment), "words": list(launch.argv)}
    secrets.hide(command)  # a plan is shown to others
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in command["variables"].items())
    return [f"{launch.name:<9} on {launch.devices}", f"          {variables} {shlex.join(command['words'])}".rstrip()]


def _step(config: Config) -> list[str]:
    num_rows = config.run.num_ranks * config.run.gradient_accumulation_steps
    budget = token_budget(config)
    size = config.rollout.group_size
    microbatches = config.run.gradient_accumulation_steps
    shape = f"{microbatches} microbatch(es) x {config.run.num_ranks} row(s) = {num_rows} row(s)"
    if budget is None:
        return [f"{shape}; tokens per row = the server's max_model_len", f"groups of {size} rollouts"]
    return [
        f"{shape} of {budget:,} unique tokens, at most {num_rows * budget:,} tokens per step",
        f"groups of {size} rollouts, {_group_tokens(config):,} tokens or fewer beside the prompt; {_groups_per_step(config)}",
    ]


def _group_tokens(config: Config) -> int:
    """Trained tokens of a group whose completions all end at the limit."""
    return config.rollout.group_size * config.sampler.max_completion_length


def _step_tokens(config: Config) -> int | None:
    """The most tokens that a step holds; None where only the server tells."""
    budget = token_budget(config)
    return budget and config.run.num_ranks * config.run.gradient_accumulation_steps * budget


def _groups_per_step(config: Config) -> str:
    held = _step_tokens(config) // _group_tokens(config)
    if held:
        return f"a step holds {held} of that length, prompts aside"
    return f"one of that length fills {math.ceil(_group_tokens(config) / _step_tokens(config))} steps"


def small_step(config: Config) -> list[str]:
    """A warning where a step is smaller than a group can be: one prompt then decides the whole update."""
    tokens = _step_tokens(config)
    if tokens is None or tokens >= _group_tokens(config):
        return []
    return [
        f"a step holds {tokens:,} tokens, less than a group of {_group_tokens(config):,} (all {config.rollout.group_size} completions "
        f"at the limit of {config.sampler.max_completion_length:,}): where completions are that long, one prompt decides a step; "
        "raise run.gradient_accumulation_steps or packer.token_budget"
    ]


def _memory(config: Config) -> list[str]:
    shape = shape_of(config.model.path)
    if shape is None:
        return [f"unknown: neither files on this machine nor the name of {config.model.path} tell the model's size"]
    memory = trainer_memory(config, shape)
    lines = [
        f"model      {_count(shape.num_parameters)} parameters (from {shape.source})",
        f"trainer    {_size(memory.peak)} per rank at the peak of a step, over {config.run.num_ranks} rank(s)",
    ]
    parts = {
        "weights": memory.weights,
        f"copy of the weights in {config.model.precision}": memory.compute_copy,
        "gradients": memory.gradients,
        f"state of {config.optimizer.name}": memory.optimizer,
        f"activations of one row of {token_budget(config) or 0:,} tokens": memory.activations,
        "logits of one slice and gradient of the head": memory.logits,
        "layers gathered from the other ranks": memory.gathered,
        "weight sync, not at the same time as a step": memory.sync,
    }
    lines += [f"           {_size(size)} {what}" for what, size in parts.items() if size]
    if memory.host:
        lines.append(f"           {_size(memory.host)} of main memory: weights, gradients and state of {config.optimizer.name}")
    if not memory.activations:
        missing = [] if shape.text else ["the sizes in config.json"]
        missing += [] if token_budget(config) else ["packer.token_budget, else the server tells it"]
        lines.append(f"           activations are not estimated: they need {' and '.join(missing)}")
    return lines + _server_memory(config, shape) + _fit(config, memory.peak)


def _size(num_bytes: float) -> str:
    """2.24 GiB, 81.3 GiB, or 3.1 MiB below a tenth of one."""
    if num_bytes < GIB / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.{2 if num_bytes < 10 * GIB else 1}f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"


def trainer_memory(config: Config, shape: Shape) -> Memory:
    """What one trainer rank of this resolved configuration needs."""
    return estimate(
        config.model,
        shape.text,
        num_parameters=shape.num_parameters,
        num_frozen=shape.num_frozen,
        num_ranks=config.run.num_ranks,
        row_tokens=token_budget(config),
        optimizer=config.optimizer.name,
        bucket_mb=getattr(config.sync, "bucket_mb", 0),
        num_microbatches=config.run.gradient_accumulation_steps,
        device="cuda" if (config.run.devices or {}).get("trainer") else "cpu",
    )


def _server_memory(config: Config, shape: Shape) -> list[str]:
    devices = (config.run.devices or {}).get("server", [])
    if hasattr(config.server, "served_dtype"):
        dtype = config.server.served_dtype(config)
    else:
        dtype = getattr(config.server, "dtype", None) or config.model.dtype
    weights = shape.num_parameters * BYTES[dtype]
    if not devices:
        return [f"server     {_size(weights)}: weights in {dtype}, beside the key-value cache"]
    per_copy = getattr(config.server, "tensor_parallel_size", 1)
    share = getattr(config.server, "gpu_memory_utilization", 0.9)
    total = config.devices.gpus[devices[0]].memory_mib * 2**20 * share
    cache = total - weights / per_copy
    return [
        f"server     {_size(weights / per_copy)} per GPU: weights in {dtype}; {cache / GIB:.1f} GiB left for "
        f"the key-value cache ({share:.0%} of the GPU)"
    ]


def _fit(config: Config, trainer_bytes: float) -> list[str]:
    devices = (config.run.devices or {}).get("trainer", [])
    smallest = min((config.devices.gpus[i].memory_mib * 2**20 for i in devices), default=None)
    if smallest is not None and trainer_bytes > 0.9 * smallest:
        return [
            f"           more than the trainer's GPU holds ({smallest / GIB:.0f} GiB): raise run.num_processes"
        ]
    return []


def _derived(config: Config) -> list[str]:
    rollout, budget = config.rollout, token_budget(config)
    steps = f"{config.run.max_steps} steps" if config.run.max_steps else f"{config.run.num_train_epochs:g} epoch(s)"
    rows = config.run.num_ranks * config.run.gradient_accumulation_steps
    window = f"max(max_staleness {rollout.max_staleness}, 1) steps of tokens"
    window += f", averaged over {rollout.allowance_window_steps} steps"
    values = {
        "run.output_dir": config.run.output_dir,
        "run.num_processes": config.run.num_processes,
        "run.devices": config.run.devices or "cpu",
        "run.resume": start_of(config.run.resume, Path(config.run.output_dir)),
        "run length": steps,
        "server.max_model_len": context_length(config) or "told by the server",
        "packer.token_budget": budget or "the server's max_model_len",
        "admission window": window
        + (f", at first {max(rollout.max_staleness, 1) * rows * budget:,} tokens" if budget else ""),
        "loss": option_name(config.loss),
        "sync": f"{option_name(config.sync)}, mode {config.sync.mode}, every {config.sync.every_steps} step(s)",
        "schedule": _schedule(config),
        "precision": f"weights {config.model.dtype}, forward and backward {trainer_dtype(config.model)}",
        "fsdp": "on" if config.run.num_ranks > 1 or config.model.fsdp.enabled else "off",
        "loss.epsilon_high": _epsilon_high(config.loss),
        "data.seed": config.run.seed if getattr(config.data, "seed", None) is None else config.data.seed,
        "server.model_name": config.server.model_name or config.model.path,
    }
    return [f"{name:<22} {value}" for name, value in values.items() if value is not None]


def _schedule(config: Config) -> str:
    optimizer, warmup = config.optimizer, config.optimizer.warmup_steps
    if 0 < warmup < 1:
        warmup = warmup * config.run.max_steps * getattr(config.loss, "updates_per_step", 1)
    return f"{optimizer.lr_scheduler_type}, peak {optimizer.learning_rate:g}, {warmup:g} update(s) of warm-up"


def _epsilon_high(loss: Any) -> float | None:
    if not hasattr(loss, "epsilon_high"):
        return None
    return loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
