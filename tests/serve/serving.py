"""Tiny random models, requests to a server, and the comparison with a plain forward."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

EOS = 5


def make_model(folder, kind: str, seed: int, **overrides):
    """Save a random model: 97 tokens, 3 layers, wide weights so that distributions are far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 97, "hidden_size": 42, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 701, "initializer_range": 0.25,
        "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        kind
    ]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, "tie_word_embeddings": kind == "qwen3", **overrides}))
    model.save_pretrained(folder)
    return str(folder)


def call(url: str, path: str, body: dict | None = None, method: str | None = None):
    """(status, parsed answer) of one request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method or ("GET" if body is None else "POST"))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def generate(
    url: str, token_ids: list[int], model: str | None = None, request_id: str | None = None, **sampling
) -> dict:
    """The one choice of a generate request that must succeed."""
    body = {"token_ids": token_ids, "model": model, "request_id": request_id, "sampling_params": sampling}
    status, answer = call(url, "/inference/v1/generate", body)
    assert status == 200, answer
    return answer["choices"][0]


def together(jobs: list) -> list:
    """Run callables at the same time; their results in order."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


def metric(url: str, name: str) -> float:
    _, text = call(url, "/metrics")
    return float(next(line for line in text.splitlines() if line.startswith(name + "{")).rsplit(" ", 1)[1])


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.002)


class Background:
    """A request running while the test does something else."""

    def __init__(self, job):
        self._result = None

        def run():
            self._result = job()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self):
        self._thread.join(timeout=60)
        return self._result


def prompt_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 97, (length,), generator=generator).tolist()


def assert_logprobs(
    choice: dict, logits: torch.Tensor, prompt_length: int, temperature: float = 1.0, start=0, end=None
):
    """Every reported number of output tokens start..end equals the plain forward's, to 1e-5; the head is exactly its top k."""
    content = choice["logprobs"]["content"]
    for i in range(start, len(content) if end is None else end):
        expected = torch.log_softmax(logits[prompt_length + i - 1].double() / temperature, dim=-1)
        entry = content[i]
        token = choice["token_ids"][i]
        assert entry["token_id"] == token
        assert entry["logprob"] == pytest.approx(float(expected[token]), abs=1e-5)
        # Two tokens as close as the log-probs may differ have either order.
        first, last = (int((expected > expected[token] + shift).sum()) + 1 for shift in (1e-5, -1e-5))
        assert first <= entry["rank"] <= max(first, last - 1)
        top = entry["top_logprobs"]
        assert top[0]["token_id"] == token
        ranked = sorted(top, key=lambda e: e["rank"])
        k = len(ranked) - (ranked[-1]["token_id"] == token and ranked[-1]["rank"] > len(ranked))
        values, ids = expected.topk(k) if k else (expected[:0], expected[:0])
        head = [e for e in ranked if e["rank"] <= k]
        assert [e["token_id"] for e in head] == ids.tolist()
        assert [e["logprob"] for e in head] == pytest.approx(values.tolist(), abs=1e-5)
