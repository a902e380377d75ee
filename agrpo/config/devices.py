"""Which accelerators this machine has, found without loading torch: `--help` and `--dry-run` stay fast."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    visible_id: str  # what goes into CUDA_VISIBLE_DEVICES: a number or a UUID
    name: str
    memory_mib: int
    compute_capability: float  # 0 where unknown


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs visible to this process. Indices in `run.devices` count in this order, from 0."""

    gpus: tuple[Gpu, ...] = ()
    assumed: bool = False  # true = a stand-in machine, for planning where no GPU is present

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus)

    @property
    def kind(self) -> str:
        return "gpu" if self.gpus else "cpu"

    def split(self, run: Any, server_wants_gpu: bool) -> dict[str, list[int]]:
        """Indices for trainer and server, disjoint: `run.devices`, else the first half to a server that wants GPUs.

        Four GPUs give {"server": [0, 1], "trainer": [2, 3]}, or all four to the trainer where the server is elsewhere.
        """
        if run.devices is not None:
            return {"trainer": list(run.devices.get("trainer", [])), "server": list(run.devices.get("server", []))}
        everything = list(range(len(self.gpus)))
        num_trainer = len(everything)
        if server_wants_gpu and len(everything) > 1:
            num_trainer -= len(everything) // 2
        if run.num_processes is not None:
            num_trainer = min(run.num_processes, len(everything))
        first = len(everything) - num_trainer
        return {"trainer": everything[first:], "server": everything[:first] if server_wants_gpu else []}

    def visible_ids(self, indices: list[int]) -> str:
        """The value of CUDA_VISIBLE_DEVICES that leaves these devices."""
        return ",".join(self.gpus[i].visible_id for i in indices)


MOST_ASSUMED = 1024  # a mistyped index is refused, not planned for


def assumed(tree: Mapping[str, Any]) -> Devices:
    """What a plan made on a machine without GPU assumes: GPUs of 80 GiB, as many as the unchecked configuration names.

    `run.devices` with index 3 gives 4. Without it they are the trainer's ranks and one copy of the server, 2 at least.
    """
    run, server = (tree.get(name) if isinstance(tree.get(name), Mapping) else {} for name in ("run", "server"))
    per_copy = max(1, _count(server.get("tensor_parallel_size")))
    wanted = (_count(run.get("num_processes")) or per_copy) + per_copy
    if isinstance(run.get("devices"), Mapping):
        lists = [ids for ids in run["devices"].values() if isinstance(ids, list)]
        wanted = max((_count(index) + 1 for ids in lists for index in ids), default=1)
    count = min(max(wanted, 2), MOST_ASSUMED)
    return Devices(tuple(Gpu(str(i), "assumed GPU", 81920, 9.0) for i in range(count)), assumed=True)


def _count(value: Any) -> int:
    """The value where it is a number of things; 0 where it is faulty, which the checks say."""
    return value if type(value) is int and value > 0 else 0


def detect(environment: Mapping[str, str] | None = None) -> Devices:
    """The GPUs of this machine that the environment leaves visible; none where there is no driver."""
    environment = os.environ if environment is None else environment
    gpus = _nvidia() or _amd()
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            gpus = _visible(gpus, environment[name])
    return Devices(tuple(gpu for _, gpu in gpus))


def _nvidia() -> list[tuple[str, Gpu]]:
    """(UUID, GPU) of each NVIDIA GPU, in the driver's order."""
    command = shutil.which("nvidia-smi")
    if command is None or not Path("/proc/driver/nvidia").exists():
        return []
    query = [command, "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in text.splitlines():
        index, uuid, name, memory, capability = (part.strip() for part in line.split(","))
        gpus.append((uuid, Gpu(index, name, int(_number(memory)), _number(capability))))
    return gpus


def _amd() -> list[tuple[str, Gpu]]:
    """(number, GPU) of each AMD GPU that the kernel driver lists; a node without SIMD units is a CPU."""
    gpus: list[tuple[str, Gpu]] = []
    for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda p: int(p.name)):
        try:
            properties = dict(line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines())
            if int(properties.get("simd_count", "0")) == 0:
                continue
            banks = [(b / "properties").read_text() for b in (node / "mem_banks").glob("*")]
            memory = sum(
                int(line.split()[1]) for text in banks for line in text.splitlines() if "size_in_bytes" in line
            )
        except (OSError, ValueError):
            continue
        gpus.append((str(len(gpus)), Gpu(str(len(gpus)), "AMD GPU", memory >> 20, 0.0)))
    return gpus


def _visible(gpus: list[tuple[str, Gpu]], listed: str) -> list[tuple[str, Gpu]]:
    """The GPUs a *_VISIBLE_DEVICES value leaves; as in the driver, the first unknown entry ends the list."""
    kept = []
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        match = [g for g in gpus if entry in (g[1].visible_id, g[0]) or (len(entry) > 4 and g[0].startswith(entry))]
        if not match:
            break
        kept.append(match[0])
    return kept


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
