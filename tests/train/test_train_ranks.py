"""Work for the ranks: exact denominators, and a round trip of rows through the message between ranks."""

import dataclasses

import numpy as np
import pytest

from agrpo.model.terms import sequence_row
from agrpo.train.ranks import IDLE, Work, decode_work, divide, encode_work
from agrpo.types import Microbatch, Ragged, Row, Step


def row_of(num_terms: int, candidates: bool = False) -> Row:
    row = sequence_row(np.arange(num_terms + 1) % 7)
    sets = Ragged.of([list(range(i % 4)) for i in range(num_terms)]) if candidates else None
    return dataclasses.replace(row, candidates=sets)


def test_the_documents_example_of_normalization():
    # LOSS-18: 100 tokens of loss 2.0 and 900 of 0.5 are 0.65 per step and 1.25 as mean of microbatch means.
    step = Step(3, (Microbatch((row_of(100),)), Microbatch((row_of(900),))))
    sums = (100 * 2.0, 900 * 0.5)
    for normalization, expected in (("step", 0.65), ("microbatch", 1.25)):
        (work,) = divide(step, normalization)
        assert sum(s / d for s, d in zip(sums, work.denominators, strict=True)) == pytest.approx(expected)


def test_each_rank_gets_its_rows_and_the_denominator_of_all():
    step = Step(5, (Microbatch((row_of(3), row_of(5))), Microbatch((row_of(7), row_of(11)))))
    first, second = divide(step, "step")
    assert [r.num_trained_tokens for r in first.rows] == [3, 7]
    assert [r.num_trained_tokens for r in second.rows] == [5, 11]
    assert first.denominators == second.denominators == (26.0, 26.0)


def test_round_trip():
    work = Work("step", 7, (2.0, 3.0), (row_of(3), row_of(5, candidates=True)))
    again = decode_work(encode_work(work))
    assert (again.kind, again.index, again.denominators) == ("step", 7, (2.0, 3.0))
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
