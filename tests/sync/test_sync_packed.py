"""vLLM's NCCL protocol, with gloo in the library's place: what goes over the wire, and what a failure leaves behind."""

from __future__ import annotations

import base64

import pytest
import torch
from gloo_communicator import GlooCommunicator, PackedGlooReceiver, new_unique_id
from test_sync_transfer import assert_arrived, make_tensors, no_barrier

from agrpo.errors import ServerError
from agrpo.sync.bucket import Packer
from agrpo.sync.control import ServerControl
from agrpo.sync.nccl_wire import PackedTransport
from agrpo.sync.session import MIB, Session

RECEIVER = f"gloo_communicator.{PackedGlooReceiver.__name__}"


def open_packed(servers, bucket_mb=1, timeout_s=20.0) -> Session:
    control = ServerControl([server.url for server in servers], timeout_s)
    packer = Packer(bucket_mb * MIB, "cpu", is_dense=True)
    transport = PackedTransport(control, packer, bucket_mb * MIB, new_unique_id, GlooCommunicator)
    return Session(control, transport, world_size=1, cache="reset", verify_every=20)


def test_weights_arrive_bit_for_bit_at_several_servers(make_server):
    servers, tensors = [make_server(RECEIVER) for _ in range(2)], make_tensors()
    sender = open_packed(servers)
    for version in (1, 2):
        sender.send(iter(tensors.items()), version, no_barrier)
    for server in servers:
        assert_arrived(server, tensors)
        assert server.version == "2" and not server.is_paused
    assert [s.init_infos[0]["rank_offset"] for s in servers] == [1, 2]
    info = servers[0].init_infos[0]
    assert len(base64.b64decode(info.pop("nccl_unique_id_b64"))) == 128
    assert info == {
        "rank_offset": 1,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": MIB,
        "packed_num_buffers": 1,
    }


def test_tensors_follow_each_other_without_gaps_and_each_can_be_read_in_place():
    """bfloat16 of odd length before float32: the next one would begin at an odd multiple of 2, so it begins a bucket."""
    packer = Packer(2 * MIB, "cpu", is_dense=True)
    tensors = {
        "a": torch.randn(3, dtype=torch.bfloat16),
        "b": torch.randn(5),
        "c": torch.randn(7),
        "d": torch.arange(3, dtype=torch.int64),
        "large": torch.randn(MIB),
    }
    packer.start(None)
    seen = []
    for name, tensor in tensors.items():
        for bucket in packer.add(name, tensor):
            seen.append((bucket.names, [len(piece) for piece in bucket.pieces]))
    seen += [(bucket.names, [len(piece) for piece in bucket.pieces]) for bucket in packer.flush()]
    assert seen == [(["a"], [6]), (["b", "c", "d"], [5 * 4 + 7 * 4 + 3 * 8]), (["large"], [4 * MIB])]


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"])
def test_from_the_start_on_a_failure_leaves_the_server_paused(step, make_server):
    """vLLM takes its layers apart at the start, so a server that goes on after it would answer with no weights at all."""
    server = make_server(RECEIVER)
    server.fail_at = step
    with pytest.raises(ServerError, match=f"{step} answered 500: told to fail; .*stays paused"):
        open_packed([server], timeout_s=6.0).send(iter(make_tensors().items()), 3, no_barrier)
    assert server.is_paused


def test_a_server_found_paused_closes_what_was_left_open_before_it_gets_everything(make_server):
    server, tensors = make_server(RECEIVER), make_tensors()
    server.is_paused = True
    open_packed([server]).send(iter(tensors.items()), 2, no_barrier)
    assert_arrived(server, tensors)
    assert not server.is_paused
    assert server.calls.index("/collective_rpc") < server.calls.index("/start_weight_update")
