"""The client against a real server on loopback that commits one fault after the other."""

import asyncio
import time

import numpy as np
import pytest

from agrpo.errors import RolloutFailure, ServerError
from agrpo.metrics.window import Window
from agrpo.sampler.client import RequestKey, request_seed
from agrpo.sampler.load import load_of
from agrpo.sampler.vllm import Vllm
from tests.stub_server import control, report, stub_server

PROMPT = np.arange(2, 13, dtype=np.int32)
KEY = RequestKey(5, 2, 0)


@pytest.fixture(scope="module")
def url():
    with stub_server(tokens=7, heads=3) as url:
        yield url


@pytest.fixture(scope="module")
def text_url():
    with stub_server(tokens=7, heads=3, token_endpoint=0) as url:
        yield url


@pytest.fixture(scope="module")
def mask_url():
    with stub_server(tokens=7, heads=3, mask=2) as url:
        yield url


def ask(url, faults=(), settings=None, key=KEY, timeout_s=5.0, prompt=PROMPT, **arguments):
    """One request after `faults` were planted; the turn and the metrics window."""
    window = Window(strict=True)
    if faults:
        control(url, faults=list(faults))

    async def run():
        sampler = Vllm(**{"num_sampler_logprobs": 3, "max_retries": 2, **(settings or {})})
        urls = url if isinstance(url, tuple) else (url,)
        client = await sampler.connect(urls, None, 42, lambda: 7, timeout_s, 4, True, window, retry_wait_s=0.01)
        async with client:
            return await client.generate(prompt, key, **arguments)

    return asyncio.run(run()), window


def test_a_request_states_every_sampling_setting(url):
    before = report(url)["num_requests"]
    turn, _ = ask(url, settings={"max_completion_length": 7})
    assert len(turn.output_ids) == 7 and turn.head_ids.shape == (7, 3)
    assert turn.prompt_ids is PROMPT
    body = report(url)["seen"][before]
    assert body["token_ids"] == PROMPT.tolist() and body["model"] == "stub"
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 7,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 4,
        "seed": request_seed(42, KEY, 0),
    }
    assert "cache_salt" not in body


def test_requests_are_salted_with_the_version_where_syncs_keep_the_caches(url, text_url):
    async def run(address):
        client = await Vllm().connect((address,), None, 42, lambda: 7, 5.0, 4, False, Window(), salts_cache=True)
        async with client:
            await client.generate(PROMPT, KEY)

    for address in (url, text_url):
        before = report(address)["num_requests"]
        asyncio.run(run(address))
        assert report(address)["seen"][before]["cache_salt"] == "7"


@pytest.mark.parametrize("fault", ["500", "503", "429", "reset"])
def test_what_may_pass_is_retried_and_counted(url, fault):
    turn, window = ask(url, [fault, fault])
    assert len(turn.output_ids) == 7
    assert window.get("rollout/vllm_retry_count") == 2


def test_a_hung_request_is_retried_after_its_time_limit(url):
    began = time.monotonic()
    turn, window = ask(url, ["hang"], timeout_s=0.3)
    assert len(turn.output_ids) == 7 and window.get("rollout/vllm_retry_count") == 1
    assert 0.3 <= time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("faults", "reason", "text"),
    [
        (["500"] * 3, "unavailable", "stub says 500"),
        (["reset"] * 3, "connection", "3 tries"),
        (["400"], "rejected", "stub says 400"),
        (["404"], "rejected", "stub says 404"),
        (["malformed"] * 3, "malformed", "answer begins"),
        (["logprobs"], "logprobs", "6 log-probs for 7 tokens"),
        (["placeholder"], "logprobs", "-9999"),
        (["abort"], "aborted", "aborted"),
    ],
)
def test_other_faults_make_the_rollout_unusable_with_the_reason(url, faults, reason, text):
    before = report(url)["num_requests"]
    with pytest.raises(RolloutFailure) as failure:
        ask(url, faults)
    assert failure.value.reason == reason and text in failure.value.text
    assert report(url)["num_requests"] - before == len(faults)


def test_the_completion_endpoint_is_used_where_the_token_endpoint_is_missing(text_url):
    before = report(text_url)["num_requests"]
    turn, _ = ask(text_url, settings={"max_completion_length": 7})
    assert len(turn.output_ids) == 7 and turn.head_ids.shape == (7, 3)
    body = report(text_url)["seen"][before]
    assert body["prompt"] == PROMPT.tolist() and body["return_token_ids"] and body["logprobs"] == 3


def test_truncated_sampling_keeps_candidate_sets_and_needs_the_token_endpoint(mask_url, text_url):
    turn, _ = ask(mask_url, settings={"top_k": 5})
    assert len(turn.candidates) == 7
    assert all(token in turn.candidates[i] for i, token in enumerate(turn.output_ids))
    with pytest.raises(ServerError, match="--return-sampling-mask"):
        ask(text_url, settings={"top_k": 5})


@pytest.mark.parametrize("token_endpoint", [0, 1])
def test_a_vllm_before_candidate_sets_samples_without_them_and_is_warned_about(token_endpoint, caplog):
    with stub_server(tokens=7, heads=3, token_endpoint=token_endpoint, vllm_version="0.27.1") as url:
        turn, _ = ask(url, settings={"top_k": 5, "top_p": 0.9})
    assert len(turn.output_ids) == 7 and turn.candidates is None
    (warning,) = (record.message for record in caplog.records)
    assert f"{url} runs vLLM 0.27.1" in warning and "biased" in warning and "pip install -U vllm" in warning


def test_max_tokens_is_what_fits(url):
    before = report(url)["num_requests"]
    ask(url, prompt=np.full(4097, 5, np.int32))
    assert report(url)["seen"][before]["sampling_params"]["max_tokens"] == 2
    with pytest.raises(RolloutFailure) as failure:
        ask(url, prompt=np.full(4099, 5, np.int32))
    assert failure.value.reason == "prompt_too_long"
    ask(url, prompt=np.full(4099, 5, np.int32), settings={"clamp_max_tokens": False})
    assert report(url)["seen"][before + 1]["sampling_params"]["max_tokens"] == 2048
    ask(url, max_tokens=3, temperature=0.0)
    assert report(url)["seen"][before + 2]["sampling_params"]["max_tokens"] == 3
    assert report(url)["seen"][before + 2]["sampling_params"]["temperature"] == 0.0


def test_seeds_are_distinct_and_repeatable():
    keys = [(g, s, t) for g in range(500) for s in range(8) for t in range(5)]
    seeds = {request_seed(42, key, attempt) for key in keys for attempt in range(5)}
    assert len(seeds) == 100_000 and all(0 <= s < 2**63 for s in seeds)
    assert request_seed(42, (1, 2, 3), 0) == request_seed(42, RequestKey(1, 2, 3), 0)
    assert request_seed(42, (1, 2, 3), 0) != request_seed(43, (1, 2, 3), 0)


def test_a_group_stays_with_its_server_and_leaves_it_when_it_fails(url, text_url):
    before = report(url)["num_requests"], report(text_url)["num_requests"]
    for slot in range(3):
        ask((url, text_url), key=(4, slot, 0))
    after = report(url)["num_requests"], report(text_url)["num_requests"]
    assert (after[0] - before[0], after[1] - before[1]) == (3, 0)
    control(url, faults=["500"])
    turn, _ = ask((url, text_url), key=(4, 0, 0))
    assert len(turn.output_ids) == 7 and report(text_url)["num_requests"] == after[1] + 1


def test_a_server_without_the_model_is_refused(url):
    async def run():
        await Vllm().connect((url,), "other", 42, lambda: 1, 5.0, 4, True, Window())

    with pytest.raises(ServerError, match="serves adapter, stub, not server.model_name=other"):
        asyncio.run(run())


def test_truncation_needs_a_bound_on_the_candidate_set():
    assert Vllm(top_p=0.9).problems(None) == [
        "sampler.top_p=0.9 needs sampler.top_k > 0, which bounds the candidate set"
    ]
    assert len(Vllm(top_p=0.9, min_p=0.1).problems(None)) == 2
    assert Vllm(top_p=0.9, min_p=0.1, top_k=50).problems(None) == [] == Vllm().problems(None)


METRICS = """# HELP vllm:kv_cache_usage_perc x
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 2
vllm:num_preemptions_total{engine="0"} 1.1e1
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="1000",num_gpu_blocks="99"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0
"""


def test_load_is_the_maximum_usage_and_sums_over_engines():
    load = load_of({"http://one": METRICS})
    assert (load.kv_cache_usage, load.num_running, load.num_waiting) == (0.5, 7, 2)
    assert load.num_preemptions == {"http://one": 11}
    assert load.kv_cache_tokens == 1000 + 160


def test_a_poll_reads_the_metrics_endpoint_or_says_there_is_none(url):
    async def poll():
        async with await Vllm().connect((url,), None, 42, lambda: 1, 5.0, 4, True, Window()) as client:
            return await client.poll_load()

    assert asyncio.run(poll()) is None
    control(url, metrics=METRICS)
    assert asyncio.run(poll()).kv_cache_tokens == 1160
    control(url, metrics=None)
