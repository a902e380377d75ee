"""Pauses, aborts, limits and refusals of the embedded server."""

import http.client
import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import torch
from serving import Background, assert_logprobs, call, generate, make_model, metric, prompt_of, together, wait_until

from agrpo.serve.embedded import EmbeddedServer


def start_long(server, prompt, max_tokens=600, **sampling):
    """A long request in flight, with some tokens already drawn."""
    before = metric(server.url, "vllm:generation_tokens_total")
    job = Background(
        lambda: generate(server.url, prompt, request_id="long", max_tokens=max_tokens, ignore_eos=True, **sampling)
    )
    wait_until(lambda: metric(server.url, "vllm:generation_tokens_total") > before + 20)
    return job


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_a_request_survives_a_pause_and_goes_on_under_the_new_weights(clear_cache, fresh, folders, plain):
    """Tokens before the pause keep their log-probs and version; those after are the new weights' (GEN-18, GEN-20).

    With the cache cleared the new weights see a context computed anew; without, the old keys and values (SYNC-13).
    """
    url, prompt = fresh.url, prompt_of(3, 11)
    call(url, "/update_weight_version", {"new_version": "6"})
    job = start_long(fresh, prompt, logprobs=3, seed=11)
    assert call(url, f"/pause?mode=keep&clear_cache={clear_cache}", method="POST") == (200, {"status": "paused"})
    assert call(url, "/is_paused") == (200, {"is_paused": True})
    count = metric(url, "vllm:generation_tokens_total")
    status, answer = call(
        url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folders["other"]}}
    )
    assert status == 200, answer
    call(url, "/update_weight_version", {"new_version": "7"})
    assert metric(url, "vllm:generation_tokens_total") == count
    assert metric(url, "vllm:num_preemptions_total") == (1 if clear_cache == "true" else 0)
    call(url, "/resume", method="POST")
    choice = job.result()
    tokens, n = choice["token_ids"], int(count)
    assert len(tokens) == 600 and 0 < n < 600
    assert choice["weight_versions"] == [
        {"version": "6", "start": 0, "end": n},
        {"version": "7", "start": n, "end": 600},
    ]
    assert_logprobs(choice, plain("qwen3", prompt + tokens[:n]), len(prompt), end=n)
    if clear_cache == "true":
        logits = plain("other", prompt + tokens)
    else:
        logits = continued(plain, prompt + tokens, len(prompt) + n - 1)
    assert_logprobs(choice, logits, len(prompt), start=n)


def continued(plain, token_ids, split):
    """Logits of the new model over the old model's keys and values of the first `split` tokens."""
    plain("qwen3", [1]), plain("other", [1])
    with torch.no_grad():
        old = plain.models["qwen3"](torch.tensor([token_ids[:split]]), use_cache=True)
        new = plain.models["other"](torch.tensor([token_ids[split:]]), past_key_values=old.past_key_values)
    return torch.cat([old.logits[0], new.logits[0]])


def test_pause_wait_drains_and_holds_newcomers(fresh):
    job = start_long(fresh, prompt_of(1, 5), seed=1)
    pause = Background(lambda: call(fresh.url, "/pause?mode=wait", method="POST"))
    wait_until(lambda: call(fresh.url, "/is_paused")[1]["is_paused"])
    late = Background(lambda: generate(fresh.url, prompt_of(2, 5), max_tokens=3, seed=2, ignore_eos=True))
    assert pause.result()[0] == 200
    assert len(job.result()["token_ids"]) == 600
    wait_until(lambda: metric(fresh.url, "vllm:num_requests_waiting") == 1)
    assert metric(fresh.url, "vllm:generation_tokens_total") == 600
    call(fresh.url, "/resume", method="POST")
    assert len(late.result()["token_ids"]) == 3


def test_pause_abort_gives_what_there_is(fresh, plain):
    prompt = prompt_of(1, 5)
    job = start_long(fresh, prompt, seed=1, logprobs=2)
    assert call(fresh.url, "/pause?mode=abort", method="POST")[0] == 200
    choice = job.result()
    assert choice["finish_reason"] == "abort" and 20 < len(choice["token_ids"]) < 600
    assert_logprobs(choice, plain("qwen3", prompt + choice["token_ids"]), len(prompt))


def test_abort_by_request_id(fresh):
    job = start_long(fresh, prompt_of(1, 5), seed=1)
    assert call(fresh.url, "/abort_requests", {"request_ids": ["long", "unknown"]}) == (200, {"aborted": 1})
    assert job.result()["finish_reason"] == "abort"
    assert metric(fresh.url, "vllm:num_requests_running") == 0


def test_a_disconnected_client_frees_its_slot(fresh):
    address = urlsplit(fresh.url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    call(fresh.url, "/pause?mode=keep", method="POST")
    body = {"token_ids": prompt_of(1, 5), "sampling_params": {"max_tokens": 600, "ignore_eos": True}}
    connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: metric(fresh.url, "vllm:num_requests_waiting") == 1)
    connection.close()
    wait_until(lambda: metric(fresh.url, "vllm:num_requests_waiting") == 0)
    call(fresh.url, "/resume", method="POST")
    assert len(generate(fresh.url, prompt_of(1, 5), max_tokens=3, seed=1, ignore_eos=True)["token_ids"]) == 3
    assert metric(fresh.url, "vllm:generation_tokens_total") == 3


def test_little_cache_preempts_and_changes_nothing(folders):
    """Eleven requests that grow past one slot size share a cache with room for two at full length."""
    jobs = [(prompt_of(i, 190 + 17 * i), i) for i in range(11)]

    def ask_all(url):
        return together(
            [lambda p=p, s=s: generate(url, p, max_tokens=150, seed=s, logprobs=2, ignore_eos=True) for p, s in jobs]
        )

    with EmbeddedServer(folders["qwen3"], kv_cache_tokens=1500) as small:
        squeezed = ask_all(small.url)
        assert metric(small.url, "vllm:num_preemptions_total") > 0
        assert metric(small.url, "vllm:kv_cache_usage_perc") == 0
    with EmbeddedServer(folders["qwen3"]) as ample:
        free = ask_all(ample.url)
        assert metric(ample.url, "vllm:num_preemptions_total") == 0
    assert [c["token_ids"] for c in squeezed] == [c["token_ids"] for c in free]


def test_sliding_window_layers_see_their_window_only(tmp_path, plain):
    window = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "use_sliding_window": True}
    folder = make_model(tmp_path / "sliding", "qwen3", 7, sliding_window=13, **window)
    prompt = prompt_of(4, 29)
    with EmbeddedServer(folder) as server:
        choice = generate(server.url, prompt, max_tokens=31, seed=3, logprobs=3, ignore_eos=True)
    assert_logprobs(choice, plain(folder, prompt + choice["token_ids"]), len(prompt))


@pytest.mark.parametrize(
    "path, body, status, text",
    [
        ("/inference/v1/generate", {"token_ids": []}, 400, "non-empty list of token ids"),
        ("/inference/v1/generate", {"token_ids": "ab"}, 400, "non-empty list of token ids"),
        ("/inference/v1/generate", {"token_ids": [97]}, 400, "Token id 97 is out of vocabulary (size 97)"),
        ("/inference/v1/generate", {"token_ids": [7] * 701}, 400, "maximum context length is 701"),
        ("/inference/v1/generate", {"token_ids": [7], "model": "nope"}, 404, "`nope` does not exist"),
        (
            "/inference/v1/generate",
            {"token_ids": [7], "sampling_params": {"temperature": -1}},
            400,
            "temperature must be",
        ),
        ("/inference/v1/generate", {"token_ids": [7], "sampling_params": {"top_p": 0}}, 400, "top_p must be"),
        (
            "/inference/v1/generate",
            {"token_ids": [7], "sampling_params": {"top_k": 2.5}},
            400,
            "top_k must be an integer",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [7], "sampling_params": {"logprobs": 33}},
            400,
            "33, which is greater",
        ),
        ("/inference/v1/generate", {"token_ids": [7], "sampling_params": {"n": 2}}, 400, "n=2 is not supported"),
        ("/inference/v1/generate", {"token_ids": [7], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens must be"),
        ("/v1/completions", {"prompt": [7] * 691, "max_tokens": 11}, 400, "maximum context length is 701"),
        ("/v1/completions", {"prompt": "hello"}, 400, "no tokenizer"),
        ("/pause?mode=nap", {}, 400, "keep, wait, abort"),
        ("/update_weights", {"update_info": {}}, 400, "update_weights without start_weight_update"),
        ("/finish_weight_update", {}, 400, "finish_weight_update without"),
        ("/collective_rpc", {"method": "sleep"}, 400, "only reload_weights"),
        ("/v1/unload_lora_adapter", {"lora_name": "nope"}, 404, "cannot be found"),
        ("/nowhere", {}, 404, "POST /nowhere"),
    ],
)
def test_refusals_say_why(path, body, status, text, qwen):
    got, answer = call(qwen.url, path, body)
    assert got == status
    assert text in answer["error"]["message"] and answer["error"]["code"] == status


def test_a_body_that_is_not_json_is_refused(qwen):
    address = urlsplit(qwen.url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.request("POST", "/inference/v1/generate", "{")
    answer = connection.getresponse()
    assert answer.status == 400 and b"not JSON" in answer.read()
    connection.close()


def test_facts_about_the_server(qwen):
    assert call(qwen.url, "/health")[0] == 200
    models = call(qwen.url, "/v1/models")[1]["data"]
    assert [(m["id"], m["parent"], m["max_model_len"]) for m in models] == [("tiny", None, 701)]
    info = call(qwen.url, "/server_info?config_format=json")[1]["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs" and info["model_config"]["max_logprobs"] == 32
    assert info["lora_config"] == {"max_lora_rank": 64, "max_loras": 8}
    assert call(qwen.url, "/get_world_size")[1] == {"world_size": 1}
    assert call(qwen.url, "/is_paused")[1] == {"is_paused": False}


def test_the_process_ends_on_sigterm(folders):
    script = "import sys; from agrpo.serve.embedded import serve; import logging; logging.basicConfig(level='INFO'); serve(sys.argv[1], port=0)"
    process = subprocess.Popen([sys.executable, "-c", script, folders["qwen3"]], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "listening on" in line:
            url = line.split("listening on ")[1].strip()
            break
    assert len(generate(url, [7, 8], max_tokens=3, seed=1, ignore_eos=True)["token_ids"]) == 3
    os.kill(process.pid, signal.SIGTERM)
    process.stderr.close()
    assert process.wait(timeout=20) == 0
