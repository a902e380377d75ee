"""Everything derived before a run starts: devices, processes with their commands and environment, ports."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.config import Config
from agrpo.launch.processes import Launch, free_ports


@dataclass(frozen=True, slots=True)
class Ports:
    server: int
    master: int  # the trainer ranks' meeting point

    @staticmethod
    def free() -> Ports:
        return Ports(*free_ports(2))


@dataclass(frozen=True, slots=True)
class Processes:
    """What a run consists of, in the order of its start."""

    server: Launch | None  # None where somebody else runs it
    trainers: list[Launch]  # one per rank
    rollout: Launch


def processes(config: Config, run_dir: Path, ports: Ports) -> Processes:
    """Every process of the run. `config` is resolved."""
    return Processes(
        server_launch(config, run_dir, ports), trainer_launches(config, run_dir, ports), rollout_launch(run_dir)
    )


def resolved(config: Config) -> Config:
    """The configuration with the device split and the number of trainer processes filled in."""
    split = config.devices.split(config.run, is_managed(config) and getattr(config.server, "wants_gpu", True))
    num_processes = config.run.num_processes or len(split["trainer"]) or 1
    run = dataclasses.replace(config.run, num_processes=num_processes, devices=split if config.devices else None)
    return dataclasses.replace(config, run=run)


def is_managed(config: Config) -> bool:
    """Whether the run starts the server itself."""
    return getattr(config.server, "managed", True)


def server_urls(config: Config, ports: Ports) -> tuple[str, ...]:
    return (f"http://127.0.0.1:{ports.server}",) if is_managed(config) else config.server.urls


def server_launch(config: Config, run_dir: Path, ports: Ports) -> Launch | None:
    """The managed server, None where somebody else runs it. `config` is resolved."""
    if not is_managed(config):
        return None
    devices = _devices_of(config, "server")
    planned = config.server.planned(run_dir, config, ports.server, len(devices))
    return Launch(
        name="server",
        argv=planned.argv,
        environment={**_visible(config, devices), **planned.here()},
        devices=_words(config, devices),
    )


def trainer_launches(config: Config, run_dir: Path, ports: Ports) -> list[Launch]:
    """One launch per rank, with torchrun's variables. `config` is resolved."""
    devices = _devices_of(config, "trainer")
    shared = _visible(config, devices)
    if config.checkpoint.hub.token:
        shared["HF_TOKEN"] = config.checkpoint.hub.token
    if "OMP_NUM_THREADS" not in os.environ and not devices:
        # On CPU the ranks share the cores; a server of this run keeps one of them.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shared["OMP_NUM_THREADS"] = str(max(1, (cores - is_managed(config)) // config.run.num_processes))
    if config.run.num_nodes > 1:
        return [Launch("trainer0", node_command(config, run_dir, 0), shared, _words(config, devices), is_agent=True)]
    launches = []
    for rank in range(config.run.num_processes):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": config.run.num_processes}
        world |= {"LOCAL_WORLD_SIZE": config.run.num_processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports.master}
        own = devices[rank : rank + 1]
        launches.append(
            Launch(
                name=f"trainer{rank}",
                argv=[sys.executable, "-m", "agrpo.train", str(run_dir)],
                environment={**shared, **{k: str(v) for k, v in world.items()}},
                devices=_words(config, own),
            )
        )
    return launches


def node_command(config: Config, run_dir: Path, node: int) -> list[str]:
    """torchrun with the ranks of one node; node 0 is this machine and runs it itself (CLI-12)."""
    host, _, port = config.run.master.rpartition(":")
    options = {
        "nnodes": config.run.num_nodes,
        "node-rank": node,
        "nproc-per-node": config.run.num_processes,
        "master-addr": host,
        "master-port": port,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", "agrpo.train", str(run_dir.absolute())]


def other_nodes(config: Config, run_dir: Path) -> list[str]:
    """What is to be typed on the other machines, which share the run's folder."""
    return [
        f"on node {node}: torchrun {shlex.join(node_command(config, run_dir, node)[3:])}"
        for node in range(1, config.run.num_nodes)
    ]


def rollout_launch(run_dir: Path) -> Launch:
    return Launch(
        name="rollout",
        argv=[sys.executable, "-m", "agrpo.rollout", str(run_dir)],
        environment={"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def _devices_of(config: Config, role: str) -> list[int]:
    return (config.run.devices or {}).get(role, [])


def _visible(config: Config, devices: list[int]) -> dict[str, str]:
    """What limits a process to its devices; nothing to limit on a machine without any."""
    if not config.devices and not config.run.use_cpu:
        return {}
    return {"CUDA_VISIBLE_DEVICES": config.devices.visible_ids(devices)}


def _words(config: Config, devices: list[int]) -> str:
    return ", ".join(f"GPU {i} ({config.devices.gpus[i].name})" for i in devices) or "cpu"


def context_length(config: Config) -> int | None:
    """The longest sequence the server will take, where the configuration alone decides it."""
    if hasattr(config.server, "context_length"):
        return config.server.context_length(config)
    return getattr(config.server, "max_model_len", None)


def token_budget(config: Config) -> int | None:
    """Tokens per row; None until the server tells its context length."""
    return getattr(config.packer, "token_budget", None) or context_length(config)


def option_name(component: Any) -> str:
    """The option a component was chosen by: its class in snake case."""
    name = type(component).__name__
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))
