"""What `agrpo doctor` can say without starting anything: versions, devices, links, limits, memory, disk."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agrpo.config import Config, detect
from agrpo.config.model_shape import Shape, shape_of
from agrpo.launch import plan
from agrpo.launch.preview import GIB, trainer_memory
from agrpo.launch.run_folder import versions

QUESTION_S = 10.0  # for a command that asks a driver
MIN_FREE_DISK = 2 * GIB  # below this a run's logs and metrics alone are in danger
FILES_PER_ROLLOUT = 2  # a connection each, and what tools open


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; `fix` says what to do about a failure or a warning."""

    name: str
    status: str  # ok, warn, fail, skip
    found: str
    fix: str = ""
    seconds: float = 0.0


def machine() -> Iterator[Finding]:
    """What needs no configuration."""
    yield _versions()
    yield from _devices()
    yield _loopback()


def _versions() -> Finding:
    found = {name: version for name, version in versions().items() if version is not None}
    missing = [name for name in ("torch", "transformers", "numpy", "aiohttp", "hydra-core") if name not in found]
    text = ", ".join(f"{name} {version}" for name, version in found.items()) + f", {platform.system()} {platform.machine()}"
    if missing:
        return Finding("versions", "fail", f"{text}; missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("versions", "ok", text)


def _devices() -> Iterator[Finding]:
    gpus = detect().gpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cores} CPU core(s), {total_memory() / GIB:.0f} GiB of memory"
    if not gpus:
        yield Finding("devices", "ok", f"{text}, no GPU: training and server use the CPU")
        return
    yield Finding("devices", "ok", f"{text}; " + ", ".join(f"GPU {i} {g.name} {g.memory_mib // 1024} GiB" for i, g in enumerate(gpus)))
    if len(gpus) > 1:
        yield _links()


def _links() -> Finding:
    """How the GPUs reach each other, from `nvidia-smi topo -m`: NV# is NVLink, SYS the slowest way over the host."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=QUESTION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("links", "skip", f"nvidia-smi topo -m did not answer: {error}")
    kinds: set[str] = set()
    for line in done.stdout.splitlines():
        if re.match(r"(\x1b\[\d*m)*GPU\d+\s", line):
            kinds |= set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", line))
    text = f"between the GPUs: {', '.join(sorted(kinds)) or 'unknown'}"
    if "SYS" in kinds and not any(kind.startswith("NV") for kind in kinds):
        return Finding("links", "warn", text, "sharded training over SYS links is slow; prefer GPUs of one socket")
    return Finding("links", "ok", text)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=QUESTION_S):
                return Finding("network", "ok", "a port of 127.0.0.1 can be listened on and reached")
    except OSError as error:
        return Finding("network", "fail", f"127.0.0.1: {error}", "let local connections through; the processes of a run use them")


def room(config: Config) -> Iterator[Finding]:
    """Whether the run has the files, memory and disk that it needs."""
    yield _open_files(config)
    shape = shape_of(config.model.path)
    if shape is None:
        yield Finding("memory", "skip", f"{config.model.path} is not on this machine, and its name tells no size")
    else:
        yield _memory(config, shape)
    yield _disk(config, shape)


def _open_files(config: Config) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which a run raises its processes' own
    needed = FILES_PER_ROLLOUT * config.rollout.max_concurrent_rollouts + 256
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Finding("open files", "ok", f"{'any number' if hard == resource.RLIM_INFINITY else hard} allowed, about {needed} needed")
    return Finding("open files", "warn", f"{hard} allowed, about {needed} needed", f"as root: ulimit -Hn {needed}, or lower rollout.max_concurrent_rollouts")


def _memory(config: Config, shape: Shape) -> Finding:
    """The trainer at the peak of a step; on a CPU all its ranks and a server of the run's own share the memory."""
    need = trainer_memory(config, shape)
    text = f"{shape.num_parameters / 1e6:,.0f} million parameters: {need.peak / GIB:.2f} GiB per trainer rank at the peak of a step"
    if not need.activations:
        text += " without activations, which need config.json and packer.token_budget"
    devices, wanted = (config.run.devices or {}).get("trainer", []), need.peak
    if devices:
        holds, where = min(config.devices.gpus[i].memory_mib for i in devices) * 2**20, "a GPU holds"
    else:
        wanted = need.peak * config.run.num_processes + (4.0 * shape.num_parameters if plan.is_managed(config) else 0)
        holds, where = free_memory(), "are free here"
        text += f"; {wanted / GIB:.2f} GiB for all ranks" + (" and the server's weights" if plan.is_managed(config) else "")
    text += f"; {holds / GIB:.1f} GiB {where}"
    if wanted > 0.9 * holds:
        # Ranks that share one memory have, beside their parts of the model, all else several times.
        ranks = "more ranks (run.num_processes), " if devices else "fewer ranks (run.num_processes), " if config.run.num_processes > 1 else ""
        fix = f"{ranks}an adapter (model=lora), shorter rows (packer.token_budget), or a smaller model"
        return Finding("memory", "fail", text, fix)
    return Finding("memory", "ok", text)


def _disk(config: Config, shape: Shape | None) -> Finding:
    folder = next(p for p in (Path(config.run.output_dir), *Path(config.run.output_dir).parents) if p.exists())
    free = shutil.disk_usage(folder).free
    kept, of_one, exported = num_checkpoints(config), 0.0, 0.0
    if shape is not None:
        # Weights and two moments in float32; the exported model in the compute precision.
        of_one = 0 if config.model.lora.enabled else shape.num_parameters * (4 if config.checkpoint.save_only_model else 12)
        exported = shape.num_parameters * (4 if config.model.precision == "no" else 2)
    # While the newest is written the oldest is still there.
    needed = of_one * (kept + (config.checkpoint.save_total_limit is not None)) + exported + MIN_FREE_DISK
    text = (
        f"{free / GIB:.1f} GiB free at {folder}, about {needed / GIB:.1f} GiB needed: {kept} checkpoint(s) of "
        f"{of_one / GIB:.2f} GiB, the exported model {exported / GIB:.2f} GiB, {MIN_FREE_DISK / GIB:.0f} GiB for logs"
    )
    if needed > free:
        fix = "set checkpoint.save_total_limit=2, save less often (checkpoint.save_steps), or choose another run.output_dir"
        return Finding("disk", "fail", text, fix)
    return Finding("disk", "ok", text)


def num_checkpoints(config: Config) -> int:
    """How many will lie there at the end; an epoch counts as one where the length is not known in steps."""
    section, steps = config.checkpoint, config.run.max_steps
    if section.strategy == "steps" and steps is not None:
        count = steps // section.save_steps + (section.save_final and steps % section.save_steps != 0)
    elif section.strategy == "no":
        count = int(section.save_final)
    else:
        count = max(1, round(config.run.num_train_epochs))
    return min(count, section.save_total_limit or count)


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that programs can have without swapping, below the limit of a container."""
    found = total_memory()
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found = int(match[1]) * 1024 if match else found
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        found = found if limit == "max" else min(found, int(limit) - used)
    except (OSError, ValueError):
        pass
    return found
