"""Adapters into real vLLM: each version answers as the trainer does, older ones go on, and what leaves is unloaded."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from agrpo.errors import ServerError
from agrpo.model.adapter import adapter_config, write_adapter
from agrpo.model.load import load_model
from agrpo.model.shard import shard
from agrpo.model.weights import adapter_tensors
from agrpo.sections import Lora, Model
from agrpo.sync.adapter import FOLDER, AdapterNames, AdapterSession, choose
from agrpo.sync.control import ServerControl
from agrpo.sync.proof import Proof
from agrpo.train.proof import prove
from tests.vllm.conftest import ADAPTERS

pytestmark = pytest.mark.vllm

STALENESS = 1
LORA = Lora(enabled=True, r=3, alpha=6.0)
PROMPT = [7, 11, 13]


@pytest.fixture(scope="module")
def server(vllm_server):
    return vllm_server(None, *ADAPTERS)


@pytest.fixture(scope="module")
def model(tiny_model):
    section = Model(path=tiny_model, precision="no", lora=LORA)
    model = load_model(section, "cpu")
    shard(model, section, None)
    return model


def change(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def opened(model, server, run_dir, run_id="first") -> AdapterSession:
    write = functools.partial(lambda config, folder, tensors: write_adapter(folder, config, tensors), adapter_config(model))
    return AdapterSession(
        ServerControl([server.url], 120.0), AdapterNames.of(run_dir, run_id), run_dir, write,
        rank=0, world_size=1, max_staleness=STALENESS, verify_every=1,
    )  # fmt: skip


def adapters_at(server) -> list[str]:
    entries = ServerControl([server.url], 60.0).request(server.url, "GET", "/v1/models")["data"]
    return sorted(e["id"] for e in entries if e.get("parent"))


def test_five_versions_arrive_and_the_window_moves(server, model, tmp_path):
    session = opened(model, server, tmp_path)
    assert choose(session.server, "lora", LORA, None, STALENESS).sends_adapter
    proof = Proof(session.server, model=server.model, prompt_ids=PROMPT, parity_limit=0.2, trainer_dtype="float32")
    gaps = []
    for version in range(1, 6):
        change(model, version)
        session.send(adapter_tensors(model), version, lambda: None)
        gaps.append(prove(proof, model, version, torch.device("cpu"), session.names.of_version(version)))
        kept = [session.names.of_version(v) for v in range(max(1, version - STALENESS), version + 1)]
        assert adapters_at(server) == sorted(kept)
    assert max(gaps) < 1e-4, gaps
    with pytest.raises(ServerError, match=session.names.of_version(1)):
        session.server.generate(server.url, PROMPT, session.names.of_version(1), {"max_tokens": 3})
    session.close()
    assert adapters_at(server) == [] and not (tmp_path / FOLDER).exists()


def test_a_request_in_flight_keeps_its_version_and_leftovers_go(server, model, tmp_path):
    killed = opened(model, server, tmp_path)
    change(model, 1)
    killed.send(adapter_tensors(model), 1, lambda: None)
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 300, "ignore_eos": True, "logprobs": 0}
    ask = functools.partial(killed.server.generate, server.url, PROMPT, killed.names.of_version(1), params)
    alone, answers = ask(), []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    for version in (2, 3):  # version 1 is unloaded while its request runs
        change(model, version)
        killed.send(adapter_tensors(model), version, lambda: None)
    thread.join(120)
    assert answers[0]["token_ids"] == alone["token_ids"]
    resumed = opened(model, server, tmp_path, "second")
    resumed.send(adapter_tensors(model), 3, lambda: None)
    assert adapters_at(server) == [resumed.names.of_version(3)]
    resumed.close()


def test_limits_are_refused_with_the_number_to_use(server):
    control = ServerControl([server.url], 60.0)
    with pytest.raises(ServerError, match="--max-lora-rank 16"):
        choose(control, "auto", Lora(enabled=True, r=9), None, STALENESS)
    with pytest.raises(ServerError, match="--max-loras 4"):
        choose(control, "auto", LORA, None, STALENESS + 1)
