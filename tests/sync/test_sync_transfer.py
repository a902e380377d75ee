"""Every mechanism against a real server on loopback: what arrives, in which order, and what a failure leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl
from agrpo.sync.disk import Disk
from agrpo.sync.gloo import Gloo

ROOT = Path(__file__).parents[2]
MECHANISMS = {"gloo": Gloo, "disk": Disk}
TRANSFER = {
    "gloo": [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ],
    "disk": ["/pause", "/collective_rpc", "/update_weight_version", "/resume"],
}


def no_barrier() -> None:
    pass


def make_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Odd sizes, a scalar, an empty tensor, integers, and one that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(31, 7, generator=generator).to(dtype),
        "layer.weight": torch.randn(13, 11, generator=generator).to(dtype).t(),
        "scale": torch.randn((), generator=generator).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "index": torch.arange(5, dtype=torch.int64),
        "bias": torch.randn(3, generator=generator).to(dtype),
    }


@pytest.fixture(params=list(MECHANISMS))
def mechanism(request):
    return request.param


def open_sender(mechanism, server, tmp_path, timeout_s=20.0, **settings):
    component = MECHANISMS[mechanism](**settings)
    urls = [s.url for s in server] if isinstance(server, list) else [server.url]
    return component.open(ServerControl(urls, timeout_s), tmp_path, torch.device("cpu"), rank=0, world_size=1)


def assert_arrived(server, tensors):
    assert list(server.tensors) == list(tensors) or sorted(server.tensors) == sorted(tensors)
    for name, tensor in tensors.items():
        assert server.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(server.tensors[name], tensor), name


def test_weights_arrive_bit_for_bit(mechanism, make_server, tmp_path):
    server, tensors = make_server(Gloo.receiver), make_tensors()
    sender = open_sender(mechanism, server, tmp_path)
    times = sender.send(iter(tensors.items()), 7, no_barrier)
    assert_arrived(server, tensors)
    assert server.version == "7" and not server.is_paused
    assert [call for call in server.calls if call in TRANSFER[mechanism]] == TRANSFER[mechanism]
    assert 0 < times.pause_s + times.barrier_s + times.transfer_s <= times.total_s


def test_weights_go_out_in_the_dtype_of_the_server(mechanism, make_server, tmp_path):
    server, tensors = make_server(Gloo.receiver, "bfloat16"), make_tensors()
    open_sender(mechanism, server, tmp_path).send(iter(tensors.items()), 1, no_barrier)
    expected = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in tensors.items()}
    assert_arrived(server, expected)
    for manifest in server.manifests:
        assert set(manifest["dtype_names"]) <= {"bfloat16", "int64"}


def test_manifest_names_exactly_what_is_sent_in_buckets(make_server, tmp_path):
    server = make_server(Gloo.receiver)
    kib = torch.arange(256, dtype=torch.float32)
    tensors = {f"w{i}": kib * i for i in range(2051)} | {"large": torch.randn(3 * 256 * 1024 + 5)}
    sender = open_sender("gloo", server, tmp_path, bucket_mb=1)
    sender.send(iter(tensors.items()), 1, no_barrier)
    assert_arrived(server, tensors)
    # 512 tensors of 1 KiB fill half a bucket to the byte; what exceeds that goes alone, cut into pieces.
    assert [len(m["names"]) for m in server.manifests] == [512, 512, 512, 512, 3, 1]
    assert [n for m in server.manifests for n in m["names"]] == list(tensors)
    assert server.manifests[-1]["shapes"] == [[3 * 256 * 1024 + 5]]


def test_hundred_syncs_each_carry_their_own_values(mechanism, make_server, tmp_path):
    server = make_server(Gloo.receiver)
    sender = open_sender(mechanism, server, tmp_path, verify_every=20)
    proofs = []
    for version in range(1, 101):
        tensors = make_tensors(seed=version)
        sender.send(iter(tensors.items()), version, no_barrier)
        proofs += [version] if sender.needs_proof else []
        assert torch.equal(server.tensors["embed.weight"], tensors["embed.weight"]) and server.version == str(version)
    assert proofs == [1, 20, 40, 60, 80, 100]
    assert server.calls.count("/init_weight_transfer_engine") == (1 if mechanism == "gloo" else 0)
    if mechanism == "disk":
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v100"]


def test_several_servers_receive_the_same(mechanism, make_server, tmp_path):
    servers, tensors = [make_server(Gloo.receiver) for _ in range(3)], make_tensors()
    sender = open_sender(mechanism, servers, tmp_path)
    for version in (1, 2):
        sender.send(iter(tensors.items()), version, no_barrier)
    for server in servers:
        assert_arrived(server, tensors)
        assert server.version == "2" and not server.is_paused


def test_tied_tensors_arrive_under_both_names(mechanism, make_server, tmp_path):
    server, shared = make_server(Gloo.receiver), torch.randn(5, 3)
    tensors = {"embed": shared, "head": shared}
    open_sender(mechanism, server, tmp_path).send(iter(tensors.items()), 1, no_barrier)
    assert_arrived(server, tensors)


def test_cache_setting_decides_whether_the_pause_clears_it(mechanism, make_server, tmp_path):
    for cache, cleared in (("reset", "true"), ("salt", "false"), ("keep", "false")):
        server = make_server(Gloo.receiver)
        sender = open_sender(mechanism, server, tmp_path, cache=cache)
        sender.send(iter(make_tensors().items()), 1, no_barrier)
        assert server.clear_cache == "true"  # whatever it computed before it had weights of this run
        sender.send(iter(make_tensors().items()), 2, no_barrier)
        assert server.clear_cache == cleared


UNTOUCHED, PARTIAL, COMPLETE = "no weight was changed", "partial weights and stays paused", "all weights arrived, but"
AFTER = {
    "gloo": {
        "/is_paused": UNTOUCHED,
        "/server_info": UNTOUCHED,
        "/get_world_size": UNTOUCHED,
        "/init_weight_transfer_engine": UNTOUCHED,
        "/pause": UNTOUCHED,
        "/start_weight_update": UNTOUCHED,
        "/update_weights": UNTOUCHED,
        "/finish_weight_update": PARTIAL,
        "/resume": COMPLETE,
    },
    "disk": {
        "/is_paused": UNTOUCHED,
        "/pause": UNTOUCHED,
        "/server_info": UNTOUCHED,
        "/collective_rpc": PARTIAL,
        "/update_weight_version": PARTIAL,
        "/resume": COMPLETE,
    },
}


@pytest.mark.parametrize(("mechanism_name", "step"), [(name, step) for name in AFTER for step in AFTER[name]])
def test_a_failure_at_any_call_leaves_the_server_running_or_paused_and_said(
    mechanism_name, step, make_server, tmp_path
):
    """Untouched it runs on with what it had; else it stays paused until a new sender has sent everything."""
    server, tensors = make_server(Gloo.receiver), make_tensors()
    server.fail_at = step
    state = AFTER[mechanism_name][step]
    began = time.monotonic()
    with pytest.raises(ServerError, match=f"version 3 failed at .*{step}.* answered 500: told to fail; .*{state}"):
        open_sender(mechanism_name, server, tmp_path).send(iter(tensors.items()), 3, no_barrier)
    assert time.monotonic() - began < 5
    assert server.is_paused == (state != UNTOUCHED)
    assert (server.tensors == {}) == (state == UNTOUCHED or step == "/collective_rpc")
    if state == UNTOUCHED:
        assert "/finish_weight_update" not in server.calls and server.version is None
    if state == PARTIAL:
        assert "/resume" not in server.calls
    server.fail_at = None
    open_sender(mechanism_name, server, tmp_path).send(iter(tensors.items()), 4, no_barrier)
    assert_arrived(server, tensors)
    assert not server.is_paused and server.version == "4"


def test_second_bucket_that_fails_leaves_the_server_paused(make_server, tmp_path):
    server = make_server(Gloo.receiver)
    sender = open_sender("gloo", server, tmp_path, bucket_mb=1)

    def tensors():
        yield "first", torch.zeros(256 * 1024)
        yield "second", torch.zeros(256 * 1024)
        server.fail_at = "/update_weights"
        yield "third", torch.zeros(3)

    with pytest.raises(ServerError, match="partial weights"):
        sender.send(tensors(), 3, no_barrier)
    assert server.is_paused and "/finish_weight_update" not in server.calls and "/resume" not in server.calls


def test_new_sync_repairs_a_server_that_was_left_paused(mechanism, make_server, tmp_path):
    server, tensors = make_server(Gloo.receiver), make_tensors()
    server.is_paused = True
    server.fail_at = {"gloo": "/start_weight_update", "disk": "/collective_rpc"}[mechanism]
    with pytest.raises(ServerError):
        open_sender(mechanism, server, tmp_path).send(iter(tensors.items()), 1, no_barrier)
    assert server.is_paused  # found paused: only a complete sync may wake it
    server.fail_at = None
    open_sender(mechanism, server, tmp_path).send(iter(tensors.items()), 2, no_barrier)
    assert not server.is_paused
    assert_arrived(server, tensors)


def test_gathering_that_fails_resumes_the_server_and_keeps_its_error(mechanism, make_server, tmp_path):
    server = make_server(Gloo.receiver)

    def tensors():
        yield "first", torch.zeros(3)
        raise MemoryError("no room to gather")

    with pytest.raises(MemoryError, match="no room"):
        open_sender(mechanism, server, tmp_path).send(tensors(), 1, no_barrier)
    assert not server.is_paused


def test_server_that_is_away_is_an_error_with_its_address(mechanism, tmp_path):
    class Away:
        url = "http://127.0.0.1:9"

    with pytest.raises(ServerError, match="failed at pause: GET http://127.0.0.1:9/is_paused.*refused"):
        open_sender(mechanism, Away, tmp_path).send(iter(make_tensors().items()), 1, no_barrier)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_receiver_lost_in_the_middle_is_an_error_within_the_limit(sign, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("weight_server.py")), str(port), Gloo.receiver]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})

    class Remote:
        url = f"http://127.0.0.1:{port}"

    try:
        assert process.stdout.readline() == b"ready\n"
        sender = open_sender("gloo", Remote, tmp_path, timeout_s=3.0, bucket_mb=1)

        def tensors():
            for i in range(6):
                if i == 3:
                    os.kill(process.pid, sign)
                yield f"w{i}", torch.zeros(256 * 1024)

        began = time.monotonic()
        with pytest.raises(ServerError, match="failed at transfer: .*partial weights"):
            sender.send(tensors(), 1, no_barrier)
        assert time.monotonic() - began < 8
    finally:
        process.kill()
        process.wait()
