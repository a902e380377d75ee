"""Prints the table of the faults that were injected, wherever they ran."""

from tests.faults.table import Fault, Outcome, lines


def pytest_terminal_summary(terminalreporter):
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when == "call"]
    found = [value for r in reports for name, value in r.user_properties if name == "fault"]
    if found:
        outcomes = [Outcome(Fault(where, what, expected, len), happened, s) for where, what, expected, happened, s in found]
        terminalreporter.section("faults")
        terminalreporter.write("\n".join(lines(outcomes)) + "\n")
