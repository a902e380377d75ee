"""Errors that end a run, each with its exit code (CLI-11). One line of text per problem, written for the user."""

from __future__ import annotations

from collections.abc import Sequence


class AgrpoError(Exception):
    """An error that ends the run; `exit_code` is what `agrpo` returns to the shell."""

    exit_code = 1
    is_consequence = False  # of another process's end, whose reason is that of the run
    is_expiry = False  # of a wait: what everybody was doing then is worth keeping


class ConfigError(AgrpoError):
    """The configuration is refused (exit code 3); `problems` holds one line each, reported together (CLI-4)."""

    exit_code = 3

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ServerError(AgrpoError):
    """The server, the host, or the failure rate of rollouts ended the run (exit code 4)."""

    exit_code = 4


class ContractError(AgrpoError):
    """User code broke its contract deterministically: wrong type, length or value (exit code 5); never retried."""

    exit_code = 5


class StallError(AgrpoError):
    """A wait reached its deadline (exit code 6); the text says what was awaited and since when."""

    exit_code = 6
    is_expiry = True


class RolloutFailure(Exception):
    """One rollout failed with a typed reason; the run goes on (GEN-13). `reason` is a metric-safe word."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text
