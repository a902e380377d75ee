"""The one order of every weight sync, and what a failure leaves behind (SYNC-3, SYNC-10 to SYNC-12).

    all ranks:  barrier ......... gather every tensor ............ agree
    rank 0:     pause   start  ->  send one after the other  ->  end    finish(version), resume    agree

Rank 0 keeps gathering after its own failure, since gathering is collective; then all ranks raise the same text.
`finish` never follows a failed transfer. A failure before the first byte resumes the server; after it the server stays
paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]

MIB = 1024 * 1024
# Receiver for vLLM, a folder for PYTHONPATH: holds nothing of this environment but the plug-in and its entry point.
PLUGIN = Path(__file__).parent / "vllm_plugin"
PARTIAL = "the server holds partial weights and stays paused; a new run sends all weights and repairs it"
COMPLETE = "all weights arrived, but the server stays paused; a new run resumes it"
UNTOUCHED = "no weight was changed and the server goes on with the ones it had"


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Seconds of one sync; the parts are disjoint, so their sum is at most the total (SYNC-15)."""

    total_s: float
    pause_s: float
    barrier_s: float
    transfer_s: float


class Transport(Protocol):
    """How tensors reach the servers; lives on rank 0 only. Methods raise on failure and keep the time limit."""

    has_sent: bool  # since `start`: the server's weights may have changed
    found_paused: bool  # the server was paused before this sync: it may hold what a sender that died left there

    def connect(self) -> None: ...  # before our pause; does nothing if connected

    def start(self, version: int) -> None: ...

    def send(self, name: str, tensor: torch.Tensor) -> None: ...  # a full tensor; may be kept back

    def end(self) -> None: ...  # the server now holds every tensor

    def finish(self, version: int) -> None: ...

    def close(self) -> None: ...


class Session:
    """The sender of one trainer rank. `transport` is None on ranks other than 0."""

    def __init__(
        self,
        server: ServerControl,
        transport: Transport | None,
        *,
        world_size: int,
        cache: str,
        verify_every: int,
    ):
        self.server, self.transport, self.world_size = server, transport, world_size
        self.clear_cache, self.verify_every = cache == "reset", verify_every
        self.num_syncs = 0
        self._paused_by_us = self._is_complete = False

    @property
    def needs_proof(self) -> bool:
        """True after a sync whose arrival must be proven: the first, and every `verify_every`-th (SYNC-16)."""
        return is_proof_due(self.num_syncs, self.verify_every)

    def send(self, tensors: Iterable[Named], version: int, barrier: Callable[[], None]) -> SyncTimes:
        """Make the servers equal to `tensors` under the label `version`; all ranks call it together."""
        began = time.monotonic()
        failure = self._attempt("pause", version, self._prepare)
        paused = time.monotonic()
        barrier()
        met = time.monotonic()
        failure = self._transfer(tensors, version, failure)
        self._agree(failure)
        moved = time.monotonic()
        failure = self._attempt("finish", version, lambda: self._complete(version))
        self._agree(failure)
        self.num_syncs += 1
        return SyncTimes(time.monotonic() - began, paused - began, met - paused, moved - met)

    def reset(self) -> None:
        """Forget the connection, so that the next sync reaches a server that was restarted."""
        self.num_syncs = 0
        if self.transport is not None:
            self.transport.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _prepare(self) -> None:
        assert self.transport is not None
        self.transport.has_sent = self._paused_by_us = self._is_complete = False
        found_paused = self.transport.found_paused = self.server.is_paused()
        self.transport.connect()
        # A server found paused holds what a crashed run left there: only a complete sync may wake it (SRV-14).
        self._paused_by_us = not found_paused
        # What a server computed before it ever had these weights is of no use to anyone.
        self.server.pause(self.clear_cache or self.num_syncs == 0)

    def _transfer(self, tensors: Iterable[Named], version: int, failure: str | None) -> str | None:
        if self.transport is None:
            for _ in tensors:
                pass
            return None
        if failure is None:
            failure = self._attempt("start", version, lambda: self.transport.start(version))
        try:
            for name, tensor in tensors:
                if failure is None:
                    send = partial(self.transport.send, name, tensor)
                    failure = self._attempt("transfer", version, send)
                    del send  # or the tensor would outlive the gathering of the next one
                del tensor
        except BaseException:
            self._abandon()  # gathering itself failed; leave the server as the rules say, then let the error travel
            raise
        return failure or self._attempt("transfer", version, self.transport.end)

    def _complete(self, version: int) -> None:
        assert self.transport is not None
        self.transport.finish(version)
        self._is_complete = True
        self.server.resume()

    def _attempt(self, phase: str, version: int, action: Callable[[], None]) -> str | None:
        """Run one phase on rank 0; a failure becomes the text that all ranks will raise."""
        if self.transport is None:
            return None
        try:
            action()
            return None
        except Exception as error:
            cause = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
            return f"weight sync of version {version} failed at {phase}: {cause}; {self._abandon()}"

    def _abandon(self) -> str:
        """Leave the server in the right state after a failure and say which that is (SYNC-12)."""
        assert self.transport is not None
        self.transport.close()
        if self.transport.has_sent:
            return COMPLETE if self._is_complete else PARTIAL
        if not self._paused_by_us:
            return "no weight was changed"
        try:
            self.server.resume()
        except ServerError as error:
            return f"no weight was changed, but resuming the server failed too: {error}"
        return UNTOUCHED

    def _agree(self, failure: str | None) -> None:
        """Raise the failure of rank 0 on every rank, so that none waits for another (SYNC-10)."""
        failure = of_rank_0(failure, self.world_size)
        if failure is not None:
            raise ServerError(failure)


def of_rank_0(value: Any, world_size: int) -> Any:
    """Rank 0's value on every rank; collective."""
    if world_size == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def is_proof_due(num_syncs: int, verify_every: int) -> bool:
    """After the first sync, and after every `verify_every`-th (0 = only the first)."""
    return num_syncs == 1 or (num_syncs > 0 and verify_every > 0 and num_syncs % verify_every == 0)
