"""A vLLM server that the run starts, watches and stops: its exact command and environment (SRV-4, SAMP-5, LORA-4)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.schema import setting

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values --max-lora-rank accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """Starts vLLM's OpenAI server on a free port of this machine, on the server's share of the GPUs."""

    python: str | None = setting(None, "Python of the environment vllm is installed in; null = this one")
    timeout: float = setting(1800.0, "seconds to become healthy, and limit of each request and weight sync", gt=0)
    model_name: str | None = setting(None, "model to serve; null = model.path")
    parity_limit: float | None = setting(0.2, "largest mean log-prob difference to the trainer; null = no check", gt=0)
    max_model_len: int | None = setting(None, "context length; null = token budget, else derived from the prompt", ge=2)
    max_prompt_length: int = setting(2048, "room for the prompt where the context length is derived", ge=1)
    api_server_count: int = setting(8, "HTTP front-end processes; one halves the speed with 8 log-probs", ge=1)
    tensor_parallel_size: int = setting(1, "GPUs that share one copy of the model", ge=1)
    gpu_memory_utilization: float = setting(0.9, "share of GPU memory for weights and cache", gt=0, le=1)
    dtype: str = setting("auto", "precision of the served weights", choices=("auto", "bfloat16", "float16", "float32"))
    arguments: list[str] = setting(doc="further vllm arguments, for example [--enforce-eager]", factory=list)
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
        if config.devices and not config.devices.split(config.run, True)["server"]:
            lines.append(
                f"server=vllm needs a GPU of its own: {len(config.devices)} visible, all given to the trainer; lower "
                "run.num_processes, or choose server=external or server=embedded"
            )
        lines += [] if getattr(config.devices, "assumed", False) else self._installation_problems(config)
        return lines

    def _installation_problems(self, config: Any) -> list[str]:
        if self.python is None:
            # Without a GPU another line already says that this server cannot run here.
            if config.devices and importlib.util.find_spec("vllm") is None:
                return [
                    "server.python: package vllm is not installed here; run: pip install 'agrpo[vllm]', or set "
                    "server.python to the Python of an environment that has it"
                ]
            return []
        python = shutil.which(os.path.expanduser(self.python))
        if python is None:
            return [f"server.python: {self.python} is not an executable; give the path of a Python with vllm"]
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        if subprocess.run([python, "-c", code], capture_output=True, timeout=60).returncode:
            return [f"server.python: {self.python} has no package vllm; run: {self.python} -m pip install vllm"]
        return []

    def context_length(self, config: Any) -> int:
        """--max-model-len: the token budget if set, else room for a prompt and one completion (SRV-4)."""
        budget = getattr(config.packer, "token_budget", None)
        return self.max_model_len or budget or self.max_prompt_length + config.sampler.max_completion_length

    def command(self, run_dir: Path, config: Any, port: int, num_gpus: int) -> list[str]:
        """The command line for `num_gpus` GPUs (0 = CPU build)."""
        python = (shutil.which(os.path.expanduser(self.python)) or self.python) if self.python else sys.executable
        # `vllm serve` is this module; the CPU build's console script is broken, the module works in every build.
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model_name or config.model.path]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--seed", str(config.run.seed)]
        argv += ["--weight-transfer-config", json.dumps({"backend": transfer_backend(config.sync)})]
        argv += ["--logprobs-mode", "processed_logprobs", "--api-server-count", str(self.api_server_count)]
        argv += ["--max-model-len", str(self.context_length(config)), "--enable-scale-out"]
        argv += self._sampling_arguments(config.sampler)
        if num_gpus:
            data_parallel = max(1, num_gpus // self.tensor_parallel_size)
            argv += ["--gpu-memory-utilization", f"{self.gpu_memory_utilization:g}"]
            argv += ["--tensor-parallel-size", str(self.tensor_parallel_size)] if self.tensor_parallel_size > 1 else []
            argv += ["--data-parallel-size", str(data_parallel)] if data_parallel > 1 else []
        argv += ["--trust-remote-code"] if config.model.trust_remote_code else []
        argv += _lora_arguments(config) if config.model.lora.enabled else []
        return argv + self.arguments

    def environment(self, config: Any) -> dict[str, str]:
        """The variables to add to the server's environment."""
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if config.model.lora.enabled:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return variables | self.environment_variables

    def _sampling_arguments(self, sampler: Any) -> list[str]:
        argv = []
        heads = getattr(sampler, "num_sampler_logprobs", 0)
        if heads > 20:  # vLLM's own limit
            argv += ["--max-logprobs", str(heads)]
        if sampler.top_k > 0 or sampler.top_p < 1 or sampler.min_p:
            argv.append("--return-sampling-mask")
        return argv


def transfer_backend(sync: Any) -> str:
    """The name under which the server knows a weight transfer: the option's own, which is its class in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(sync).__name__).lower()


def _lora_arguments(config: Any) -> list[str]:
    rank = next(r for r in LORA_RANKS if r >= config.model.lora.r)
    slots = config.rollout.max_staleness + 2
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(slots)]
