"""What `--dry-run` prints: processes, exact commands, the shape of a step, memory, and every derived value."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from agrpo.config import Config
from agrpo.config.model_folder import Shape, shape_of
from agrpo.launch.plan import Ports, context_length, option_name, processes, server_urls, token_budget
from agrpo.launch.processes import Launch

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, None: 4}
# fp32 master weights, two fp32 Adam moments, fp32 gradients
STATE_BYTES = 16
EXAMPLE_PORTS = Ports(server=8000, wire=8001, master=8002)


def preview(config: Config, warnings: list[str]) -> str:
    """The plan as text; `config` is resolved (its devices split and its processes counted)."""
    sections = [
        ("processes", _processes(config)),
        ("step", _step(config)),
        ("memory (estimate)", _memory(config)),
        ("derived values", _derived(config)),
    ]
    lines = []
    for title, body in sections:
        lines += [title, *("  " + line for line in body), ""]
    if warnings:
        lines += ["warnings", *("  " + line for line in warnings), ""]
    lines.append("dry run: nothing was started")
    return "\n".join(lines)


def _processes(config: Config) -> list[str]:
    planned = processes(config, Path(config.run.output_dir), EXAMPLE_PORTS)
    lines = []
    if planned.server is None:
        lines += [f"server    {', '.join(server_urls(config, EXAMPLE_PORTS))}, started by you, not by this run"]
    else:
        lines += _shown(planned.server)
    for launch in (planned.rollout, *planned.trainers):
        lines += _shown(launch)
    return lines + ["(ports are chosen at start; 8000 to 8002 stand for them)"]


def _shown(launch: Launch) -> list[str]:
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in launch.environment.items())
    return [f"{launch.name:<9} on {launch.devices}", f"          {variables} {shlex.join(launch.argv)}".rstrip()]


def _step(config: Config) -> list[str]:
    num_rows = config.run.num_processes * config.run.gradient_accumulation_steps
    budget = token_budget(config)
    size = config.rollout.group_size
    microbatches = config.run.gradient_accumulation_steps
    shape = f"{microbatches} microbatch(es) x {config.run.num_processes} row(s) = {num_rows} row(s)"
    if budget is None:
        return [f"{shape}; tokens per row = the server's max_model_len", f"groups of {size} rollouts"]
    longest = config.sampler.max_completion_length
    fewest = max(1, num_rows * budget // max(1, size * longest))
    return [
        f"{shape} of {budget:,} unique tokens, at most {num_rows * budget:,} tokens per step",
        f"groups of {size} rollouts; {fewest} or more groups per step (all completions at the limit of {longest:,})",
    ]


def _memory(config: Config) -> list[str]:
    shape = shape_of(config.model.path)
    if shape is None:
        return [f"unknown: {config.model.path} is not on this machine, and its name tells no size"]
    ranks = config.run.num_processes
    if config.model.lora.enabled:
        state = shape.num_parameters * BYTES[config.model.dtype] / ranks
        note = "frozen base weights; the adapter's state is small beside them"
    else:
        state = shape.num_parameters * STATE_BYTES / ranks
        note = "fp32 weights, gradients and two Adam moments"
    compute = 0 if config.model.precision == "no" else shape.num_parameters * 2 / ranks
    lines = [
        f"model      {shape.num_parameters / 1e9:.2f} billion parameters (from {shape.source})",
        f"trainer    {state / GIB:.1f} GiB per rank: {note}, over {ranks} rank(s)",
    ]
    if compute:
        lines.append(f"           {compute / GIB:.1f} GiB: copy of the weights in {config.model.precision}")
    lines += [f"           {line}" for line in _activations(config, shape)]
    return lines + _server_memory(config, shape) + _fit(config, state + compute)


def _activations(config: Config, shape: Shape) -> list[str]:
    budget = token_budget(config)
    if budget is None or not shape.hidden_size:
        return ["activations are not estimated: they need config.json and the token budget"]
    width = 4 if config.model.precision == "no" else 2
    # With checkpointing one input per layer is kept, and one layer is recomputed at a time.
    per_layer = budget * shape.hidden_size * width
    kept = shape.num_layers * per_layer if config.model.gradient_checkpointing else shape.num_layers * per_layer * 16
    working = per_layer * 16
    return [f"{(kept + working) / GIB:.1f} GiB: activations of one row of {budget:,} tokens"]


def _server_memory(config: Config, shape: Shape) -> list[str]:
    devices = (config.run.devices or {}).get("server", [])
    if hasattr(config.server, "served_dtype"):
        dtype = config.server.served_dtype(config)
    else:
        dtype = getattr(config.server, "dtype", None) or config.model.dtype
    weights = shape.num_parameters * BYTES[dtype]
    if not devices:
        return [f"server     {weights / GIB:.1f} GiB: weights in {dtype}, beside the key-value cache"]
    per_copy = getattr(config.server, "tensor_parallel_size", 1)
    share = getattr(config.server, "gpu_memory_utilization", 0.9)
    total = config.devices.gpus[devices[0]].memory_mib * 2**20 * share
    cache = total - weights / per_copy
    return [
        f"server     {weights / per_copy / GIB:.1f} GiB per GPU: weights in {dtype}; {cache / GIB:.1f} GiB left for "
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
    rows = config.run.num_processes * config.run.gradient_accumulation_steps
    window = f"max(max_staleness {rollout.max_staleness}, 1) steps of tokens"
    window += f", averaged over {rollout.allowance_window_steps} steps"
    values = {
        "run.output_dir": config.run.output_dir,
        "run.num_processes": config.run.num_processes,
        "run.devices": config.run.devices or "cpu",
        "run length": steps,
        "server.max_model_len": context_length(config) or "told by the server",
        "packer.token_budget": budget or "the server's max_model_len",
        "admission window": window
        + (f", at first {max(rollout.max_staleness, 1) * rows * budget:,} tokens" if budget else ""),
        "loss": option_name(config.loss),
        "sync": f"{option_name(config.sync)}, mode {config.sync.mode}, every {config.sync.every_steps} step(s)",
        "schedule": _schedule(config),
        "precision": f"weights {config.model.dtype}, forward and backward {config.model.precision}",
        "fsdp": "on" if config.run.num_processes > 1 or config.model.fsdp.enabled else "off",
        "loss.epsilon_high": _epsilon_high(config.loss),
        "data.seed": config.run.seed if getattr(config.data, "seed", None) is None else config.data.seed,
        "server.model_name": config.server.model_name or config.model.path,
    }
    return [f"{name:<22} {value}" for name, value in values.items() if value is not None]


def _schedule(config: Config) -> str:
    optimizer, warmup = config.optimizer, config.optimizer.warmup_steps
    if 0 < warmup < 1:
        warmup = warmup * config.run.max_steps
    return f"{optimizer.lr_scheduler_type}, peak {optimizer.learning_rate:g}, {warmup:g} warm-up step(s)"


def _epsilon_high(loss: Any) -> float | None:
    if not hasattr(loss, "epsilon_high"):
        return None
    return loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
