"""From the messages of a request to the token ids that are sent for it.

A request that goes on from an earlier answer is the tokens of that answer, exactly as they were sampled, with what the
chat template puts behind them:

    answered   <|im_start|>user .. <|im_end|> \\n <|im_start|>assistant \\n  85 <|im_end|>
    appended                                                                              \\n <|im_start|>user .. assistant \\n
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from agrpo.env.proxy.request import Ask
from agrpo.env.proxy.session import Interaction
from agrpo.env.render import USER, Renderer

_KEPT = 64  # sets of tools whose renderers are kept


class Rendering:
    """The run's chat template; holds nothing of a session."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], eos_ids: frozenset[int]):
        self._tokenizer, self._template_kwargs, self._eos_ids = tokenizer, dict(template_kwargs), eos_ids
        self._eos_texts = [tokenizer.decode([i]) for i in sorted(eos_ids)]
        self._renderers: collections.OrderedDict[str, Renderer] = collections.OrderedDict()

    def __call__(self, ask: Ask, parent: Interaction | None) -> np.ndarray:
        """[p] int32: the tokens of `parent` and what follows them, where the template allows it; else all rendered anew."""
        renderer = self._renderer(ask)
        if parent is not None:
            held = np.concatenate([parent.turn.prompt_ids, parent.turn.output_ids])
            new = ask.messages[len(parent.ask.messages) + 1 :]
            behind = self._behind(renderer, int(held[-1]), parent.message, new)
            if behind is not None and renderer.is_border(held, behind):
                return np.concatenate([held, behind])
        return renderer.ids(ask.messages)

    def plain(self, messages: list[dict[str, Any]]) -> np.ndarray:
        """[p] int32 of messages without tools."""
        return self._renderer(Ask(messages, 1)).ids(messages)

    def _renderer(self, ask: Ask) -> Renderer:
        if ask.preamble not in self._renderers:
            renderer = Renderer(self._tokenizer, {**self._template_kwargs, **ask.template_kwargs}, ask.tools)
            if ask.tools:
                renderer.learn_arguments()
            self._renderers[ask.preamble] = renderer
            if len(self._renderers) > _KEPT:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(ask.preamble)
        return self._renderers[ask.preamble]

    def _behind(
        self, renderer: Renderer, last_id: int, answer: dict[str, Any], new: list[dict[str, Any]]
    ) -> np.ndarray | None:
        """Tokens between an answer that ended with `last_id` and the next one; None where the template rewrites the answer.

        A stand-in takes the place of the conversation before the answer, so the cost is that of the answer and `new`.
        """
        answered = renderer.text([USER, answer], generation_prompt=False)
        whole = renderer.text([USER, answer, *new], generation_prompt=True)
        if not whole.startswith(answered):
            return None
        ends = [answered.rfind(text) for text in self._eos_texts]
        at = max(ends, default=-1)
        if at < 0:
            return None
        if last_id in self._eos_ids:
            at += len(self._eos_texts[ends.index(at)])  # the model wrote it itself
        return renderer.tokens(whole[at:])
