"""A rollout keeps the adapter it began with, through all its turns, until its version is unloaded."""

import asyncio

import numpy as np
import pytest
import torch

from agrpo.errors import RolloutFailure
from agrpo.metrics.window import Window
from agrpo.model.adapter import adapter_config, write_adapter
from agrpo.model.load import load_model
from agrpo.model.shard import shard
from agrpo.model.weights import adapter_tensors
from agrpo.rollout.adapters import Adapters
from agrpo.rollout.loop import Policy
from agrpo.sampler.vllm import Vllm
from agrpo.sections import Lora, Model
from agrpo.serve.embedded import EmbeddedServer
from agrpo.sync.adapter import AdapterNames, AdapterSession
from agrpo.sync.control import ServerControl
from tests.standins import tiny_qwen3

STALENESS = 1
PROMPT = np.array([5, 7, 11], np.int32)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, and `sync(version)` that registers an adapter of that version's own weights there."""
    folder = tmp_path_factory.mktemp("pinned")
    path = tiny_qwen3(folder / "base")
    model = load_model(Model(path=str(path), precision="no", lora=Lora(enabled=True, r=2)), "cpu")
    shard(model, Model(path="", precision="no"), None)
    description = adapter_config(model)
    with EmbeddedServer(path, max_loras=STALENESS + 2) as server:
        session = AdapterSession(
            ServerControl([server.url], 30.0), AdapterNames.of(folder, "run"), folder,
            lambda to, tensors: write_adapter(to, description, tensors),
            rank=0, world_size=1, max_staleness=STALENESS, verify_every=0,
        )  # fmt: skip

        def sync(version: int) -> None:
            with torch.no_grad():
                for parameter in (p for p in model.parameters() if p.requires_grad):
                    parameter.fill_(0.02 * version)
            session.send(adapter_tensors(model), version, lambda: None)

        yield server, session, sync
        session.close()


def test_turns_are_pinned_to_the_version_of_their_rollouts_start(served):
    server, session, sync = served
    policy = Policy(1)

    async def play():
        client = await Vllm(max_completion_length=5).connect(
            (server.url,), None, 42, lambda: policy.version, 30.0, 8, False, Window(), is_synced=False
        )
        async with client:
            adapters = Adapters(session.names.prefix, lambda: policy.version, STALENESS, 10.0)
            sync(1)
            old, turns = adapters.pinned(client.generate), []
            turns.append(await old(PROMPT, (0, 0, 0)))
            sync(2)
            policy.version = 2
            new = adapters.pinned(client.generate)
            turns += [await old(PROMPT, (0, 0, 0)), await new(PROMPT, (0, 0, 0))]
            # Version 1 is unloaded now; the message that says so arrives while the request is tried again.
            sync(3)
            asyncio.get_running_loop().call_later(0.3, setattr, policy, "version", 3)
            with pytest.raises(RolloutFailure, match="adapter of version 1 is unloaded") as late:
                await old(PROMPT, (0, 0, 1))
            with pytest.raises(RolloutFailure) as later:
                await old(PROMPT, (0, 0, 1))
            turns.append(await new(PROMPT, (0, 0, 1), max_tokens=2))
            return turns, {late.value.reason, later.value.reason}

    turns, reasons = asyncio.run(play())
    assert reasons == {"stale"}
    assert [sorted(set(t.versions.tolist())) for t in turns] == [[1], [1], [2], [2]]
    assert np.array_equal(turns[0].sampler_logprobs, turns[1].sampler_logprobs)
    assert not np.allclose(turns[0].sampler_logprobs[:1], turns[2].sampler_logprobs[:1]) and len(turns[3].output_ids) == 2
