"""Generation: every way in which a server or the network to it fails a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from functools import partial
from pathlib import Path

import numpy as np

from agrpo.metrics.window import Window
from agrpo.sampler.vllm import Vllm
from tests.fault_proxy import Proxy, fault_proxy
from tests.faults.table import Fault
from tests.stub_server import stub_server

PROMPT = np.arange(2, 13, dtype=np.int32)
MAY_PASS = ("500", "502", "429", "reset", "truncated", "malformed", "nothing", "list")
FINAL = {
    "400": "rejected", "404": "rejected", "too_long": "prompt_too_long", "logprobs": "logprobs", "nan": "logprobs",
    "nan_head": "logprobs", "infinity": "logprobs", "null": "logprobs", "abort": "aborted", "empty": "empty",
}  # fmt: skip


def ask(url: str, timeout_s: float = 5.0, before=lambda: None) -> str:
    """One request of one rollout."""
    window = Window()

    async def work() -> int:
        sampler = Vllm(num_sampler_logprobs=3, max_retries=2)
        async with await sampler.connect(
            (url,), None, 42, lambda: 1, timeout_s, 8, True, window, retry_wait_s=0.01
        ) as client:
            before()
            return len((await client.generate(PROMPT, (0, 0, 0))).output_ids)

    num_tokens = asyncio.run(work())
    assert num_tokens == 7
    return "answered" if not window.total("rollout/vllm_retry_count") else "answered when asked again"


def spoilt(plan: list[str], timeout_s: float, folder: Path) -> str:
    with served() as url, fault_proxy(url, plan) as proxy:
        return ask(proxy.url, timeout_s)


def gone(returns_after_s: float | None, timeout_s: float, folder: Path) -> str:
    """Connections are refused; after a while they are not."""
    with served() as url, fault_proxy(url) as proxy:
        return ask(proxy.url, timeout_s, lambda: _shut(proxy, returns_after_s))


def _shut(proxy: Proxy, returns_after_s: float | None) -> None:
    import threading

    proxy.shut()
    if returns_after_s is not None:
        threading.Timer(returns_after_s, proxy.open).start()


def restarted(folder: Path) -> str:
    """It answers from the weights that it was started with until the run's arrive."""
    import threading

    with served() as url, fault_proxy(url) as proxy:

        async def work() -> set[int]:
            sampler = Vllm(num_sampler_logprobs=3)
            async with await sampler.connect(
                (proxy.url,), None, 42, lambda: 1, 10.0, 8, True, Window(), retry_wait_s=0.01
            ) as client:
                await client.generate(PROMPT, (0, 0, 0))
                proxy.label = "default"
                threading.Timer(0.5, lambda: setattr(proxy, "label", "6")).start()
                return set((await client.generate(PROMPT, (1, 0, 0))).versions.tolist())

        return "answered with the run's weights" if asyncio.run(work()) == {6} else "answered with foreign weights"


def black_hole(folder: Path) -> str:
    """The network swallows every packet: a listener whose queue is full answers no connection."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.1)
        return ask(f"http://127.0.0.1:{port}", 1.0)


def served() -> contextlib.AbstractContextManager[str]:
    """One stub for all faults; its answers are spoilt on the way."""
    return contextlib.nullcontext(_stub[0][1])


_stub: list[tuple[contextlib.ExitStack, str]] = []


def start() -> None:
    """From the main thread: the stub dies with the thread that started it."""
    stack = contextlib.ExitStack()
    _stub.append((stack, stack.enter_context(stub_server(tokens=7, heads=3, bodies=3))))


def close() -> None:
    while _stub:
        _stub.pop()[0].close()


FAULTS = [
    *(Fault("server", f"answers once: {k}", "answered when asked again", partial(spoilt, [k], 5.0)) for k in MAY_PASS),
    *(Fault("server", f"answers always: {k}", "rollout set aside: " + r, partial(spoilt, [k + "!"], 5.0), r"\(3 tries\)")
      for k, r in (("500", "unavailable"), ("reset", "connection"), ("malformed", "malformed"))),
    *(Fault("server", f"answers {k}", "rollout set aside: " + r, partial(spoilt, [k], 5.0)) for k, r in FINAL.items()),
    Fault("server", "hangs once", "answered when asked again", partial(spoilt, ["hang"], 0.5)),
    Fault("server", "hangs for ever", "rollout set aside: timeout", partial(spoilt, ["hang!"], 0.3), r"server\.timeout"),
    Fault("network", "drips byte by byte", "rollout set aside: timeout", partial(spoilt, ["drip!"], 0.3), r"server\.timeout"),
    Fault("network", "refuses for a second", "answered when asked again", partial(gone, 1.0, 10.0)),
    Fault("network", "refuses for ever", "rollout set aside: connection", partial(gone, None, 0.5), r"server\.timeout"),
    Fault("network", "swallows every packet", "exit code 4", black_hole, "127.0.0.1"),
    Fault("server", "restarted without the run's weights", "answered with the run's weights", restarted),
]  # fmt: skip
