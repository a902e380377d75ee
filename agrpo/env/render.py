"""Messages -> token ids by the chat template; of a growing conversation only what is new, where that is proven to be equal.

    [user]                         -> p p p            prompt of the first turn
    [user, assistant, tool]        -> p p p a a t t    only `a a t t` is rendered and tokenised

The tokens of a later prompt are those of the whole conversation rendered anew, never those that were sampled: where the
two differ, the turn is a fork (TURN-2). What is proven once, at the start, is that the template renders a message the
same whatever follows it, and that tokens never reach over the border between two turns (TURN-13).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
COMPARED_PROMPTS = 3
USER = {"role": "user", "content": "What is it?"}


class Renderer:
    """The chat template with one set of tools. Holds nothing of a conversation."""

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any] | None = None,
        schemas: list[dict[str, Any]] | None = None,
        template: str | None = None,
    ):
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})
        self.schemas = schemas or None
        if template is not None:
            self._kwargs["chat_template"] = template
        self._writes_arguments = False  # the template wants the arguments of a call as text
        self._special_ids = frozenset(getattr(tokenizer, "all_special_ids", ())) | frozenset(
            getattr(tokenizer, "added_tokens_decoder", {})
        )
        self._bases: dict[bool, tuple[Messages, str]] = {}
        self._grows: dict[bool, bool] = {}  # with tool results only / with later user messages -> proven
        self.compared: dict[tuple[str, ...], int] = {}  # roles a conversation starts with -> comparisons with the whole

    def ids(self, messages: Messages) -> np.ndarray:
        """Token ids [p] int32 of the whole conversation with the generation prompt (TURN-1)."""
        ids = self._apply(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        return np.asarray(ids, np.int32)

    def text(self, messages: Messages, generation_prompt: bool) -> str:
        """What the template writes for a conversation."""
        return self._apply(messages, tokenize=False, add_generation_prompt=generation_prompt)

    def _apply(self, messages: Messages, **how: Any) -> Any:
        if self.schemas is not None:
            how["tools"] = self.schemas
        return self._tokenizer.apply_chat_template(self._as_template_wants(messages), **how, **self._kwargs)

    def tokens(self, text: str) -> np.ndarray:
        """Token ids [n] int32 of text that the template wrote."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)

    def _as_template_wants(self, messages: Messages) -> Messages:
        return [_with_text_arguments(m) for m in messages] if self._writes_arguments else messages

    # What the template can do

    def supports_tools(self) -> bool:
        """The schemas change what the model reads (TOOL-3)."""
        bare = Renderer(self._tokenizer, self._kwargs)
        return not np.array_equal(self.ids([USER]), bare.ids([USER]))

    def keeps_history(self, rounds: int = 1) -> bool:
        """Appending a tool result leaves the tokens before it as they were (TURN-10); ValueError if none can be rendered."""
        conversation = [USER, *(m for n in range(rounds) for m in probe_round(n))]
        before, after = conversation[:-1], conversation
        for self._writes_arguments in (False, True):
            try:
                first, second = (self.tokens(self.text(m, False)) for m in (before, after))
            except Exception as error:
                reason = error
                continue
            return np.array_equal(first, second[: len(first)])
        raise ValueError(f"{type(reason).__name__}: {reason}")

    def learn_arguments(self) -> None:
        """Find out whether the template takes the arguments of a call as a mapping or as text."""
        with contextlib.suppress(ValueError):
            self.keeps_history()

    def grows(self, with_users: bool = False) -> bool:
        """Proven, once: rendering only what is new gives the tokens of the whole conversation."""
        if with_users not in self._grows:
            try:
                self._grows[with_users] = self._is_proven(with_users)
            except Exception as error:  # a template may refuse any of the probes
                _log.debug("no incremental rendering: %s", error)
                self._grows[with_users] = False
        return self._grows[with_users]

    def _is_proven(self, with_users: bool) -> bool:
        if not self._keeps_the_start():
            return False
        rounds = [probe_round(0), probe_round(1), probe_round(2)]
        if with_users:
            thought = {"role": "assistant", "content": "<think>\nhm, hm\n</think>\n\nSeven. "}
            rounds = [[thought, USER], rounds[1], [thought, {"role": "user", "content": "\n And now?"}], rounds[2]]
            if self.schemas is None:
                rounds = [rounds[0], rounds[2]]
        growing = Growing(self, [USER], self.ids([USER]), is_proof=True)
        for new in rounds:
            prompt = growing.extend(new)
            if not growing.is_incremental or not np.array_equal(prompt, self.ids(growing.messages)):
                return False
        return True

    def _keeps_the_start(self) -> bool:
        """A first prompt without its generation prompt is what an assistant message is appended to."""
        with_prompt, bare = self.ids([USER]), self.tokens(self.text([USER], False))
        generation = self.generation_ids
        return np.array_equal(with_prompt, np.concatenate([bare, generation]))

    @functools.cached_property
    def generation_ids(self) -> np.ndarray:
        """Tokens of the generation prompt after a user message."""
        bare, whole = self.text([USER], False), self.text([USER], True)
        if not whole.startswith(bare):
            raise ValueError("the generation prompt changes what stands before it")
        return self.tokens(whole[len(bare) :])

    def block(self, after: str, new: Messages) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of `new`, tokens of the generation prompt after it) behind a message of the role `after`.

        A short stand-in takes the place of the conversation so far, so that the cost is that of `new` alone.
        """
        base, base_text = self._base(after == "tool")
        bare, whole = self.text(base + new, False), self.text(base + new, True)
        if not (bare.startswith(base_text) and whole.startswith(bare)):
            raise ValueError("the template changes what stands before a new message")
        return self.tokens(bare[len(base_text) :]), self.tokens(whole[len(bare) :])

    def _base(self, after_tool: bool) -> tuple[Messages, str]:
        if after_tool not in self._bases:
            base = [USER, *(probe_round(1) if after_tool else [])]
            self._bases[after_tool] = (base, self.text(base, False))
        return self._bases[after_tool]

    def is_border(self, left: np.ndarray, right: np.ndarray) -> bool:
        """Tokens cannot join over the border: a special token stands at it."""
        if not len(left) or not len(right):
            return True
        return int(left[-1]) in self._special_ids or int(right[0]) in self._special_ids


class Growing:
    """One conversation that grows by messages; `prompt` holds the tokens of its next turn."""

    def __init__(self, renderer: Renderer, messages: Messages, prompt: np.ndarray, is_proof: bool = False):
        self._renderer, self._is_proof = renderer, is_proof
        self.messages, self.prompt = list(messages), prompt
        self.is_incremental = False  # whether the last prompt was made from what is new alone
        self._start = tuple(m["role"] for m in messages)
        self._bare: np.ndarray | None = None  # tokens of `messages` without the generation prompt, where known

    def extend(self, new: Messages) -> np.ndarray:
        """Token ids [p] int32 of the conversation with `new` behind it, with the generation prompt."""
        with_users = any(m["role"] not in ("assistant", "tool") for m in new)
        starts_well = bool(new) and new[0]["role"] == "assistant"
        may_grow = self._is_proof or (starts_well and self._renderer.grows(with_users))
        self.is_incremental = may_grow and self._grow(new)
        self.messages += new
        if self.is_incremental and not self._is_proof:
            self._compare()
        if not self.is_incremental:
            self.prompt, self._bare = self._renderer.ids(self.messages), None
        return self.prompt

    def _compare(self) -> None:
        """The first few prompts of each kind of start are compared with the whole conversation rendered anew."""
        seen = self._renderer.compared.get(self._start, 0)
        if 0 <= seen < COMPARED_PROMPTS:
            is_equal = np.array_equal(self.prompt, self._renderer.ids(self.messages))
            self._renderer.compared[self._start] = seen + 1 if is_equal else -1
        self.is_incremental = self._renderer.compared[self._start] > 0

    def _grow(self, new: Messages) -> bool:
        bare = self._bare if self._bare is not None else self._without_generation_prompt()
        if bare is None:
            return False
        try:
            block, generation = self._renderer.block(self.messages[-1]["role"], new)
        except Exception:  # the template raised: let the whole conversation say so, if it does
            return False
        if not (self._renderer.is_border(bare, block) and self._renderer.is_border(block, generation)):
            return False
        self._bare = np.concatenate([bare, block])
        self.prompt = np.concatenate([self._bare, generation])
        return True

    def _without_generation_prompt(self) -> np.ndarray | None:
        """The prompt so far up to the generation prompt it ends with; None after a message it does not depend on."""
        if not self.messages or self.messages[-1]["role"] != "user":
            return None
        generation = self._renderer.generation_ids
        end = len(self.prompt) - len(generation)
        if end < 0 or not np.array_equal(self.prompt[end:], generation):
            return None
        return self.prompt[:end]


def probe_round(number: int) -> Messages:
    """An assistant message with calls and the results; the second makes two calls and says something."""
    names = [["look"], ["look", "find"], ["find"]][number % 3]
    said = ["", "Let me see.", ""][number % 3]
    calls = [
        {"type": "function", "id": f"probe000{i}", "function": {"name": name, "arguments": {"n": number, "s": "a b"}}}
        for i, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "name": name, "content": f" {number} it's\n", "tool_call_id": f"probe000{i}"}
        for i, name in enumerate(names)
    ]
    return [{"role": "assistant", "content": said, "tool_calls": calls}, *results]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}
