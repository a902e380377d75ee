"""Weights into real servers, ours and vLLM: what was sent is what it answers with, while requests run, under every cache policy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl
from agrpo.sync.disk import Disk
from agrpo.sync.gloo import Gloo
from agrpo.sync.proof import Proof
from tests.standins import tiny_qwen3
from tests.vllm.conftest import BOTH, Server

MECHANISMS = {"gloo": Gloo, "disk": Disk}
BACKEND = ("--weight-transfer-config", '{"backend": "gloo"}')
PROMPT = [7, 11, 13]
LONG = [3 + i % 37 for i in range(301)]  # two blocks of the prefix cache, and some tokens


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory) -> str:
    """Tied embeddings: a checkpoint without a head of its own, which is what vLLM's CPU build gets wrong."""
    return str(tiny_qwen3(tmp_path_factory.mktemp("tied") / "qwen3", tied=True))


@pytest.fixture(scope="module", params=BOTH)
def server(request, tied_model, tmp_path_factory):
    if request.param == "embedded":
        return request.getfixturevalue("embedded_server")(tied_model)
    environment = Gloo().server_environment()
    return request.getfixturevalue("vllm_server")(tied_model, BACKEND, environment)


def weights(path: str, seed: int) -> Qwen3ForCausalLM:
    """The served model with other weights, large enough that two of them disagree everywhere."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def scorer_of(model):
    """[n, K] log-probs of an ordinary forward."""

    def score(token_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor(token_ids[None].astype(np.int64))).logits[0, -len(ids) - 1 : -1].double()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids.astype(np.int64))).numpy()

    return score


def opened(mechanism: str, server, tmp_path, **settings):
    """A sender and the proof; closed by the test's end with the process."""
    control = ServerControl([server.url], 120.0)
    proof = Proof(control, model=server.model, prompt_ids=PROMPT, parity_limit=0.2, trainer_dtype="float32")
    component = MECHANISMS[mechanism](**settings)
    return component.open(control, tmp_path, torch.device("cpu"), 0, 1), proof


def generate(server, prompt=PROMPT, salt: str | None = None, **params) -> dict:
    control = ServerControl([server.url], 120.0)
    body = {"token_ids": prompt, "model": server.model, "sampling_params": {"temperature": 1.0, "seed": 5, **params}}
    if salt is not None:
        body["cache_salt"] = salt
    return control.request(server.url, "POST", "/inference/v1/generate", body)["choices"][0]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_version_arrives_with_tied_embeddings(mechanism, server, tmp_path):
    sender, proof = opened(mechanism, server, tmp_path, bucket_mb=1)
    for version in (1, 2, 3):
        model = weights(server.model, version)
        sender.send(model.named_parameters(), version, lambda: None)
        assert proof.check(scorer_of(model), version) < 1e-5
        spans = generate(server, max_tokens=5)["weight_versions"]
        assert [(span["version"], span["start"], span["end"]) for span in spans] == [(str(version), 0, 5)]
    sender.close()


@pytest.mark.parametrize("cache", ["reset", "keep"])
def test_requests_in_flight_outlive_a_sync(cache, server, tmp_path):
    """On a busy machine a request may be through before the sync begins; then all five are asked again."""
    sender, _ = opened("gloo", server, tmp_path, cache=cache)
    old, new = (list(weights(server.model, seed).named_parameters()) for seed in (1, 2))
    for before in range(11, 51, 2):
        sender.send(old, before, lambda: None)
        threads, answers = _five_in_flight(server, sender.server)
        sender.send(new, before + 1, lambda: None)
        for thread in threads:
            thread.join(120)
        assert [len(answer["token_ids"]) for answer in answers] == [300] * 5
        spans = [[(s["version"], s["start"], s["end"]) for s in answer["weight_versions"]] for answer in answers]
        if all(len(of_one) == 2 for of_one in spans):
            break
    else:
        raise AssertionError("five requests were never in flight while weights came")
    sender.close()
    for first, second in spans:
        assert (first, second) == ((str(before), 0, first[2]), (str(before + 1), first[2], 300))


def _five_in_flight(server, control: ServerControl) -> tuple[list[threading.Thread], list[dict]]:
    """Five requests, from the moment at which all run or the first is through, and where their answers will be."""
    params = {"max_tokens": 300, "ignore_eos": True, "logprobs": 0}
    answers: list[dict] = []
    threads = [threading.Thread(target=lambda: answers.append(generate(server, **params))) for _ in range(5)]
    for thread in threads:
        thread.start()
    while not answers and _running(control) < 5:
        pass
    return threads, answers


def _running(control: ServerControl) -> float:
    lines = control.request(control.urls[0], "GET", "/metrics").get("text", "").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def test_a_salt_keeps_the_prefixes_of_older_weights_apart(server, tmp_path):
    """The same prompt right after a sync: stale keys and values are used under keep, not under salt or after reset."""

    def gap(model, salt=None) -> float:
        answer = generate(server, LONG, salt, max_tokens=1, logprobs=5)
        row = answer["logprobs"]["content"][0]["top_logprobs"]
        ids = np.asarray([[entry["token_id"] for entry in row]], np.int32)
        sequence = np.asarray([*LONG, answer["token_ids"][0]], np.int32)
        return float(np.abs(scorer_of(model)(sequence, ids)[0] - [entry["logprob"] for entry in row]).max())

    models = {version: weights(server.model, version) for version in range(21, 25)}
    sender, _ = opened("gloo", server, tmp_path, cache="reset")
    sender.send(models[21].named_parameters(), 21, lambda: None)
    assert gap(models[21]) < 1e-5 and gap(models[21], "21") < 1e-5
    sender.clear_cache = False
    sender.send(models[22].named_parameters(), 22, lambda: None)
    if isinstance(server, Server):  # the embedded server computes every prompt anew
        assert gap(models[22]) > 1e-2, "keep: the prefix was computed by version 21"
    assert gap(models[22], "22") < 1e-5
    sender.clear_cache = True
    sender.send(models[23].named_parameters(), 23, lambda: None)
    assert gap(models[23]) < 1e-5
    sender.close()


def test_an_update_left_open_by_a_sender_that_died_is_broken_off(server, tmp_path):
    control = ServerControl([server.url], 60.0)
    control.pause(True)
    control.post("/start_weight_update", {})
    sender, proof = opened("gloo", server, tmp_path)
    model = weights(server.model, 31)
    sender.send(model.named_parameters(), 31, lambda: None)
    assert not control.is_paused() and proof.check(scorer_of(model), 31) < 1e-5
    sender.close()


def test_an_update_that_fails_leaves_a_complete_model(server, tmp_path):
    """The first bucket holds a name the model does not know: the server goes on with what it had, or waits paused."""
    sender, proof = opened("gloo", server, tmp_path)
    model = weights(server.model, 41)
    sender.send(model.named_parameters(), 41, lambda: None)
    with pytest.raises(ServerError, match="version 42 failed at transfer"):
        sender.send([("stranger.weight", torch.zeros(3))], 42, lambda: None)
    assert sender.server.is_paused() or proof.check(scorer_of(model), 41) < 1e-5
    sender.send(weights(server.model, 43).named_parameters(), 43, lambda: None)
    assert proof.check(scorer_of(weights(server.model, 43)), 43) < 1e-5
    sender.close()


@pytest.mark.vllm
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_proof_notices_tied_embeddings_that_stayed_old(mechanism, vllm_server, tied_model, tmp_path):
    environment = {**Gloo().server_environment(), "AGRPO_REPAIR_TIED_EMBEDDINGS": "0"}
    server = vllm_server(tied_model, BACKEND, environment)
    sender, proof = opened(mechanism, server, tmp_path)
    model = weights(server.model, 1)
    sender.send(model.named_parameters(), 1, lambda: None)
    with pytest.raises(ServerError, match="version 1 did not arrive .* partly changed.*tied embeddings"):
        proof.check(scorer_of(model), 1)
    sender.close()
