"""How long the prompts of a data set are, near enough to say which leave no room for a completion (SRV-11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from agrpo.data.rows import gives_prompts
from agrpo.errors import StallError
from agrpo.launch.watchdog import LOADING_S
from agrpo.serve.check.identity import load_tokens
from agrpo.serve.check.look import Affected, LongPrompts

MOST_ROWS = 20_000  # of a larger data set, so many are looked at, evenly spread
PER_PROMPT, PER_MESSAGE = 64, 8  # tokens that a chat template adds, about


def long_prompts(config: Any) -> LongPrompts | None:
    """Counts the prompts longer than a given room; None for streams and for data that an environment makes."""
    if gives_prompts(config):
        return None
    rows = config.data.open(needs_prompt=True)
    if not hasattr(rows, "__len__"):
        return None
    step = max(1, -(-len(rows) // MOST_ROWS))
    texts = [_texts(rows[index]) for index in range(0, len(rows), step)]
    tokens = load_tokens(config)

    def count(room: int) -> Affected | None:
        lengths = []
        for parts in texts:
            # A token is at least one byte, so most prompts need no tokenizer.
            length = PER_PROMPT + sum(PER_MESSAGE + len(part.encode()) for part in parts)
            if length > room and tokens is not None:
                length = PER_PROMPT + sum(PER_MESSAGE + len(tokens.encode(part).ids) for part in parts)
            elif length > room:
                return None
            lengths.append(length)
        return Affected(sum(length > room for length in lengths), len(lengths), max(lengths, default=0))

    return count


class Reading:
    """`long_prompts` in a thread of its own, begun at once: reading or fetching data may take minutes, in which signals and
    dead processes must still be heard."""

    def __init__(self, config: Any):
        self._found: list[LongPrompts | None] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(config,), name="data", daemon=True)
        self._thread.start()

    def _read(self, config: Any) -> None:
        try:
            self._found.append(long_prompts(config))
        except BaseException as error:
            self._error = error

    def result(self, tell: Callable[[str], None], look_around: Callable[[], None]) -> LongPrompts | None:
        """What was found, at most LOADING_S seconds from now; raises what reading raised. `look_around` may raise."""
        began, is_told = time.monotonic(), False
        self._thread.join(0.2)  # most are read while the server starts
        while self._thread.is_alive():
            tell("reading")
            is_told = True
            look_around()
            if time.monotonic() > began + LOADING_S:
                raise StallError(f"the data were not read within {LOADING_S:.0f} s; from a local disk they are read faster")
            self._thread.join(0.2)
        if is_told:
            tell("read")
        if self._error is not None:
            raise self._error
        return self._found[0]


def _texts(row: dict[str, Any]) -> list[str]:
    """The messages of a row, as text."""
    prompt = row.get("prompt", "")
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    return [str(message.get("content", "")) for message in messages if isinstance(message, dict)]
