"""`agrpo view`: the recorded rollouts of a run in the terminal, as a list or one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agrpo.errors import ConfigError
from agrpo.report.recorded import Record, loss_mask, read

_OTHER_COLUMNS, _SHORTEST, _WIDEST_GAPS = 72, 8, 10  # characters, characters, tokens
_HEAT = ((0.05, ""), (0.2, "yellow"), (float("inf"), "bold red"))  # absolute log-prob gap up to -> style


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are meant; None = any."""

    group: int | None = None
    step: int | None = None
    version: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    scope: str = "rollout"

    def takes(self, record: Record) -> bool:
        reward, has_range = record.fields["reward"], (self.min_reward, self.max_reward) != (None, None)
        return (
            record.scope == self.scope
            and self.group in (None, record.fields["task_id"])
            and self.step in (None, record.step)
            and self.version in (None, record.version)
            and not (has_range and reward is None)
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
        )


def view(
    run: Path, chosen: Filter, show: str | None, limit: int, all_tokens: bool, console: Console | None = None
) -> None:
    """Print the list of a run's rollouts, or the one that `show` names (GROUP/ROLLOUT/ROW, or a part of it)."""
    console = console or Console()
    found = read(run)
    records = [r for r in found.records if chosen.takes(r)]
    if show is not None:
        wanted = show.split("/")
        picked = [r for r in records if r.name.split("/")[: len(wanted)] == wanted]
        if not picked:
            raise ConfigError(
                f"--show {show}: no such rollout among the {len(records)} found; list them without --show"
            )
        tokenizer = load_tokenizer(found.tokenizer_path) if found.has_tokens else None
        for record in picked[:limit]:
            _print_one(console, record, tokenizer, all_tokens)
        return
    _print_list(console, records, limit)
    if not found.has_tokens:
        console.print("Text only. Tokens, log-probs and versions: rollout.dump_to_file=true rollout.fileroot=FOLDER")


def load_tokenizer(path: str | None) -> Any:
    """None where it cannot be loaded: texts are in the dump, only single tokens need it."""
    if path is None:
        return None
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _print_list(console: Console, records: list[Record], limit: int) -> None:
    table = Table(box=None)
    for name in ("rollout", "version", "step", "reward", "advantage", "tokens", "trained", "dropped"):
        table.add_column(name, no_wrap=True)
    table.add_column("answer")
    excerpt = max(console.width - _OTHER_COLUMNS, _SHORTEST)
    for record in records[:limit]:
        fields = record.fields
        answer = fields.get("completion") or (record.messages or [{}])[-1].get("content") or ""
        trained = sum(count for value, count in fields.get("mask_rle", []) if value)
        table.add_row(
            record.name,
            str(record.version),
            _number(record.step),
            _number(fields["reward"]),
            _number(fields.get("advantage")),
            _number(fields.get("seqlen")),
            _number(trained or None),
            fields.get("dropped") or "",
            Text(" ".join(answer.split())[:excerpt]),
        )
    console.print(table)
    rewards = [r.fields["reward"] for r in records if r.fields["reward"] is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    more = f", the first {limit} are shown (--limit)" if len(records) > limit else ""
    console.print(f"{len(records)} rollouts{mean}{more}. One of them: --show {records[0].name if records else 'GROUP'}")


def _number(value: Any) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def _print_one(console: Console, record: Record, tokenizer: Any, all_tokens: bool) -> None:
    fields = record.fields
    parts = "  ".join(f"{name} {_number(value) or 'none'}" for name, value in fields["rewards"].items())
    console.rule(f"{record.scope} {record.name}")
    console.print(Text(f"reward {_number(fields['reward']) or 'none'}  ({parts or 'no source'})"))
    where = f"trained in step {record.step}" if record.step is not None else f"dropped: {fields['dropped'] or 'no'}"
    console.print(Text(f"advantage {_number(fields.get('advantage')) or 'unknown'}  {where}"))
    if record.messages is not None:
        for message in record.messages:
            console.print(Text(f"{message.get('role', '?')}", style="bold"), Text(str(message.get("content") or "")))
        return
    runs = ", ".join(f"{count} of version {version}" for version, count in fields["version_rle"])
    console.print(Text(f"{fields['seqlen']} tokens, trained: {runs or 'none'}"))
    gaps = gaps_of(record)
    if gaps is not None and len(gaps):
        console.print(
            f"trainer - sampler log-prob: mean abs {np.abs(gaps).mean():.4f}, max abs {np.abs(gaps).max():.4f}"
        )
    _print_segments(console, record, tokenizer, gaps)
    if tokenizer is not None:
        _print_tokens(console, record, tokenizer, gaps, all_tokens)


def gaps_of(record: Record) -> np.ndarray | None:
    """[trained tokens] trainer's log-prob minus the sampler's; None where the row was not trained."""
    if record.trainer_logprobs is None:
        return None
    return np.array(record.trainer_logprobs) - np.array(record.fields["sampler_logprobs"])


def _print_segments(console: Console, record: Record, tokenizer: Any, gaps: np.ndarray | None) -> None:
    """Text by segment; the tokens of an answer are coloured by their gap where it is known."""
    fields, at, trained = record.fields, 0, 0
    for role, count, text in segments_of(fields):
        console.print(Text(f"{role} ({count})", style="bold cyan" if role == "gen" else "dim"))
        if role == "gen" and gaps is not None and tokenizer is not None:
            pieces = [tokenizer.decode([i]) for i in fields["token_ids"][at : at + count]]
            own = gaps[trained : trained + count]
            console.print(Text.assemble(*((p, _heat(g)) for p, g in zip(pieces, own, strict=True))))
        else:
            console.print(Text(text, style="" if role == "gen" else "dim"))
        at += count
        trained += count if role == "gen" else 0


def segments_of(fields: dict[str, Any]) -> Iterable[tuple[str, int, str]]:
    if "segments" in fields:
        return [(s["role"], s["len"], s["text"]) for s in fields["segments"]]
    trained = sum(count for value, count in fields["mask_rle"] if value)
    after = fields["seqlen"] - fields["prompt_len"]
    pieces = [("prompt", fields["prompt_len"], fields["prompt"])]
    # One generated run; what follows it, such as a tool's last result, is part of the same text.
    pieces.append(("gen" if trained == after else f"gen ({trained}) and context", after, fields["completion"]))
    return [p for p in pieces if p[1]]


def _heat(gap: float) -> str:
    return next(style for limit, style in _HEAT if abs(gap) <= limit)


def _print_tokens(console: Console, record: Record, tokenizer: Any, gaps: np.ndarray | None, all_tokens: bool) -> None:
    """Token by token: all trained ones, or those that trainer and sampler disagree on most."""
    fields = record.fields
    places = np.flatnonzero(loss_mask(fields))
    sampler = np.array(fields["sampler_logprobs"])
    versions = np.repeat(*np.array(fields["version_rle"] or np.zeros((0, 2), np.int64), np.int64).T)
    shown = np.arange(len(places))
    title = "trained tokens"
    if not all_tokens and len(shown) > _WIDEST_GAPS:
        worst = np.abs(gaps) if gaps is not None else -sampler
        shown = np.sort(np.argsort(-worst, kind="stable")[:_WIDEST_GAPS])
        kind = "largest gaps" if gaps is not None else "least likely tokens"
        title = f"the {_WIDEST_GAPS} {kind} (--tokens shows all {len(places)})"
    table = Table(
        "position", "token", "version", "sampler", "trainer", "gap", box=None, title=title, title_justify="left"
    )
    for i in shown:
        gap = None if gaps is None else float(gaps[i])
        trainer = "" if gap is None else f"{record.trainer_logprobs[i]:.4f}"
        token = Text(repr(tokenizer.decode([fields["token_ids"][places[i]]])))
        cells = (str(versions[i]), f"{sampler[i]:.4f}", trainer)
        table.add_row(
            str(places[i]), token, *cells, Text("" if gap is None else f"{gap:+.4f}", style=_heat(gap or 0.0))
        )
    console.print(table)
