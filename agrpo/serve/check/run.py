"""All rows of all servers, in the order of the table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agrpo.serve.check import generation, identity, place, weights
from agrpo.serve.check.ask import LIMIT_S, ask, post
from agrpo.serve.check.look import LongPrompts, Look, Row
from agrpo.serve.flags import ServerCommand

ROWS = (
    identity.version,
    identity.development_mode,
    identity.model,
    generation.dtype,
    generation.max_model_len,
    generation.logprobs_mode,
    generation.max_logprobs,
    generation.token_endpoint,
    generation.sampling_mask,
    weights.transfer,
    weights.adapters,
    weights.adapter_slots,
    weights.adapter_rank,
    weights.adapter_loading,
    weights.parallel,
    generation.api_servers,
    generation.keep_alive,
    generation.metrics,
    generation.paused,
    place.devices,
    place.shared_folder,
)


def run_checks(
    config: Any,
    urls: Sequence[str],
    commands: Sequence[ServerCommand],
    run_dir: Path | None = None,
    long_prompts: LongPrompts | None = None,
    limit_s: float = LIMIT_S,
) -> list[Row]:
    """Every row of every server, `commands` being what this configuration would start at each of `urls`.

    Loads no model. A server that does not answer has one row. Writes a file to `run_dir` for a moment.
    """
    tokens = identity.load_tokens(config)
    questions = identity.tokenizer_questions(tokens)
    rows = []
    for url, command in zip(urls, commands, strict=True):
        answers = ask(url, questions, limit_s)
        folder = run_dir or Path(tempfile.gettempdir())
        look = Look(config, url, answers, command, folder, long_prompts or (lambda room: None))
        rows.append(identity.reachable(look))
        if answers["/health"].status == 200:
            answers |= post(url, identity.vocabulary_questions(look, tokens), limit_s)
            found = [row(look) for row in ROWS]
            found.insert(3, identity.tokenizer(look, tokens))
            rows += [row for row in found if row is not None]
    return rows
