"""Decoding of answers: heads against a per-token Python derivation, and every check that makes a rollout unusable."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.errors import RolloutFailure
from agrpo.sampler.answer import Expected, Unsynced, turn_of_text, turn_of_tokens
from tests.stub_server import text_answer, token_answer

PROMPT = np.arange(5, dtype=np.int32)


def expected(heads=3, candidates=False, version=7):
    return Expected(PROMPT, heads, candidates, version)


def encode(answer):
    return json.dumps(answer).encode()


def entry(token, logprob, rank):
    return {"token_id": token, "logprob": logprob, "rank": rank}


def answer_of(tops, **choice):
    """One position per list in `tops`, sampled token first."""
    content = [{**top[0], "top_logprobs": top} for top in tops]
    ids = [top[0]["token_id"] for top in tops]
    return {"choices": [{"finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}, **choice}]}


def head_by_hand(content, k):
    """Rank by log-prob without the sampled token unless it belongs there, the slow and obvious way."""
    listed = {e["token_id"]: e for e in content["top_logprobs"]}
    ranked = sorted(listed.values(), key=lambda e: e["rank"])
    return [e["token_id"] for e in ranked if e["rank"] <= k]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.integers(1, 9), st.integers(0, 10**6))
def test_heads_are_the_ranked_top_k_from_both_endpoints(tokens, heads, seed):
    answer = token_answer(tokens, heads, seed, version="3")
    content = answer["choices"][0]["logprobs"]["content"]
    for turn in (
        turn_of_tokens(encode(answer), expected(heads)),
        turn_of_text(encode(text_answer(answer)), expected(heads)),
    ):
        assert turn.head_ids.tolist() == [head_by_hand(c, heads) for c in content]
        by_id = [{e["token_id"]: e["logprob"] for e in c["top_logprobs"]} for c in content]
        want = [[by_id[i][t] for t in row] for i, row in enumerate(turn.head_ids.tolist())]
        np.testing.assert_allclose(turn.head_logprobs, want, rtol=1e-6)
        np.testing.assert_allclose(turn.sampler_logprobs, [c["logprob"] for c in content], rtol=1e-6)
        assert turn.output_ids.tolist() == [c["token_id"] for c in content]
        assert turn.versions.tolist() == [3] * tokens
        assert turn.output_mask.all() and turn.candidates is None


def test_the_sampled_token_outside_the_head_is_left_out_and_inside_takes_its_rank():
    outside = [entry(7, -3.0, 9), entry(5, -0.1, 1), entry(4, -2.5, 2)]
    inside = [entry(7, -0.9, 2), entry(5, -0.6, 1)]
    repeated = [entry(7, -0.9, 2), entry(5, -0.6, 1), entry(7, -0.9, 2)]
    turn = turn_of_tokens(encode(answer_of([outside, inside, repeated])), expected(2))
    assert turn.head_ids.tolist() == [[5, 4], [5, 7], [5, 7]]
    np.testing.assert_allclose(turn.head_logprobs, [[-0.1, -2.5], [-0.6, -0.9], [-0.6, -0.9]], rtol=1e-6)


def test_fewer_listed_entries_and_placeholders_are_padding():
    short = [entry(7, -0.5, 1), entry(5, -1.5, 2)]
    masked = [entry(7, -0.5, 1), entry(5, -9999.0, 2), entry(4, -1.5, 3)]
    turn = turn_of_tokens(encode(answer_of([short, masked])), expected(3))
    assert turn.head_ids.shape == (2, 3)
    assert turn.head_logprobs[0].tolist() == [-0.5, -1.5, -np.inf]
    assert turn.head_logprobs[1].tolist() == [-0.5, -1.5, -np.inf]
    assert turn.head_ids[:, :2].tolist() == [[7, 5], [7, 4]]


def test_without_centering_there_is_no_head():
    turn = turn_of_tokens(encode(answer_of([[entry(7, -0.5, 1)]])), expected(0))
    assert turn.head_ids.shape == (1, 0) == turn.head_logprobs.shape


def test_versions_follow_the_spans_and_fall_back_to_the_version_at_sending():
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    tops = [[entry(7, -0.5, 1)]] * 4
    turn = turn_of_tokens(encode(answer_of(tops, weight_versions=spans)), expected(0))
    assert turn.versions.tolist() == [4, 4, 5, 7]
    for missing in (None, [{"version": "default", "start": 0, "end": 4}]):
        turn = turn_of_tokens(encode(answer_of(tops, weight_versions=missing)), expected(0))
        assert turn.versions.tolist() == [7] * 4


def test_tokens_of_weights_that_the_run_did_not_send_are_refused():
    """What a server says between its restart and the next sync; also an answer that was under way during that sync."""
    asked = Expected(np.array([1, 2], np.int32), 0, False, version=7, is_synced=True)
    tops = [[entry(7, -0.5, 1)]] * 4
    restarted = [{"version": "default", "start": 0, "end": 4}]
    under_way = [{"version": "default", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 4}]
    for spans in (restarted, under_way):
        with pytest.raises(Unsynced, match="labelled 'default'"):
            turn_of_tokens(encode(answer_of(tops, weight_versions=spans)), asked)
    for spans in ([{"version": "6", "start": 0, "end": 4}], None):
        turn_of_tokens(encode(answer_of(tops, weight_versions=spans)), asked)


def test_candidate_sets_are_kept_as_listed():
    masks = [[7, 8, 9], [7]]
    turn = turn_of_tokens(encode(answer_of([[entry(7, -0.5, 1)]] * 2, sampling_mask=masks)), expected(0, True))
    assert [c.tolist() for c in turn.candidates] == masks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling_mask": None}, "candidates"),
        ({"sampling_mask": [[7]]}, "candidates"),
        ({"sampling_mask": [[7], []]}, "candidates"),
        ({"sampling_mask": [[7], [8, 9]]}, "candidates"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"token_ids": [7, 8]}, "logprobs"),
        ({"token_ids": [7, 7, 7]}, "logprobs"),
        ({"token_ids": []}, "empty"),
        ({"logprobs": None}, "logprobs"),
        ({"token_ids": "7 7"}, "malformed"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_a_failure(changes, reason):
    answer = answer_of([[entry(7, -0.5, 1)]] * 2, sampling_mask=[[7], [7, 9]])
    turn_of_tokens(encode(answer), expected(0, True))
    answer["choices"][0] |= changes
    with pytest.raises(RolloutFailure) as failure:
        turn_of_tokens(encode(answer), expected(0, True))
    assert failure.value.reason == reason


@pytest.mark.parametrize("logprob", [None, -9999.0, -1e30, "x"])
def test_a_missing_or_placeholder_logprob_is_a_failure(logprob):
    answer = answer_of([[entry(7, -0.5, 1)]] * 3)
    answer["choices"][0]["logprobs"]["content"][1]["logprob"] = logprob
    with pytest.raises(RolloutFailure):
        turn_of_tokens(encode(answer), expected(0))


def test_text_heads_by_text_instead_of_id_are_a_failure():
    answer = text_answer(token_answer(2, 3, 0))
    answer["choices"][0]["logprobs"]["top_logprobs"][1] = {"hello": -0.5}
    with pytest.raises(RolloutFailure, match="by text"):
        turn_of_text(encode(answer), expected(3))
