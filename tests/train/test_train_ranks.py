"""Work for the ranks: exact shares of the loss, and a round trip of rows through the message between ranks."""

import dataclasses

import numpy as np
import pytest

from agrpo.model.terms import sequence_row
from agrpo.train.ranks import IDLE, Work, decode_work, divide, encode_work
from agrpo.train.shares import Sharing
from agrpo.types import Microbatch, Ragged, Row, Step


def row_of(num_terms: int, candidates: bool = False) -> Row:
    row = sequence_row(np.arange(num_terms + 1) % 7)
    sets = Ragged.of([list(range(i % 4)) for i in range(num_terms)]) if candidates else None
    return dataclasses.replace(row, candidates=sets)


def test_the_documents_example_of_normalization():
    # LOSS-18: 100 tokens of loss 2.0 and 900 of 0.5 are 0.65 per step and 1.25 as mean of microbatch means.
    step = Step(3, (Microbatch((row_of(100),)), Microbatch((row_of(900),))))
    sums = (100 * 2.0, 900 * 0.5)
    for by_microbatch, expected in ((False, 0.65), (True, 1.25)):
        (work,) = divide(step, Sharing(by_microbatch=by_microbatch))
        assert sum(s * share[0] for s, share in zip(sums, work.shares, strict=True)) == pytest.approx(expected)


def test_each_rank_gets_its_rows_and_the_shares_of_the_whole_step():
    step = Step(5, (Microbatch((row_of(3), row_of(5))), Microbatch((row_of(7), row_of(11)))))
    first, second = divide(step, Sharing())
    assert [r.num_trained_tokens for r in first.rows] == [3, 7]
    assert [r.num_trained_tokens for r in second.rows] == [5, 11]
    assert [float(s[0]) for work in (first, second) for s in work.shares] == pytest.approx([1 / 26] * 4)


def test_every_aggregation_by_hand():
    """Prompt 0 with samples of 1 and 3 trained tokens in different rows, prompt 1 with one of 4 tokens."""
    mixed = dataclasses.replace(
        row_of(5),
        sample_index=np.array([0, 1, 1, 1, 1], np.int32),
        group_ids=np.array([0, 1]),
        sample_tokens=np.array([2, 5], np.int32),
    )
    step = Step(1, (Microbatch((mixed,)), Microbatch((row_of(3),))))
    expected = {
        "token": [1 / 8, 1 / 8, 1 / 8],
        "sequence": [1 / 3, 1 / 12, 1 / 9],
        "prompt": [1 / 8, 1 / 8, 1 / 8],
        "constant": [1 / 21, 1 / 21, 1 / 21],
    }
    for aggregation, shares in expected.items():
        (work,) = divide(step, Sharing(aggregation, length=7))
        assert np.concatenate(work.shares).tolist() == pytest.approx(shares), aggregation
    # By microbatch: means over tokens of each, then over the two.
    (work,) = divide(step, Sharing("prompt", by_microbatch=True))
    assert np.concatenate(work.shares).tolist() == pytest.approx([1 / 4, 1 / 16, 1 / 6])
    (work,) = divide(step, Sharing("sequence", num_updates=2))
    assert np.concatenate(work.shares).tolist() == pytest.approx([1 / 2, 1 / 8, 1 / 3])
    assert work.num_updates == 2


def test_round_trip():
    shares = (np.array([0.25], np.float32), np.array([0.5], np.float32))
    work = Work("step", 7, (row_of(3), row_of(5, candidates=True)), shares, num_updates=2)
    again = decode_work(encode_work(work))
    assert (again.kind, again.index, again.num_updates) == ("step", 7, 2)
    assert [s.tolist() for s in again.shares] == [[0.25], [0.5]]
    for a, b in zip(work.rows, again.rows, strict=True):
        for field in dataclasses.fields(Row):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
            elif isinstance(x, Ragged):
                assert [list(v) for v in x] == [list(v) for v in y]
            else:
                assert x == y
    assert decode_work(encode_work(IDLE)) == IDLE
