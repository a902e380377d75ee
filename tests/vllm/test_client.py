"""The client against real servers, ours and vLLM: what a Turn holds, what is refused, what is cancelled, and what a poll says."""

import asyncio
import json
import urllib.request

import numpy as np
import pytest
import torch

from agrpo.errors import RolloutFailure
from agrpo.metrics.window import Window
from agrpo.sampler.client import TEXT_PATH
from agrpo.sampler.vllm import Vllm
from tests.vllm.conftest import ADAPTERS, BOTH

PROMPT = np.array([5, 9, 4, 11, 7], np.int32)


@pytest.fixture(scope="module", params=BOTH)
def server(request, tiny_model):
    if request.param == "embedded":
        return request.getfixturevalue("embedded_server")(tiny_model)
    return request.getfixturevalue("vllm_server")(None, *ADAPTERS)  # the start takes longer than the tests of both files


@pytest.fixture(scope="module")
def model(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def run(server, work, version=lambda: 3, **settings):
    """`await work(client)` with a client of the running server."""

    async def main():
        options = {"max_completion_length": 17, "num_sampler_logprobs": 3, "temperature": 1.3, "max_retries": 0}
        sampler = Vllm(**{**options, **settings})
        client = await sampler.connect((server.url,), None, 42, version, 60.0, 8, True, Window(strict=True))
        async with client, asyncio.timeout(120):
            return await work(client)

    return asyncio.run(main())


def sample(server, num_turns=3, **settings):
    async def work(client):
        return await asyncio.gather(*(client.generate(PROMPT, (0, slot, 0)) for slot in range(num_turns)))

    return run(server, work, **settings)


def over_text(client):
    """Where the token endpoint is off, the client speaks to the other one."""
    client._servers.all[0].speaks_tokens = False
    return client


def label(server, version):
    data = json.dumps({"new_version": version}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/update_weight_version", data, headers)
    urllib.request.urlopen(request, timeout=30).close()


def check(turns, model, temperature=1.3):
    """Log-probs and heads of each turn equal a plain forward of the served model."""
    for turn in turns:
        ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.output_ids]))[None].long()
        with torch.no_grad():
            logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].float() / temperature
        logprobs = torch.log_softmax(logits, -1)
        chosen = logprobs[range(len(turn.output_ids)), turn.output_ids.tolist()]
        np.testing.assert_allclose(turn.sampler_logprobs, chosen, atol=2e-4)
        assert turn.head_ids.shape == (len(turn.output_ids), 3)
        np.testing.assert_allclose(turn.head_logprobs, logprobs.topk(3).values, atol=2e-4)
        listed = logprobs.gather(1, torch.tensor(turn.head_ids).long())
        np.testing.assert_allclose(turn.head_logprobs, listed, atol=2e-4)


def test_turns_of_both_endpoints_hold_the_log_probs_of_a_plain_forward(server, model):
    turns = sample(server)
    check(turns, model)

    async def work(client):
        return [await over_text(client).generate(PROMPT, (0, slot, 0)) for slot in range(3)]

    texts = run(server, work)
    check(texts, model)
    # The seed decides the tokens, whichever endpoint is asked, and another slot has another seed.
    assert [t.output_ids.tolist() for t in texts] == [t.output_ids.tolist() for t in turns]
    assert [t.output_ids.tolist() for t in sample(server)] == [t.output_ids.tolist() for t in turns]
    assert len({tuple(t.output_ids.tolist()) for t in turns}) == 3


def test_versions_are_the_servers_own_once_it_names_them(server):
    try:
        turn = sample(server, 1)[0]
        assert turn.versions.tolist() == [3] * len(turn.output_ids) and not turn.is_labelled  # it says "default"
        with pytest.raises(RolloutFailure, match="labelled 'default'"):
            run(server, lambda client: _synced(client).generate(PROMPT, (0, 0, 0)))
        label(server, "8")
        turn = sample(server, 1)[0]
        assert turn.versions.tolist() == [8] * len(turn.output_ids) and turn.is_labelled
    finally:
        label(server, "default")


def _synced(client):
    client.is_synced, client._timeout_s = True, 2.0
    return client


def test_what_fits_is_asked_for_and_what_does_not_is_a_prompt_too_long(server):
    long = np.full(508, 7, np.int32)

    async def fits(client):
        assert client.max_model_len == 512
        return await client.generate(long, (0, 0, 0), max_tokens=400)

    assert len(run(server, fits).output_ids) <= 4

    for path_of in (lambda client: client, over_text):

        async def too_long(client, path_of=path_of):
            client.max_model_len = 4096  # what a server that was started again with less would look like
            await path_of(client).generate(np.full(600, 7, np.int32), (0, 0, 0))

        with pytest.raises(RolloutFailure) as failure:
            run(server, too_long)
        assert failure.value.reason == "prompt_too_long" and "512" in failure.value.text
        with pytest.raises(RolloutFailure) as failure:
            run(server, too_long, clamp_max_tokens=False)
        assert failure.value.reason == "rejected"


def test_a_model_that_is_not_served_is_rejected_in_the_servers_words(server):
    async def work(client):
        client.model_name = "nobody"
        await client.generate(PROMPT, (0, 0, 0))

    with pytest.raises(RolloutFailure, match="nobody") as failure:
        run(server, work)
    assert failure.value.reason == "rejected"


@pytest.mark.parametrize("endpoint", ["tokens", TEXT_PATH])
def test_a_request_that_is_given_up_is_dropped_by_the_server(server, endpoint):
    async def work(client):
        if endpoint == TEXT_PATH:
            over_text(client)
        asks = [
            asyncio.create_task(client.generate(PROMPT, (0, slot, 0), max_tokens=500, temperature=1.0))
            for slot in range(3)
        ]
        while (await client.poll_load()).num_running == 0:
            assert not any(ask.done() for ask in asks), "the answers came before the poll"
            await asyncio.sleep(0.02)
        for ask in asks:
            ask.cancel()
        while (load := await client.poll_load()).num_running + load.num_waiting:
            await asyncio.sleep(0.05)

    run(server, work)


def test_the_load_is_read(server):
    async def work(client):
        load = await client.poll_load()
        assert client._servers.all[0].num_engines == 1 and client._servers.all[0].speaks_tokens
        assert (await client.server_info())["vllm_config"]
        return load

    load = run(server, work)
    assert load.kv_cache_tokens >= 512 and 0 <= load.kv_cache_usage <= 1
    assert load.num_preemptions[server.url] >= 0 and not load.paused
