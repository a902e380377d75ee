"""Each injected fault ends in time in a recovery or in a named end. The table is printed at the end."""

import pytest

from tests.faults import all as suite
from tests.faults.table import inject

FAULTS = [fault for fault in suite.FAULTS if fault.is_in_suite or not fault.is_whole]


@pytest.fixture(scope="module", autouse=True)
def shared():
    suite.start()
    yield
    suite.close()


def test_there_are_enough_and_no_two_are_the_same():
    names = [fault.name for fault in suite.FAULTS]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault(fault, tmp_path, record_property):
    outcome = inject(fault, tmp_path)
    record_property("fault", (fault.where, fault.what, fault.expected, outcome.happened, round(outcome.seconds, 1)))
    assert outcome.happened == fault.expected
