"""The engine's thread: admit, forward, draw, deliver; and between two steps whatever the HTTP side asks for.

    HTTP handlers --submit, call--> [queue] --> step: place new | forward all | draw | finish --on_done--> handlers

Everything that touches the model, the cache or a request runs in this one thread, so a pause, a weight update or an
abort never meets a forward half way. A caller of `call` owns its wait; the thread itself waits only while idle.
Requests that do not fit the cache wait; one that outgrows it preempts the youngest, which is computed again later.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from agrpo.serve.request import Request
from agrpo.serve.runner import Runner
from agrpo.serve.sampling import draw
from agrpo.serve.weights import Weights

log = logging.getLogger(__name__)

UNLABELLED = "default"  # vLLM's word for the weights that a server starts with
_IDLE_S = 0.2  # how long an idle engine sleeps between two signs of life
_PREFILL_TOKENS = 4096  # prompt tokens per step; bounds activations, and how long running requests are held up


class Engine:
    """Continuous batching over one model. `submit` and `call` may be used from any thread."""

    def __init__(self, runner: Runner, weights: Weights, max_num_seqs: int, beat: Callable[[str], None]):
        self.runner, self.weights = runner, weights
        self.version: str | None = UNLABELLED  # of the weights; None while they are neither the old nor the new ones
        self._max_num_seqs, self._beat = max_num_seqs, beat
        self._waiting: deque[Request] = deque()
        self._held: list[Request] = []  # arrived while draining; admitted after the resume
        self._paused = self._draining = False
        self._drained: list[Future] = []
        self._commands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._wake, self._stopping = threading.Condition(), False
        self.num_preemptions = self.num_prompt_tokens = self.num_output_tokens = 0
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def call(self, command: Callable[[], Any]) -> Future:
        """Run `command` in the engine's thread between two steps."""
        future: Future = Future()
        with self._wake:
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def submit(self, request: Request) -> None:
        self.call(lambda: (self._held if self._draining else self._waiting).append(request))

    # --- commands: run these through `call`

    def pause(self, mode: str, clear_cache: bool) -> Future:
        """Stop generating; the future resolves when nothing moves any more (SYNC-3, SYNC-13)."""
        future: Future = Future()
        future.set_running_or_notify_cancel()  # a caller that goes away must not make the result an error
        self._paused = True
        if mode == "wait" and self._unfinished():
            self._draining = True
            self._drained.append(future)
            return future
        self._end_drain()  # a pause that freezes also ends the wait of an earlier one
        if mode == "abort":
            self.abort({id(r) for r in self._unfinished()})
        if clear_cache:
            self._preempt(self._running())
        future.set_result(None)
        return future

    def resume(self) -> None:
        self._paused = False
        self._end_drain()

    def abort(self, requests: set[int]) -> int:
        """End the requests with these `id()`s now, keeping what they produced; how many there were."""
        chosen = [r for r in [*self._unfinished(), *self._held] if id(r) in requests]
        for request in chosen:
            request.finish_reason = "abort"
        self._waiting = deque(r for r in self._waiting if r.finish_reason is None)
        self._held = [r for r in self._held if r.finish_reason is None]
        self._finish(chosen)
        return len(chosen)

    def abort_ids(self, request_ids: set[str]) -> int:
        return self.abort({id(r) for r in [*self._unfinished(), *self._held] if r.request_id in request_ids})

    def update_weights(self, update_info: dict) -> int:
        """Receive tensors now, between two steps."""
        return self._writing(lambda beat: self.weights.update(update_info, beat))

    def reload_weights(self, folder: str) -> int:
        return self._writing(lambda beat: self.weights.reload(folder, beat))

    def finish_update(self, version: str | None) -> None:
        self.weights.finish()
        self.version = version

    def _writing(self, load: Callable[[Callable[[], None]], int]) -> int:
        """Run a load; once a tensor is written, tokens no longer carry the version of the old weights."""
        written = self.weights.num_written
        try:
            return load(lambda: self._beat("receiving weights"))
        finally:
            if self.weights.num_written > written:
                self.version = None

    def set_version(self, version: str) -> None:
        self.version = version

    # --- readings, from any thread

    @property
    def is_paused(self) -> bool:
        return self._paused

    def counts(self) -> dict[str, float]:
        cache, running = self.runner.cache, self._running()
        return {
            "running": len(running),
            "waiting": len(self._waiting) + len(self._held),
            "usage": min(1.0, cache.used_tokens / cache.num_tokens),
        }

    # --- the loop

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._execute_commands()
                    if self._is_runnable():
                        self._step()
                    else:
                        with self._wake:
                            if not self._commands and not self._stopping:
                                self._wake.wait(_IDLE_S)
                    self._beat("paused" if self._paused else "serving")
        except BaseException as error:
            log.exception("the engine stopped")
            self.failure = error
            self.on_failure()

    def _execute_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except Exception as error:  # the caller's: a refused update is not the end of the server
                future.set_exception(error)

    def _is_runnable(self) -> bool:
        if self._draining and not self._unfinished():
            self._end_drain()
        if self._paused and not self._draining:
            return False
        return bool(self._waiting or self.runner.cache.active)

    def _step(self) -> None:
        self._make_room()
        new = self._admit()
        requests, logits = self.runner.forward(new)
        if not requests:
            return
        params, positions = [r.params for r in requests], [len(r.output_ids) for r in requests]
        draws = draw(logits, params, positions)
        self.num_output_tokens += len(requests)
        finished = []
        for row, request in enumerate(requests):
            request.emit(draws, row, self.version)
            if draws.logprobs[row] != draws.logprobs[row]:
                request.finish_reason = "error"
                request.error = "the model's logits are not finite"
                request.pool.clean(request)
            if request.finish_reason is not None:
                finished.append(request)
        self._finish(finished)

    def _make_room(self) -> None:
        """Move requests whose slot is full; without room, preempt the youngest request."""
        for request in [r for r in self._running() if r.length > r.pool.capacity]:
            while request.pool is not None and not self.runner.cache.move(request):
                youngest = max((r for p in self.runner.cache.active for r in p.requests), key=lambda r: r.order)
                self._preempt([youngest])

    def _admit(self) -> list[list[Request]]:
        """Place waiting requests in order; those with equal contexts are computed once."""
        siblings: dict[tuple, list[Request]] = {}
        budget, free = _PREFILL_TOKENS, self._max_num_seqs - len(self._running())
        while self._waiting and free > 0:
            request = self._waiting[0]
            key = (id(request.adapter), *request.prompt_ids, -1, *request.output_ids)
            cost = 0 if key in siblings else request.length
            if cost > budget and siblings:
                break
            if not self.runner.cache.place(request, request.length):
                break
            self._waiting.popleft()
            budget, free = budget - cost, free - 1
            siblings.setdefault(key, []).append(request)
            self.num_prompt_tokens += request.length
        return list(siblings.values())

    def _running(self) -> list[Request]:
        return [r for p in self.runner.cache.pools for r in p.requests]

    def _unfinished(self) -> list[Request]:
        return [*self._running(), *self._waiting]

    def _preempt(self, requests: list[Request]) -> None:
        """Take requests off the cache; their contexts are computed again, before anything that waits."""
        for request in sorted(requests, key=lambda r: -r.order):
            self.runner.cache.release(request)
            request.states.clear()
            self._waiting.appendleft(request)
        self.num_preemptions += len(requests)

    def _finish(self, requests: list[Request]) -> None:
        for request in requests:
            if request.pool is not None:
                self.runner.cache.release(request)
        for request in requests:
            request.on_done(request)

    def _end_drain(self) -> None:
        self._draining = False
        self._waiting.extend(self._held)
        self._held = []
        drained, self._drained = self._drained, []
        for future in drained:
            future.set_result(None)
