"""The same mechanisms against the embedded server and a real model: after a sync both sides give the same log-probs."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agrpo.errors import ServerError
from agrpo.serve.embedded import EmbeddedServer
from agrpo.sync.control import ServerControl
from agrpo.sync.disk import Disk
from agrpo.sync.gloo import Gloo
from agrpo.sync.proof import Proof

MECHANISMS = {"gloo": Gloo, "disk": Disk}
PROMPT = [7, 11, 13]


def make_model(seed: int, tied: bool, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=36,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        max_position_embeddings=101,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def scorer_of(model):
    """[n, K] log-probs of an ordinary forward, in float64 from the logits on."""

    def score(token_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor(token_ids[None].astype(np.int64))).logits[0, -len(ids) - 1 : -1].double()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids.astype(np.int64))).numpy()

    return score


@contextlib.contextmanager
def serving(mechanism: str, model, tmp_path):
    """A server that holds `model`, a sender to it, and the proof."""
    model.save_pretrained(tmp_path / "model")
    component = MECHANISMS[mechanism]()
    with EmbeddedServer(tmp_path / "model", component.receiver or None) as server:
        control = ServerControl([server.url], 30.0)
        proof = Proof(
            control,
            model=None,
            prompt_ids=PROMPT,
            parity_limit=0.2,
            trainer_dtype=str(model.dtype).removeprefix("torch."),
        )
        yield component.open(control, tmp_path, torch.device("cpu"), 0, 1), proof


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_server_answers_with_the_weights_it_was_sent(mechanism, tied, tmp_path):
    with serving(mechanism, make_model(0, tied), tmp_path) as (sender, proof):
        for version in (1, 2, 3):
            model = make_model(version, tied)
            sender.send(model.named_parameters(), version, lambda: None)
            assert sender.needs_proof == (version == 1)
            assert proof.check(scorer_of(model), version) < 1e-5
            choice = sender.server.generate(sender.server.urls[0], PROMPT, None, {"max_tokens": 5, "seed": 1})
            assert [span["version"] for span in choice["weight_versions"]] == [str(version)]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_server_in_bfloat16_receives_bfloat16(mechanism, tmp_path):
    served = make_model(0, True, torch.bfloat16)
    with serving(mechanism, served, tmp_path) as (sender, proof):
        trained = make_model(1, True)
        sender.send(trained.named_parameters(), 1, lambda: None)
        # The trainer's own arithmetic in float32 differs by rounding, far below the limit.
        assert 0 < proof.check(scorer_of(trained), 1) < 0.1


def test_head_that_did_not_arrive_is_noticed(tmp_path):
    with serving("gloo", make_model(0, tied=False), tmp_path) as (sender, proof):
        model = make_model(1, tied=False)
        sender.send(((n, p) for n, p in model.named_parameters() if n != "lm_head.weight"), 1, lambda: None)
        with pytest.raises(ServerError, match="weights of version 1 did not arrive .* some weights did not arrive"):
            proof.check(scorer_of(model), 1)


def test_name_the_server_does_not_know_changes_nothing(tmp_path):
    model = make_model(0, tied=True)
    with serving("gloo", model, tmp_path) as (sender, proof):
        with pytest.raises(ServerError, match="failed at transfer: .*unknown weight stranger.*no weight was changed"):
            sender.send([("stranger", torch.zeros(3))], 1, lambda: None)
        assert not sender.server.is_paused()
        assert proof.check(scorer_of(model), 0) < 1e-5


def test_hundred_syncs_of_a_real_model_stay_quick(tmp_path):
    with serving("gloo", make_model(0, tied=True), tmp_path) as (sender, proof):
        model = make_model(1, tied=True)
        times = [sender.send(model.named_parameters(), version, lambda: None) for version in range(1, 101)]
        assert proof.check(scorer_of(model), 100) < 1e-5
        assert sorted(t.total_s for t in times)[50] < 0.5
