"""From a configuration to the exact vLLM command and environment: the one place that knows vLLM's flags.

The managed server, `agrpo serve` and the fixes of `agrpo serve-check` all read from here (SRV-4, SAMP-5, LORA-4).
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agrpo.config.model_folder import read_config

# The module is what a CPU build can start, whose `vllm` command is broken; it ignores --api-server-count.
MODULE, MULTI_MODULE = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values --max-lora-rank accepts
API_SERVERS = 8  # on GPUs: one front end halves the speed with 8 log-probs
VLLM_MAX_LOGPROBS = 20  # vLLM's own limit where the flag is not given
KEEP_ALIVE_S = 120  # vLLM's own 5 s end connections that the client is about to use again
GIB = 2**30
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}

Option = tuple[str, ...]  # a flag and its values
# The CPU build's engine dies where a prompt with a seed is computed in more than one piece (0.32: set_offset of a CPU
# generator), which is what more prompt tokens at once than --max-num-batched-tokens lead to, after a pause for example.
# Without a worker process of its own the engine answers a third more short requests per second on two cores.
CPU_OPTIONS: list[Option] = [
    ("--enforce-eager",), ("--no-enable-chunked-prefill",), ("--distributed-executor-backend", "uni"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One server to start: what to run, the variables it needs, and where it will answer."""

    program: list[str]
    options: list[Option]
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def argv(self) -> list[str]:
        return [*self.program, *(word for option in self.options for word in option)]

    def line(self) -> str:
        """The command as one line for a shell."""
        return " ".join([*self._typed().values(), shlex.join(self.argv)])

    def here(self) -> dict[str, str]:
        """The variables of a process of this machine: what its user set in PYTHONPATH stays, behind our entry."""
        if "PYTHONPATH" not in self.environment:
            return self.environment
        paths = [self.environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        return self.environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    def words(self, *names: str) -> str:
        """Flags and variables of this command as they are typed: words("--dtype") is "--dtype bfloat16"."""
        options = {option[0]: shlex.join(option) for option in self.options}
        known = self._typed() | options
        return " ".join(known[name] for name in names if name in known)

    def _typed(self) -> dict[str, str]:
        """Name -> NAME=value for a shell. The machine where it is typed has a PYTHONPATH of its own, which stays."""
        kept = {"PYTHONPATH": "${PYTHONPATH:+:$PYTHONPATH}"}
        return {name: f"{name}={shlex.quote(value)}{kept.get(name, '')}" for name, value in self.environment.items() if value}


def server_command(
    server: Any, config: Any, port: int, num_gpus: int, program: str, host: str = "127.0.0.1"
) -> ServerCommand:
    """The command of one server; `server` holds the settings of server=vllm, `program` is the Python that has vllm.

    `num_gpus` = 0 plans a CPU build. A flag in `server.arguments` replaces the planned one of the same name.
    """
    model = server.model_name or config.model.path
    options: list[Option] = [("--host", host), ("--port", str(port))]
    options += _model_options(server, config)
    options += _contract_options(server, config)
    options += _gpu_options(server, num_gpus) if num_gpus else CPU_OPTIONS
    options += [("--api-server-count", str(server.api_server_count or (API_SERVERS if num_gpus else 1)))]
    options = merged(options, server.arguments)
    planned = {option[0]: option for option in options}
    is_multi = int(planned["--api-server-count"][1]) > 1
    start = ["-m", MULTI_MODULE, "serve", model] if is_multi else ["-m", MODULE, "--model", model]
    url = f"http://{host}:{planned['--port'][1]}"
    environment = _environment(config, num_gpus, model) | server.environment_variables
    return ServerCommand([program, *start], options, environment, url)


def _model_options(server: Any, config: Any) -> list[Option]:
    options: list[Option] = [("--dtype", server.served_dtype(config)), ("--seed", str(config.run.seed))]
    options += [("--max-model-len", str(server.context_length(config)))]
    if config.model.tokenizer_path:
        options.append(("--tokenizer", config.model.tokenizer_path))
    if "revision" in config.model.init_kwargs:
        options.append(("--revision", str(config.model.init_kwargs["revision"])))
    return options + ([("--trust-remote-code",)] if config.model.trust_remote_code else [])


def _contract_options(server: Any, config: Any) -> list[Option]:
    """What the client, the loss and the weight sync rely on."""
    options: list[Option] = [("--logprobs-mode", "processed_logprobs"), ("--enable-scale-out",)]
    if config.loss.wants_head:
        # One more than the head holds: the token endpoint lists the sampled token among them.
        options.append(("--max-logprobs", str(max(config.sampler.num_sampler_logprobs + 1, VLLM_MAX_LOGPROBS))))
    if config.sampler.is_truncated:
        options.append(("--return-sampling-mask",))
    if config.sync.backend:
        options.append(("--weight-transfer-config", json.dumps({"backend": config.sync.backend})))
    if sends_adapters(config):
        options += [("--enable-lora",), ("--max-lora-rank", str(lora_rank(config.model.lora.r)))]
        options.append(("--max-loras", str(lora_slots(config))))
    return [*options, ("--disable-uvicorn-access-log",)]


def _gpu_options(server: Any, num_gpus: int) -> list[Option]:
    options: list[Option] = [("--gpu-memory-utilization", f"{server.gpu_memory_utilization:g}")]
    if server.tensor_parallel_size > 1:
        options.append(("--tensor-parallel-size", str(server.tensor_parallel_size)))
    copies = num_gpus // server.tensor_parallel_size
    return options + ([("--data-parallel-size", str(copies))] if copies > 1 else [])


def _environment(config: Any, num_gpus: int, model: str) -> dict[str, str]:
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
    if config.sampler.is_truncated:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if sends_adapters(config):
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not num_gpus:
        # Bound threads would keep the trainer's from the same cores; without a size the cache takes most of the memory.
        own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(_cpu_cache_gib())}
        # Half of the cores are the trainer's. Threads that spin while another process has their core cost most of the time.
        own |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)), "OMP_WAIT_POLICY": "PASSIVE"}
        variables |= {name: os.environ.get(name, value) for name, value in own.items()}
    if all(Path(path).expanduser().is_dir() for path in (model, config.model.tokenizer_path or model)):
        variables["HF_HUB_OFFLINE"] = "1"
    # Always set: the trainer's packages, which a child of the run would find there, must not shadow the server's.
    return variables | {"PYTHONPATH": ""} | config.sync.server_environment()


def _cpu_cache_gib() -> int:
    """A sixteenth of the memory, 1 to 8 GiB: the trainer's model and optimizer live beside it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(8, total // (16 * GIB)))


def merged(options: Sequence[Option], arguments: Sequence[str]) -> list[Option]:
    """`options`, those named in `arguments` replaced; --a_b, --a-b, --a-b=1 and --no-a-b are the same flag."""
    users: list[list[str]] = []
    for word in arguments:
        if word.startswith("--"):
            users.append(list(word.split("=", 1)) if "=" in word else [word])
            users[-1][0] = users[-1][0].replace("_", "-")
        elif users:
            users[-1].append(word)
        else:
            users.append([word])
    named = {_stem(option[0]) for option in users}
    kept = [option for option in options if _stem(option[0]) not in named]
    return kept + [tuple(option) for option in users]


def _stem(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-")


def trainer_dtype(model: Any) -> str:
    """What the trainer computes in: `model.precision`, else the type of its weights; auto where only loading tells."""
    if model.precision in PRECISIONS:
        return PRECISIONS[model.precision]
    dtype = str(model.init_kwargs.get("dtype", model.dtype)).removeprefix("torch.")
    if dtype == "auto":
        found = read_config(model.path) or {}
        dtype = str(found.get("dtype") or found.get("torch_dtype") or "auto")
    return dtype


def sends_adapters(config: Any) -> bool:
    """Whether the server should serve LoRA adapters (LORA-2); merged weights need none of it."""
    lora = config.model.lora
    return lora.enabled and config.sync.mode != "merged" and lora.merged_only is None


def lora_rank(rank: int) -> int:
    """The smallest value of --max-lora-rank that holds adapters of `rank`."""
    return next(r for r in LORA_RANKS if r >= rank)


def lora_slots(config: Any) -> int:
    """Adapters that are registered at once: every version of the window, and the next while it is loaded (LORA-9)."""
    return config.rollout.max_staleness + 2
