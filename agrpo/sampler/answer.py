"""From the bytes of a server's answer to a `Turn`: typed decoding, arrays at once, and the checks of GEN-7, GEN-9, SAMP-8.

A token endpoint lists per position the sampled token first, then the ranked others. vLLM cuts that list after as many
entries as were asked for, so that a sampled token from outside the top k takes the place of rank k: one more is asked for
than is kept. A completion endpoint lists the top k and, besides, a sampled token from outside, as a mapping.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import msgspec
import numpy as np

from agrpo.errors import RolloutFailure
from agrpo.types import Ragged, Turn

_NO_NUMBER = re.compile(rb"[:\[,]\s*-?(NaN|Infinity)\b")  # what Python's json makes of such numbers
# JSON has no -inf; servers write this number, or a lower one, for a token that could not be sampled.
PLACEHOLDER = -9999.0


class Unsynced(RolloutFailure):
    """The tokens came from weights that the run did not send; passes as soon as the server has the run's."""

    drains, after_s = True, 0.0  # as of Retryable

    def __init__(self, text: str):
        super().__init__("unsynced", text)


class _Entry(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    top_logprobs: list[_Entry] = []


class _Sampled(msgspec.Struct, gc=False):
    """A `_Token` where no head was asked for: what is listed beside it is skipped unread."""

    token_id: int
    logprob: float


class _Content(msgspec.Struct):
    content: list[_Token]


class _SampledContent(msgspec.Struct):
    content: list[_Sampled]


class _Span(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class _TokenChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Content | None = None
    finish_reason: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[_Span] | None = None


class _TokenAnswer(msgspec.Struct):
    choices: list[_TokenChoice]


class _SampledChoice(_TokenChoice):
    logprobs: _SampledContent | None = None


class _SampledAnswer(msgspec.Struct):
    choices: list[_SampledChoice]


class _TextLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _TextChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _TextLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _TextAnswer(msgspec.Struct):
    choices: list[_TextChoice]


_tokens = msgspec.json.Decoder(_TokenAnswer)
_sampled = msgspec.json.Decoder(_SampledAnswer)
_text = msgspec.json.Decoder(_TextAnswer)


@dataclass(frozen=True, slots=True)
class Expected:
    """What was asked for, as the answer must show it."""

    prompt_ids: np.ndarray  # [p] int32
    num_heads: int  # K; 0 asks for the sampled token's log-prob only
    candidates: bool  # truncated sampling: every token needs its candidate set (SAMP-1)
    version: int  # weight version known when the request was sent (GEN-18)
    is_synced: bool = False  # a run has sent its weights to the server: tokens of any others are refused
    is_labelled: bool = False  # the server has named versions before: an answer without them is refused


def turn_of_tokens(body: bytes, expected: Expected) -> Turn:
    """The turn in an answer of `/inference/v1/generate`; RolloutFailure where the answer cannot be trained on."""
    choice = _only_choice(_decode(_tokens if expected.num_heads else _sampled, body).choices)
    content = choice.logprobs.content if choice.logprobs is not None else []
    output_ids = _output_ids(choice, len(content))
    if [t.token_id for t in content] != choice.token_ids:
        raise RolloutFailure("logprobs", "the log-probs are listed for other tokens than those generated")
    logprobs = np.array([t.logprob for t in content], np.float32)
    if expected.num_heads:
        listed = [t.top_logprobs for t in content]
        counts = np.array([len(entries) for entries in listed], np.int64)
        flat = list(itertools.chain.from_iterable(listed))
        ids = np.array([e.token_id for e in flat], np.int32)
        heads = ranked_heads(
            output_ids, counts, ids, np.array([e.logprob for e in flat], np.float32), expected.num_heads
        )
    else:
        heads = _no_heads(len(output_ids))
    return _turn(choice, expected, output_ids, logprobs, heads, choice.sampling_mask)


def turn_of_text(body: bytes, expected: Expected) -> Turn:
    """The turn in an answer of `/v1/completions` with `return_token_ids` and `return_tokens_as_token_ids`."""
    choice = _only_choice(_decode(_text, body).choices)
    listed = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    output_ids = _output_ids(choice, len(listed))
    logprobs = np.array([np.nan if v is None else v for v in listed], np.float32)
    if not expected.num_heads:
        return _turn(choice, expected, output_ids, logprobs, _no_heads(len(output_ids)), None)
    tops = (choice.logprobs.top_logprobs if choice.logprobs is not None else None) or []
    if len(tops) != len(output_ids):
        raise RolloutFailure("logprobs", f"{len(tops)} top log-prob lists for {len(output_ids)} tokens")
    counts = np.array([len(t or ()) for t in tops], np.int64)
    try:
        ids = np.array([int(key[key.rfind(":") + 1 :]) for t in tops for key in t or ()], np.int32)
    except ValueError as error:
        raise RolloutFailure("logprobs", "top log-probs are listed by text, not by token id") from error
    values = np.array([v for t in tops for v in (t or {}).values()], np.float32)
    heads = ranked_heads(output_ids, counts, ids, values, expected.num_heads)
    return _turn(choice, expected, output_ids, logprobs, heads, None)


def _decode(decoder: msgspec.json.Decoder, body: bytes):
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if "logprob" in str(error) or _NO_NUMBER.search(body):
            raise RolloutFailure("logprobs", f"a log-prob is missing or not a finite number: {error}") from error
        raise RolloutFailure("malformed", f"{error}; the answer begins {body[:200]!r}") from error


def _only_choice(choices: list):
    if len(choices) != 1:
        raise RolloutFailure("malformed", f"expected one choice, got {len(choices)}")
    if choices[0].finish_reason == "abort":
        raise RolloutFailure("aborted", "the server aborted the request")
    return choices[0]


def _output_ids(choice, num_logprobs: int) -> np.ndarray:
    if not choice.token_ids:
        raise RolloutFailure("empty", "the server generated no token")
    if num_logprobs != len(choice.token_ids):
        raise RolloutFailure("logprobs", f"{num_logprobs} log-probs for {len(choice.token_ids)} tokens")
    return np.array(choice.token_ids, np.int32)


def _no_heads(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((num_tokens, 0), np.int32), np.zeros((num_tokens, 0), np.float32)


def ranked_heads(
    output_ids: np.ndarray, counts: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, num_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Exactly the ranked top k per token, [T, K] ids and log-probs, padded with -inf (GEN-9).

    `ids` and `logprobs` hold the listed entries back to back, `counts[i]` of them for token i: the top k at least, and the
    sampled token, wherever it ranks. With K = 2, sampled 7 and the entries 7: -3.0, 5: -0.1, 4: -2.5 the head is 5, 4;
    with 7: -0.9, 5: -0.6 it is 5, 7.
    """
    if np.isnan(logprobs).any():
        raise RolloutFailure("logprobs", "a head log-prob is not a number")
    width = max(int(counts.max(initial=0)), num_heads)
    is_listed = np.arange(width) < counts[:, None]
    all_ids = np.zeros((len(output_ids), width), np.int32)
    all_logprobs = np.full((len(output_ids), width), -np.inf, np.float32)
    all_ids[is_listed] = ids
    all_logprobs[is_listed] = np.where(logprobs <= PLACEHOLDER, np.float32(-np.inf), logprobs)
    # Some servers list the sampled token, which is first, a second time in its place.
    is_repeated = all_ids == output_ids[:, None]
    is_repeated &= is_repeated.cumsum(axis=1) > 1
    all_logprobs[is_repeated & is_listed] = -np.inf
    order = np.argsort(-all_logprobs, axis=1, kind="stable")[:, :num_heads]
    return np.take_along_axis(all_ids, order, 1), np.take_along_axis(all_logprobs, order, 1)


def _turn(choice, expected: Expected, output_ids, logprobs, heads, masks: list[list[int]] | None) -> Turn:
    bad = ~np.isfinite(logprobs) | (logprobs <= PLACEHOLDER)
    if bad.any():
        at = int(np.argmax(bad))
        raise RolloutFailure("logprobs", f"token {at} of {len(logprobs)} has the log-prob {logprobs[at]}")
    versions, is_labelled = _versions(choice.weight_versions, len(output_ids), expected)
    return Turn(
        prompt_ids=expected.prompt_ids,
        output_ids=output_ids,
        sampler_logprobs=logprobs,
        output_mask=np.ones(len(output_ids), np.bool_),
        versions=versions,
        head_ids=heads[0],
        head_logprobs=heads[1],
        candidates=_candidates(masks, output_ids) if expected.candidates else None,
        finish_reason=choice.finish_reason or "stop",
        is_labelled=is_labelled,
    )


def _candidates(masks: list[list[int]] | None, output_ids: np.ndarray) -> Ragged:
    if masks is None:
        text = "the answer has no sampling_mask; start the server with --return-sampling-mask --enable-scale-out"
        raise RolloutFailure("candidates", text)
    if len(masks) != len(output_ids):
        raise RolloutFailure("candidates", f"{len(masks)} candidate sets for {len(output_ids)} tokens")
    candidates = Ragged.of(masks)
    lengths = np.diff(candidates.offsets)
    if (lengths == 0).any():
        raise RolloutFailure("candidates", f"token {int(np.argmin(lengths))} has an empty candidate set")
    found = np.add.reduceat(candidates.values == np.repeat(output_ids, lengths), candidates.offsets[:-1])
    if (found == 0).any():
        raise RolloutFailure("candidates", f"token {int(np.argmin(found))} is not in its own candidate set")
    return candidates


def _versions(spans: list[_Span] | None, num_tokens: int, expected: Expected) -> tuple[np.ndarray, bool]:
    """Per token the version of its span, and whether there is one; else the version known at sending (GEN-18).

    A server that labels its tokens names a version once a sync of the run is complete, and something else before. So a
    label that is no version, after the run's first sync or after a label that was one, means a server that was started
    again and has not been given the run's weights yet: what it says must not be trained as if it came from them.
    """
    versions, is_labelled = np.full(num_tokens, expected.version, np.int32), False
    for span in spans or ():
        if str(span.version).isdecimal():
            versions[max(span.start, 0) : span.end], is_labelled = int(span.version), True
        elif expected.is_synced or expected.is_labelled:
            text = f"the server answered with weights labelled {span.version!r}, which this run did not send"
            raise Unsynced(text)
    if expected.is_labelled and not is_labelled:
        raise Unsynced("the server answered without the version of its weights, which it named before")
    return versions, is_labelled
