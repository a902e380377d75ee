"""Rollouts in a report: what was asked and answered, and by how much trainer and server disagree on each token.

Every text of a rollout may hold anything, markup included; it is escaped and never becomes part of the page's structure.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from agrpo.errors import ConfigError
from agrpo.report.recorded import Record, loss_mask, read
from agrpo.report.view import gaps_of, load_tokenizer, segments_of

MOST_CHARACTERS = 4000  # of one text
_WIDEST = 1.0  # nats at which the colour of a token is strongest
_SWITCH_ON = "Tokens, log-probs and gaps are recorded with rollout.dump_to_file=true rollout.fileroot=FOLDER."


def samples(folder: Path, most: int) -> str:
    """At most `most` rollouts of a run, chosen to differ; a sentence where none were recorded."""
    try:
        found = read(folder)
    except ConfigError:
        return f"<p>No rollouts were recorded. {_SWITCH_ON}</p>"
    records = [r for r in found.records if r.scope == "rollout"]
    tokenizer = load_tokenizer(found.tokenizer_path) if found.has_tokens else None
    parts = [_one(why, record, tokenizer) for why, record in chosen(records, most)]
    return "".join(parts) + ("" if found.has_tokens else f"<p>{_SWITCH_ON}</p>")


def chosen(records: list[Record], most: int) -> list[tuple[str, Record]]:
    """The newest best and worst, the widest gap, the longest, then newest ones; each once, with why it was chosen."""
    traced = [r for r in records if (gaps := gaps_of(r)) is not None and len(gaps)]
    scored = [r for r in traced or records if r.fields["reward"] is not None]
    wanted: list[tuple[str, Record]] = []
    if scored:
        newest = list(reversed(scored))
        wanted.append(("best of the newest", max(newest[:64], key=lambda r: r.fields["reward"])))
        wanted.append(("worst of the newest", min(newest[:64], key=lambda r: r.fields["reward"])))
    if traced:
        wanted.append(("widest log-prob gap", max(traced, key=lambda r: float(np.abs(gaps_of(r)).max()))))
    if any("seqlen" in r.fields for r in records):
        wanted.append(("longest", max(records, key=lambda r: r.fields.get("seqlen", 0))))
    wanted += [("first", r) for r in records[:1]] + [("newest", r) for r in reversed(records[-most:])]
    found: dict[str, tuple[str, Record]] = {}
    for why, record in wanted:
        found.setdefault(record.name, (why, record))
    return list(found.values())[:most]


def _one(why: str, record: Record, tokenizer: Any) -> str:
    fields = record.fields
    parts = "  ".join(f"{name} {_number(value)}" for name, value in fields["rewards"].items())
    untrained = f"dropped: {fields['dropped']}" if fields["dropped"] else "not trained"
    where = untrained if record.step is None else f"trained in step {record.step}"
    facts = f"{why}; reward {_number(fields['reward'])} ({parts or 'no source'}), advantage {_number(fields.get('advantage'))}, {where}"
    gaps = gaps_of(record)
    if gaps is not None and len(gaps):
        facts += f"; trainer - server log-prob: mean abs {np.abs(gaps).mean():.4f}, max abs {np.abs(gaps).max():.4f}"
    body = "".join(_texts(record, tokenizer, gaps))
    return (
        f'<details class="rollout" open><summary>rollout {escape(record.name)}, version {record.version}: '
        f"{escape(facts)}</summary>{body}</details>"
    )


def _texts(record: Record, tokenizer: Any, gaps: np.ndarray | None) -> Iterable[str]:
    """Message by message, or segment by segment with the answers' tokens coloured."""
    if record.messages is not None:
        for message in record.messages:
            yield _block(str(message.get("role", "?")), text(str(message.get("content") or "")))
        return
    fields, at, trained = record.fields, 0, 0
    places, sampler = np.flatnonzero(loss_mask(fields)), fields["sampler_logprobs"]
    for role, count, words in segments_of(fields):
        own = slice(trained, trained + count)
        if role == "gen" and tokenizer is not None and len(places[own]) == count:
            ids = fields["token_ids"][at : at + count]
            trainer = None if gaps is None else record.trainer_logprobs[own]
            yield _block(f"answer ({count} tokens)", _tokens(tokenizer, ids, sampler[own], trainer))
        else:
            yield _block(f"{'answer' if role == 'gen' else role} ({count} tokens)", text(words))
        at += count
        trained += count if role == "gen" else 0


def _tokens(tokenizer: Any, ids: list[int], sampler: list[float], trainer: list[float] | None) -> str:
    parts = []
    for i, token in enumerate(ids):
        words, title, style = tokenizer.decode([token]), f"server {sampler[i]:.4f}", ""
        if trainer is not None:
            gap = trainer[i] - sampler[i]
            title += f", trainer {trainer[i]:.4f}, gap {gap:+.4f}"
            style = f' style="background:rgba({"209,73,91" if gap < 0 else "31,111,235"},{min(abs(gap) / _WIDEST, 1.0):.2f})"'
        parts.append(f'<span class="token"{style} title="{title}">{text(words)}</span>')
    return "".join(parts)


def text(words: str) -> str:
    """Any text as page text: escaped, control characters made visible, shortened."""
    cut = words[:MOST_CHARACTERS] + (" [...]" if len(words) > MOST_CHARACTERS else "")
    return escape("".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in cut))


def _block(role: str, body: str) -> str:
    return f"<div><b>{escape(role)}</b><pre>{body}</pre></div>"


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}"
