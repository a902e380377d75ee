"""Rows on where the server runs: its GPUs, and whether it sees the run's folder."""

from __future__ import annotations

import csv
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from agrpo.serve.check.ask import LOAD_ADAPTER, post
from agrpo.serve.check.look import Look, Row
from agrpo.serve.flags import sends_adapters

PROXIES = ("docker-proxy", "rootlessport", "slirp4netns")  # they listen here for a server that is elsewhere


def devices(look: Look) -> Row:
    """Trainer and server do not share a GPU (SRV-13)."""
    name, split = "devices", look.config.run.devices or {}
    if not split.get("trainer"):
        return look.ok(name, "the trainer uses no GPU")
    if getattr(look.config.server, "managed", True):
        return look.ok(name, f"server on GPU {split.get('server')}, trainer on GPU {split['trainer']}")
    server = server_process(look.url)
    if server is None:
        return look.skip(
            name, "the server runs on another machine" if not is_here(look.url) else "its process is not visible"
        )
    trainer = look.config.devices.visible_ids(split["trainer"]).split(",")
    shared = shared_gpus(_query("gpu=index,uuid"), _query("compute-apps=pid,gpu_uuid"), trainer, _family(server))
    if shared:
        fix = f"run.devices={{trainer: {split['trainer']}, server: []}} with CUDA_VISIBLE_DEVICES of other GPUs"
        return look.fail(name, f"server and trainer share GPU {', '.join(shared)}", fix)
    return look.ok(name, f"the server uses none of the trainer's GPUs {', '.join(trainer)}")


def shared_gpus(gpus: list[list[str]], programs: list[list[str]], trainer: list[str], pids: Iterable[int]) -> list[str]:
    """Which of the trainer's GPUs (index or UUID) run one of `pids`.

    gpus [["0", "GPU-a"]], programs [["123", "GPU-a"]], trainer ["0"], pids {123} -> ["0"].
    """
    uuids = {index: uuid for index, uuid in gpus}
    used = {uuid for pid, uuid in programs if pid.isdigit() and int(pid) in set(pids)}
    return [name for name in trainer if any(u in used for u in (uuids.get(name, name), name))]


def _query(what: str) -> list[list[str]]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    answer = subprocess.run(
        [command, f"--query-{what}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
    )
    return [[cell.strip() for cell in row] for row in csv.reader(answer.stdout.splitlines()) if len(row) == 2]


def shared_folder(look: Look) -> Row | None:
    """The server reads what the trainer writes, where weights or adapters go through a folder (LORA-13)."""
    config, name = look.config, "shared folder"
    if config.sync.backend and not sends_adapters(config):
        return None
    folder = look.run_dir / f".visible-{uuid.uuid4().hex}"
    fix = "run.output_dir=FOLDER, on a file system that both machines mount at the same path"
    folder.mkdir(parents=True)
    try:
        server = server_process(look.url)
        if server is not None:
            return (
                look.ok(name, str(look.run_dir))
                if _sees(server, folder)
                else look.fail(name, f"{look.run_dir} is not visible to the server", fix)
            )
        if sends_adapters(config) and look.offers(LOAD_ADAPTER):
            return _asked(look, folder, fix)
        return look.warn(
            name, f"cannot be asked: {look.run_dir} must be visible to the server under the same path", fix
        )
    finally:
        shutil.rmtree(folder)


def _sees(server: psutil.Process, folder: Path) -> bool:
    """Whether `folder` exists in the file systems that the process has mounted; its own, if it is in a container."""
    try:
        return Path(f"/proc/{server.pid}/root{folder.absolute()}").is_dir()
    except OSError:
        return folder.is_dir()


def _asked(look: Look, folder: Path, fix: str) -> Row:
    """vLLM reads an adapter's configuration before its weights: with one of an impossible rank, the error tells."""
    text = '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 65536, "lora_alpha": 1, "target_modules": ["q_proj"]}'
    (folder / "adapter_config.json").write_text(text)
    body = {"lora_name": folder.name, "lora_path": str(folder.absolute())}
    answer = post(look.url, {"load": (LOAD_ADAPTER, body)})["load"]
    words = answer.body.decode(errors="replace")
    if answer.status == 404 or "No adapter found" in words:
        return look.fail("shared folder", f"the server finds nothing in {look.run_dir}", fix)
    if "rank" in words:
        return look.ok("shared folder", f"the server reads {look.run_dir}")
    return look.warn(
        "shared folder", f"unclear: {LOAD_ADAPTER} answered {answer.status} {answer.error or words[:200]}", fix
    )


def is_here(url: str) -> bool:
    """Whether the address is one of this machine's."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(urlsplit(url).hostname or "localhost", None)}
    except OSError:
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(address in own or address.startswith("127.") for address in found)


def server_process(url: str) -> psutil.Process | None:
    """The process of this machine that listens at `url`; None if there is none, or if it may not be looked at."""
    if not is_here(url):
        return None
    port = urlsplit(url).port or (443 if urlsplit(url).scheme == "https" else 80)
    try:
        listening = [
            c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        ]
        process = next((psutil.Process(c.pid) for c in listening if c.pid), None)
        return None if process is None or process.name() in PROXIES else process
    except (psutil.Error, OSError):
        return None


def _family(process: psutil.Process) -> set[int]:
    """The server's processes: the listener and its children, and those beside it where several front ends listen."""
    try:
        parent = process.parent()
        if parent is not None and parent.cmdline()[:3] == process.cmdline()[:3]:
            process = parent  # front ends and engines are children of one process with the same command
        return {process.pid, *(child.pid for child in process.children(recursive=True))}
    except psutil.Error:
        return {process.pid}
