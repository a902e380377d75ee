"""A vLLM server that the run starts, watches and stops."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.config.model_shape import shape_of
from agrpo.schema import setting
from agrpo.serve.flags import ServerCommand, server_command, trainer_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """Starts vLLM's OpenAI server on a free port of this machine, on the server's share of the GPUs."""

    python: str | None = setting(None, "Python of the environment vllm is installed in; null = this one")
    timeout: float = setting(1800.0, "seconds to become healthy, and limit of each request and weight sync", gt=0)
    max_restarts: int = setting(5, "times within an hour it is started again after it died; 0 = never", ge=0)
    model_name: str | None = setting(None, "model to serve; null = model.path")
    parity_limit: float | None = setting(0.2, "largest mean log-prob difference to the trainer; null = no check", gt=0)
    max_model_len: int | None = setting(None, "context length; null = token budget, else derived from the prompt", ge=2)
    max_prompt_length: int = setting(2048, "room for the prompt where the context length is derived", ge=1)
    api_server_count: int | None = setting(
        None, "HTTP front-end processes; null = 8, on CPU 1; one halves the speed of a GPU with 8 log-probs", ge=1
    )
    tensor_parallel_size: int = setting(1, "GPUs that share one copy of the model", ge=1)
    gpu_memory_utilization: float = setting(0.9, "share of GPU memory for weights and cache", gt=0, le=1)
    dtype: str = setting(
        "auto",
        "precision of the served weights; auto = what the trainer computes in",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    arguments: list[str] = setting(
        doc="further vllm arguments, for example [--enforce-eager]; one of the same name replaces the planned one",
        factory=list,
    )
    environment_variables: dict[str, str] = setting(doc="further environment variables of the server", factory=dict)

    managed = True
    wants_gpu = True

    def problems(self, config: Any) -> list[str]:
        lines = []
        if not config.devices and self.python is None:
            lines.append(
                "server=vllm needs a GPU, and none is visible; choose server=embedded, or server=external for a server "
                "elsewhere, or set server.python to an environment with a CPU build of vllm"
            )
        if not config.devices and config.sampler.is_truncated:
            lines.append(
                f"sampler.top_k={config.sampler.top_k} needs candidate sets, which a CPU build of vllm does not give; "
                "choose server=embedded, or leave top_k, top_p and min_p at their defaults"
            )
        num_gpus = len(config.devices.split(config.run, True)["server"]) if config.devices else 0
        if config.devices and not num_gpus:
            lines.append(
                f"server=vllm needs a GPU of its own: {len(config.devices)} here, all given to the trainer; lower "
                "run.num_processes, or choose server=external or server=embedded"
            )
        if num_gpus % self.tensor_parallel_size:
            lines.append(
                f"server.tensor_parallel_size={self.tensor_parallel_size} must divide the server's {num_gpus} GPU(s); "
                "set run.devices={trainer: [..], server: [..]}"
            )
        lines += [] if getattr(config.devices, "assumed", False) else self._installation_problems(config)
        return lines

    def _installation_problems(self, config: Any) -> list[str]:
        if self.python is None:
            # Without a GPU another line already says that this server cannot run here.
            if config.devices and not is_installed():
                return [
                    "server.python: package vllm is not installed here; run: pip install 'agrpo[vllm]', or set "
                    "server.python to the Python of an environment that has it"
                ]
            return []
        python = shutil.which(os.path.expanduser(self.python))
        if python is None:
            return [f"server.python: {self.python} is not an executable; give the path of a Python with vllm"]
        if not has_vllm(python):
            return [f"server.python: {self.python} has no package vllm; run: {self.python} -m pip install vllm"]
        return []

    def context_length(self, config: Any) -> int:
        """--max-model-len: the token budget if set, else room for a prompt and one completion, within the model's (SRV-4)."""
        if self.max_model_len:
            return self.max_model_len
        wanted = getattr(config.packer, "token_budget", None)
        wanted = wanted or self.max_prompt_length + config.sampler.max_completion_length
        shape = shape_of(config.model.path)
        return min(wanted, shape.max_positions) if shape and shape.max_positions else wanted

    def served_dtype(self, config: Any) -> str:
        """--dtype: what the trainer computes in, unless it is given."""
        return trainer_dtype(config.model) if self.dtype == "auto" else self.dtype

    def planned(self, run_dir: Path, config: Any, port: int, num_gpus: int) -> ServerCommand:
        """Command and environment for `num_gpus` GPUs (0 = CPU build)."""
        python = (shutil.which(os.path.expanduser(self.python)) or self.python) if self.python else sys.executable
        return server_command(self, config, port, num_gpus, python)

    def standalone(self, run_dir: Path, config: Any, num_gpus: int) -> list[ServerCommand]:
        """The server alone, on the port where server=external looks for it."""
        return [self.planned(run_dir, config, 8000, num_gpus)]


def is_installed() -> bool:
    """Whether this Python has vllm."""
    return importlib.util.find_spec("vllm") is not None


def has_vllm(python: str) -> bool:
    """Whether that Python has vllm."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", code], capture_output=True, timeout=60).returncode == 0
