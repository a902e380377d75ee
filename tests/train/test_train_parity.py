"""The split of the log-prob gap by cause, by hand."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from agrpo.errors import ServerError
from agrpo.metrics.window import Window
from agrpo.train.parity import ParityProbe


def terms(trainer, sampler, versions, head_sampler=None, head_trainer=None, candidate_counts=None):
    count = len(trainer)
    return SimpleNamespace(
        trainer_logprobs=torch.tensor(trainer),
        sampler_logprobs=torch.tensor(sampler),
        versions=torch.tensor(versions),
        head_sampler_logprobs=torch.tensor(head_sampler) if head_sampler else torch.zeros(count, 0),
        head_trainer_logprobs=torch.tensor(head_trainer) if head_trainer else torch.zeros(count, 0),
        candidate_counts=candidate_counts,
    )


def recorded(probe) -> dict:
    window = Window(strict=True)
    probe.record(window)
    probe.judge(3)
    return window.record(3)


def probe_of(is_truncated=False, warn=None, stop=None) -> ParityProbe:
    return ParityProbe(torch.device("cpu"), is_truncated=is_truncated, warn=warn, stop=stop)


def test_fresh_tokens_show_the_engines_and_older_ones_what_is_added():
    probe = probe_of()
    # Age 0: gaps 0.25 and 0.75, mean 0.5. Older: 1.0 and 2.0, mean 1.5, of which 0.5 is the engines'.
    probe.add(terms([-1.0, -2.0, -3.0, -5.0], [-1.25, -1.25, -4.0, -3.0], [7, 7, 6, 5]), 7)
    record = recorded(probe)
    assert record["parity/engine_gap"] == pytest.approx(0.5)
    assert record["parity/staleness_gap"] == pytest.approx(1.0)
    assert "parity/truncation_gap" not in record
    assert not any(name.startswith("parity/") for name in recorded(probe)), "a record starts again"


def test_no_token_is_fresh_while_updates_are_not_sent():
    probe = probe_of(stop=1e-9)
    probe.add(terms([-1.0], [-2.0], [7]), None)
    assert "parity/engine_gap" not in recorded(probe)


def test_truncation_without_candidate_sets_is_taken_out_where_the_head_covers_the_set():
    # The trainer gives the two kept tokens 0.5 and 0.3; the sampler renormalised them to 5/8 and 3/8.
    log = math.log
    probe = probe_of(is_truncated=True)
    probe.add(
        terms(
            [log(0.5), -1.0],
            [log(5 / 8), -3.0],
            [4, 4],
            head_sampler=[[log(5 / 8), log(3 / 8), -torch.inf], [log(0.5), log(0.2), log(0.1)]],
            head_trainer=[[log(0.5), log(0.3), log(0.1)], [log(0.4), log(0.2), log(0.1)]],
        ),
        4,
    )
    record = recorded(probe)
    assert record["parity/engine_gap"] == pytest.approx(0.0, abs=1e-6), "the second token's set is not known"
    assert record["parity/truncation_gap"] == pytest.approx(-log(0.8), rel=1e-6)


def test_a_gap_above_the_limits_warns_once_and_then_ends_the_run(caplog):
    probe = probe_of(warn=0.1, stop=0.5)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            probe.add(terms([-1.0], [-1.2], [4]), 4)
            recorded(probe)
    assert len(caplog.records) == 1 and "parity_warn=0.1" in caplog.text
    probe.add(terms([-1.0], [-1.6], [4]), 4)
    with pytest.raises(ServerError, match=r"disagree by 0.6 nats.*parity_stop=0.5"):
        recorded(probe)
