"""Every way a server or its network can fail: how each ends, what is counted, and that none hangs."""

import asyncio
import collections
import threading

import numpy as np
import pytest

from agrpo.errors import RolloutFailure
from agrpo.metrics.window import Window
from agrpo.sampler.vllm import Vllm
from tests.fault_proxy import ANSWERED, FINAL, SLOW, fault_proxy
from tests.stub_server import control, stub_server

PROMPT = np.arange(2, 13, dtype=np.int32)
REASONS = {
    **dict.fromkeys(("500", "502", "429"), "unavailable"),
    **dict.fromkeys(("reset", "truncated"), "connection"),
    **dict.fromkeys(("malformed", "nothing", "list"), "malformed"),
    **dict.fromkeys(("400", "404"), "rejected"),
    **dict.fromkeys(("logprobs", "nan", "nan_head", "infinity", "null"), "logprobs"),
    **dict.fromkeys(("hang", "drip"), "timeout"),
    **{"too_long": "prompt_too_long", "abort": "aborted", "empty": "empty"},
}


@pytest.fixture(scope="module")
def url():
    with stub_server(tokens=7, heads=3, bodies=3) as url:
        yield url


@pytest.fixture(scope="module")
def plain_url():
    with stub_server(tokens=7, heads=3, bodies=3, versions=0) as url:
        yield url


def run(urls, work, timeout_s=10.0, max_retries=2, version=lambda: 1, settings=None, **options):
    """`await work(client)` and the metrics; the limit here is what a hang looks like."""
    window = Window(strict=True)

    async def main():
        sampler = Vllm(num_sampler_logprobs=3, max_retries=max_retries, **(settings or {}))
        client = await sampler.connect(
            tuple(urls), None, 42, version, timeout_s, 64, True, window, retry_wait_s=0.01, **options
        )
        async with client, asyncio.timeout(30):
            return await work(client)

    return asyncio.run(main()), window


async def one(client):
    return await client.generate(PROMPT, (0, 0, 0))


@pytest.mark.parametrize("fault", sorted(ANSWERED | SLOW))
def test_what_may_pass_is_tried_again(url, fault):
    with fault_proxy(url, [fault]) as proxy:
        turn, window = run([proxy.url], one, timeout_s=0.4 if fault in SLOW else 10.0)
        assert len(turn.output_ids) == 7 and turn.is_labelled
        assert window.get("rollout/vllm_retry_count") == 1
        assert proxy.counts == {fault: 1, "": 1}
        assert fault not in SLOW or proxy.cut.wait(10)  # the server was told


@pytest.mark.parametrize("fault", sorted(ANSWERED))
def test_what_does_not_pass_ends_after_the_retries(url, fault):
    with fault_proxy(url, [fault + "!"]) as proxy, pytest.raises(RolloutFailure, match=r"\(3 tries\)") as failure:
        run([proxy.url], one)
    assert failure.value.reason == REASONS[fault] and proxy.counts == {fault: 3}


@pytest.mark.parametrize("fault", sorted(SLOW))
def test_what_never_answers_ends_at_the_time_limit(url, fault):
    with fault_proxy(url, [fault + "!"]) as proxy, pytest.raises(RolloutFailure, match=r"server\.timeout") as failure:
        run([proxy.url], one, timeout_s=0.3, max_retries=1000)
    assert failure.value.reason == "timeout" and proxy.counts[fault] == 2  # the second one ends past the limit


@pytest.mark.parametrize("fault", sorted(FINAL))
def test_what_cannot_be_mended_is_asked_once(url, fault):
    with fault_proxy(url, [fault]) as proxy, pytest.raises(RolloutFailure) as failure:
        run([proxy.url], one)
    assert failure.value.reason == REASONS[fault] and proxy.counts == {fault: 1}
    if fault in ("400", "404"):
        assert f"proxy says {fault}" in failure.value.text  # the server's own words
    elif fault == "too_long":
        assert "maximum context length is 11" in failure.value.text


def test_a_rejection_of_the_length_that_the_user_insists_on_is_a_rejection(url):
    with fault_proxy(url, ["too_long"]) as proxy, pytest.raises(RolloutFailure) as failure:
        run([proxy.url], one, settings={"clamp_max_tokens": False})
    assert failure.value.reason == "rejected"


def test_a_server_that_asks_to_be_left_alone_is_until_the_limit(url):
    with fault_proxy(url, ["429"]) as proxy:
        proxy.retry_after = "3600"
        with pytest.raises(RolloutFailure, match="1 tries") as failure:
            run([proxy.url], one)
    assert failure.value.reason == "unavailable" and proxy.counts == {"429": 1}


@pytest.mark.parametrize("what", ["shut", "503"])
def test_an_outage_costs_no_tries_and_the_answer_after_it_is_dated_anew(plain_url, what):
    version, back = [1], threading.Event()

    async def through_an_outage(client):
        if what == "shut":
            proxy.shut()
        asks = [asyncio.create_task(client.generate(PROMPT, (g, 0, 0))) for g in range(20)]
        while not client._servers.all[0].down:
            await asyncio.sleep(0.01)
        version[0] = 4
        if what == "shut":
            proxy.open()
        back.set()
        return await asyncio.gather(*asks)

    with fault_proxy(plain_url, ["503"] * 30 if what == "503" else []) as proxy:
        turns, window = run([proxy.url], through_an_outage, max_retries=0, version=lambda: version[0])
    assert len(turns) == 20 and {int(v) for t in turns for v in t.versions} == {4}
    assert not turns[0].is_labelled and window.get("rollout/vllm_retry_count") >= 1


def test_an_outage_ends_at_the_time_limit_with_what_was_wrong(url):
    async def into_the_dark(client):
        proxy.shut()
        return await one(client)

    with fault_proxy(url) as proxy, pytest.raises(RolloutFailure) as failure:
        run([proxy.url], into_the_dark, timeout_s=0.5)
    assert failure.value.reason == "connection"
    assert "no server was up for 0.5 s (server.timeout)" in failure.value.text and proxy.url in failure.value.text


def test_a_server_that_answers_errors_while_it_says_it_is_sick_is_waited_for(url):
    async def sick(client):
        proxy.is_unhealthy = True
        ask = asyncio.create_task(one(client))
        while not client._servers.all[0].down:
            await asyncio.sleep(0.01)
        proxy.is_unhealthy = False
        return await ask

    with fault_proxy(url, ["500"]) as proxy:
        turn, window = run([proxy.url], sick, max_retries=0)
    assert len(turn.output_ids) == 7 and window.get("rollout/vllm_retry_count") == 1


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_server_without_the_runs_weights_is_asked_again_when_it_has_them(url, is_synced):
    """Restarted and not yet synced: its answers carry another label. Only one token at a time is asked for meanwhile."""

    async def restart(client):
        if not is_synced:  # a label once seen says the same as knowing that the run has synced
            assert (await one(client)).versions.tolist() == [1] * 7
        proxy.label = "default"
        asks = [asyncio.create_task(client.generate(PROMPT, (g, 0, 0))) for g in range(10)]
        while not client._servers.all[0].down:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not any(ask.done() for ask in asks)
        assert {b["sampling_params"]["max_tokens"] for b in proxy.bodies[10 + (not is_synced) :]} <= {1}
        proxy.label = "6"
        return await asyncio.gather(*asks)

    with fault_proxy(url) as proxy:
        turns, window = run([proxy.url], restart, max_retries=0, is_synced=is_synced)
    assert {int(v) for t in turns for v in t.versions} == {6} and all(t.is_labelled for t in turns)
    assert window.get("rollout/vllm_retry_count") >= 1


def test_unlabelled_answers_of_a_server_that_never_labels_are_dated_by_the_request(plain_url):
    turn, _ = run([plain_url], one, version=lambda: 9, is_synced=True)
    assert turn.versions.tolist() == [9] * 7 and not turn.is_labelled


def test_of_three_servers_one_may_die_and_come_back(url):
    """Its groups go to both others, evenly, nothing is lost, the other groups stay where they are, and it gets its back."""

    async def ask(client, groups):
        return await asyncio.gather(*(client.generate(PROMPT, (g, s, 0)) for g in groups for s in range(2)))

    async def work(client):
        await ask(client, range(12))
        assert [sorted(p.groups) for p in proxies] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
        asks = asyncio.create_task(ask(client, range(12, 42)))
        await asyncio.sleep(0)
        proxies[1].shut()
        assert len(await asks) == 60
        homeless = [g for g in range(42, 72) if g % 3 == 1]
        await ask(client, range(42, 72))
        for proxy, own in ((proxies[0], 0), (proxies[2], 2)):
            taken = [g for g in proxy.groups if g >= 42]
            assert {g for g in taken if g % 3 != 1} == set(range(42 + own, 72, 3))
            assert len(set(taken) & set(homeless)) == len(homeless) / 2
        assert [s.url for s in client._servers.up] == [proxies[0].url, proxies[2].url]
        assert proxies[1].url in client.last_answer_text()
        proxies[1].open()
        while len(client._servers.up) < 3:
            await asyncio.sleep(0.01)
        await ask(client, range(72, 84))
        assert {73, 76, 79, 82} <= set(proxies[1].groups)

    with fault_proxy(url) as a, fault_proxy(url) as b, fault_proxy(url) as c:
        proxies = [a, b, c]
        run([p.url for p in proxies], work, max_retries=0)
        total = sum((p.groups for p in proxies), collections.Counter())
        assert all(total[group] >= 2 for group in range(84))


def test_a_group_stays_with_one_engine_of_a_data_parallel_server(url):
    pages = "\n".join(f'vllm:kv_cache_usage_perc{{engine="{i}"}} 0.1' for i in range(3))
    control(url, metrics=pages)

    async def ask(client):
        await asyncio.gather(*(client.generate(PROMPT, (g, s, 0)) for g in range(6) for s in range(2)))

    try:
        with fault_proxy(url) as a, fault_proxy(url) as b:
            run([a.url, b.url], ask)
            for proxy in (a, b):
                ranks = collections.Counter(h["X-data-parallel-rank"] for h in proxy.headers)
                assert ranks == {"0": 2, "1": 2, "2": 2}
    finally:
        control(url, metrics=None)
