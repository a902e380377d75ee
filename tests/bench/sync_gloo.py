"""Weights of 256 MB over gloo on loopback: a sync to the embedded server in a process of its own, next to a plain broadcast.

Both are timed in turns in one run. The sync is complete: pause, transfer into the running model, finish, resume.
Memory is the highest resident size of the sending process during a sync whose tensors are gathered one by one, over what
it was before, in buckets of `sync.bucket_mb`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import timedelta
from pathlib import Path

from tests.memory import status_bytes

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, BUCKET_MB = 7, 64
LIMIT = 2.5


def run() -> list[dict]:
    import torch

    torch.set_num_threads(1)  # as the trainer of a two-core machine runs beside its server
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = _model()
        model.save_pretrained(folder)
        tensors = dict(model.named_parameters())
        num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        url = stack.enter_context(_server(folder))
        sender = _sender(url, folder, 1024)
        plain = stack.enter_context(_plain(num_bytes))
        ours, theirs = [], []
        for version in range(1, ROUNDS + 2):
            theirs.append(plain())
            ours.append(sender.send(tensors.items(), version, lambda: None).total_s)
        ours, theirs = ours[1:], theirs[1:]  # the first ones connect and touch memory for the first time
        sender.close()
        extra = _extra_memory(_sender(url, folder, BUCKET_MB), tensors)
    ratio = statistics.median(ours) / statistics.median(theirs)
    size = f"{num_bytes / 1e6:.0f} MB"
    return [
        {"bar": f"sync_gloo_over_plain ({size})", "value": round(ratio, 2), "unit": "x", "limit": LIMIT, "ok": ratio <= LIMIT},
        {"bar": "sync_gloo_time", "value": round(statistics.median(ours), 3), "unit": "s", "limit": None, "ok": True},
        {"bar": "sync_gloo_plain_time", "value": round(statistics.median(theirs), 3), "unit": "s", "limit": None, "ok": True},
        {"bar": "sync_gloo_extra_memory", "value": round(extra, 2), "unit": "buckets", "limit": 1.0, "ok": extra <= 1.0},
    ]  # fmt: skip


def _model():
    """64 million parameters in float32, in tensors from 2 kB to 17 MB."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=2240, num_hidden_layers=13, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _sender(url: str, folder: str, bucket_mb: int):
    import torch

    from agrpo.sync.control import ServerControl
    from agrpo.sync.gloo import Gloo

    return Gloo(bucket_mb=bucket_mb).open(ServerControl([url], 120.0), Path(folder), torch.device("cpu"), 0, 1)


def _extra_memory(sender, tensors: dict) -> float:
    """Highest resident size during a sync above the one before, in buckets; every tensor is gathered into new memory."""
    sender.send([(n, t) for n, t in list(tensors.items())[:3]], 1, lambda: None)  # connections and threads exist
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest size starts anew
    sender.send(((n, t.detach().clone()) for n, t in tensors.items()), 2, lambda: None)
    extra = status_bytes("VmHWM") - before
    sender.close()
    return extra / (BUCKET_MB * 1024 * 1024)


@contextlib.contextmanager
def _child(*arguments: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.sync_gloo", *arguments], env=environment, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def _server(folder: str):
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with _child("serve", folder, str(port)) as process:
        deadline = time.monotonic() + 240
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {process.poll()}")
            time.sleep(0.2)
        yield url


@contextlib.contextmanager
def _plain(num_bytes: int):
    """Seconds of one broadcast of as many bytes to another process, from and into memory that is there already."""
    import torch

    port = _free_port()
    with _child("plain", str(num_bytes), str(port)):
        group, flat = _group(0, port), torch.zeros(num_bytes, dtype=torch.uint8)

        def broadcast() -> float:
            group.barrier().wait()
            began = time.perf_counter()
            group.broadcast(flat, 0).wait()
            group.barrier().wait()
            return time.perf_counter() - began

        yield broadcast


def _group(rank: int, port: int):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=240))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=240)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _main(role: str, *arguments: str) -> None:
    import torch

    torch.set_num_threads(1)
    if role == "serve":
        from agrpo.serve.embedded import Embedded, serve
        from agrpo.sync.gloo import Gloo

        serve(arguments[0], port=int(arguments[1]), settings=Embedded(kv_cache_tokens=4096), receiver=Gloo.receiver)
        return
    group, flat = _group(1, int(arguments[1])), torch.zeros(int(arguments[0]), dtype=torch.uint8)
    while True:
        group.barrier().wait()
        group.broadcast(flat, 0).wait()
        group.barrier().wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
