"""The proof that weights arrived: a bigram model on both sides, whose log-probs numpy computes from the sent table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl
from agrpo.sync.gloo import Gloo
from agrpo.sync.proof import Proof, parse_answer
from tests.stub_server import stub_server

NUM_TOKENS = 13


def make_table(seed: int) -> torch.Tensor:
    return torch.randn(17, 17, generator=torch.Generator().manual_seed(seed))


def scorer_of(table: torch.Tensor):
    """[n, K] log-probs of a bigram table in float64: token t is predicted from token t - 1."""
    logits = table.double().numpy()
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def score(token_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
        previous = token_ids[-len(ids) - 1 : -1]
        return logprobs[previous[:, None], ids]

    return score


@pytest.fixture
def server(make_server):
    return make_server(Gloo.receiver)


def send(server, tmp_path, table, version):
    control = ServerControl([server.url], 20.0)
    sender = Gloo().open(control, tmp_path, "cpu", 0, 1)
    sender.send(iter({"table": table, "other": torch.ones(3)}.items()), version, lambda: None)


def make_proof(server, **options):
    settings = {"parity_limit": 0.2, "trainer_dtype": "float32", "num_tokens": NUM_TOKENS, **options}
    return Proof(ServerControl([server.url], 20.0), model=None, prompt_ids=[3, 5], **settings)


def test_equal_weights_agree_to_rounding(server, tmp_path):
    proof = make_proof(server)
    for version in (1, 2, 3):
        send(server, tmp_path, make_table(version), version)
        assert proof.check(scorer_of(make_table(version)), version) < 1e-6


def test_lost_update_is_read_as_nothing_arrived(server, tmp_path):
    proof = make_proof(server)
    send(server, tmp_path, make_table(1), 1)
    proof.check(scorer_of(make_table(1)), 1)
    server.ignored = {"table"}
    send(server, tmp_path, make_table(2), 2)
    with pytest.raises(
        ServerError, match="weights of version 2 did not arrive at http.*nothing changed: the server answers"
    ):
        proof.check(scorer_of(make_table(2)), 2)


def test_wrong_weights_are_read_as_partly_arrived(server, tmp_path):
    send(server, tmp_path, make_table(1), 1)
    with pytest.raises(
        ServerError, match="limit 0.001 .float32 on both sides.*partly changed: .*some weights did not arrive"
    ):
        make_proof(server).check(scorer_of(make_table(2)), 1)


def test_raw_logprobs_are_read_as_shifted(server, tmp_path):
    send(server, tmp_path, make_table(1), 1)
    shifted = scorer_of(make_table(1))
    with pytest.raises(ServerError, match="difference 0.75 nats over 65 values.*all shifted: .* about .0.75"):
        make_proof(server).check(lambda t, i: shifted(t, i) + 0.75, 1)


def test_small_error_fails_in_float32_only(server, tmp_path):
    send(server, tmp_path, make_table(1), 1)
    exact = scorer_of(make_table(1))
    noise = np.where(np.arange(5) % 2, 0.01, -0.01)

    def noisy(token_ids, ids):
        return exact(token_ids, ids) + noise

    assert make_proof(server, trainer_dtype="bfloat16").check(noisy, 1) == pytest.approx(0.01)
    assert make_proof(server, parity_limit=None).check(noisy, 1) == pytest.approx(0.01)
    with pytest.raises(ServerError, match="server.parity_limit=null"):
        make_proof(server).check(noisy, 1)


def test_not_a_number_is_never_within_the_limit(server, tmp_path):
    send(server, tmp_path, make_table(1), 1)
    with pytest.raises(ServerError, match="not finite"):
        make_proof(server).check(lambda t, i: np.full(i.shape, np.nan), 1)


def test_server_without_an_answer_is_named(server):
    server.fail_at = "/inference/v1/generate"
    with pytest.raises(ServerError, match="proof .* got no answer: POST .* answered 500: told to fail"):
        make_proof(server).check(scorer_of(make_table(1)), 1)


def test_a_server_without_the_token_endpoint_is_asked_for_a_completion():
    answers = []
    for endpoint in (0, 1):
        with stub_server(tokens=7, heads=4, bodies=1, token_endpoint=endpoint) as url:
            control = ServerControl([url], 10)
            answers.append(parse_answer(control.generate(url, [2, 3], "stub", {"logprobs": 4}), 4))
    completion, tokens = answers
    assert completion.ids.shape == (7, 5) and completion.output_ids.tolist() == tokens.output_ids.tolist()
    for mine, other, a, b in zip(completion.ids, tokens.ids, completion.sampler_logprobs, tokens.sampler_logprobs, strict=True):
        # The token endpoint lists as many as were asked for with the sampled one counted in: one more where it ranks first.
        listed, all_listed = dict(zip(mine.tolist(), a.tolist(), strict=True)), dict(zip(other.tolist(), b.tolist(), strict=True))
        assert len(listed) >= 4 and listed.items() <= all_listed.items() and len(all_listed) == 5
