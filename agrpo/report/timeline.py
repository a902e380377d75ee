"""What each process did when, as SVG lanes: the whole run, and its last steps with the groups in flight."""

from __future__ import annotations

import heapq
from collections import Counter
from html import escape
from typing import Any

Span = dict[str, Any]
Spans = dict[str, list[Span]]

WIDTH, _LEFT = 940, 84
_LANE, _BAR, _THIN = 22, 16, 4
LAST_STEPS = 8
MOST_LANES = 64  # of groups in flight
_SMALLEST = 0.4  # pixels
# words of a phase -> what kind it is; the first that fits
KINDS = (
    (("waiting", "paused", "connecting", "idle"), "waiting", "#e0a33e"),
    (("weights", "resend"), "weights", "#8b5cf6"),
    (("training",), "training", "#2a9d5c"),
    (("generating", "serving", "group"), "generating", "#1f6feb"),
    (("evaluat",), "evaluating", "#008b9a"),
    (("sav", "export"), "saving", "#a0694b"),
    (("scor",), "scoring", "#b0377f"),
)
_OTHER = ("starting", "#9aa3ab")


def kind_of(what: str) -> tuple[str, str]:
    """(kind, colour) of a phase: `waiting for samples` is waiting."""
    return next(((kind, colour) for words, kind, colour in KINDS if any(w in what for w in words)), _OTHER)


def timeline(spans: Spans) -> str:
    """Drawings and the share of each phase; empty where the run kept no timeline."""
    phases = {name: [s for s in of if s["what"] != "group"] for name, of in spans.items()}
    phases = {name: of for name, of in sorted(phases.items(), key=lambda item: _rank(item[0])) if of}
    if not phases:
        return ""
    start = min(s["start"] for of in phases.values() for s in of)
    end = max(s["end"] for of in phases.values() for s in of)
    groups = [s for of in spans.values() for s in of if s["what"] == "group"]
    parts = [f"<h3>The whole run</h3>{_drawing(phases, [], start, end, start)}"]
    recent = last_steps(phases)
    if recent is not None:
        parts.append(f"<h3>The last steps, with the groups in flight</h3>{_drawing(phases, groups, *recent, start)}")
    return "".join(parts) + _legend() + _shares(phases)


def last_steps(phases: Spans) -> tuple[float, float] | None:
    """From the start of the LAST_STEPS-th last training phase of the first trainer to its last; None without steps."""
    first = next((of for name, of in phases.items() if name.startswith("trainer")), [])
    steps = [s for s in first if s["what"] == "training"]
    return (steps[-LAST_STEPS:][0]["start"], steps[-1]["end"]) if steps else None


def _rank(name: str) -> tuple[int, str]:
    order = ("server", "rollout", "trainer")
    return next((i for i, start in enumerate(order) if name.startswith(start)), len(order)), name.zfill(20)


def _drawing(phases: Spans, groups: list[Span], start: float, end: float, zero: float) -> str:
    scale = (WIDTH - _LEFT - 8) / max(end - start, 1e-6)
    parts, y = [], 4.0

    def bar(span: Span, top: float, height: float, colour: str, text: str) -> str:
        x0, x1 = max(span["start"], start), min(span["end"], end)
        if (x1 - x0) * scale < _SMALLEST:
            return ""
        return (
            f'<rect x="{_LEFT + (x0 - start) * scale:.1f}" y="{top:.1f}" width="{(x1 - x0) * scale:.1f}" '
            f'height="{height}" fill="{colour}"><title>{escape(text)}</title></rect>'
        )

    for name, spans in phases.items():
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 12:.0f}" text-anchor="end">{escape(name)}</text>')
        for s in spans:
            words = f"{name}: {s['what']}, {s['end'] - s['start']:.2f} s from {s['start'] - zero:.1f} s"
            parts.append(bar(s, y, _BAR, kind_of(s["what"])[1], words))
        y += _LANE
    shown = [s for s in groups if s["end"] > start and s["start"] < end]
    if shown:
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 10:.0f}" text-anchor="end">groups</text>')
    lanes = lanes_of(shown)
    for s, lane in zip(shown, lanes, strict=True):
        if lane < MOST_LANES:
            played = {"start": s["start"], "end": s.get("played", s["end"])}
            scored = {"start": played["end"], "end": s["end"]}
            words = f"group {s.get('group', '')}: played {played['end'] - s['start']:.2f} s, scored and sent {s['end'] - played['end']:.2f} s"
            parts.append(bar(played, y + lane * _THIN, _THIN - 1, kind_of("group")[1], words))
            parts.append(bar(scored, y + lane * _THIN, _THIN - 1, kind_of("scoring")[1], words))
    y += min(max(lanes, default=-1) + 1, MOST_LANES) * _THIN + 14
    parts += [
        f'<text x="{x}" y="{y:.0f}" text-anchor="{anchor}">{at - zero:.1f} s</text>'
        for x, anchor, at in ((_LEFT, "start", start), (WIDTH - 8, "end", end))
    ]
    return f'<svg viewBox="0 0 {WIDTH} {y + 6:.0f}" class="timeline" role="img">{"".join(parts)}</svg>'


def lanes_of(spans: list[Span]) -> list[int]:
    """A lane per span, in their order of start, such that spans of one lane do not overlap, with as few lanes as possible."""
    free: list[int] = []  # lanes in use before and free again
    busy: list[tuple[float, int]] = []  # (end, lane)
    found = dict[int, int]()
    for index in sorted(range(len(spans)), key=lambda i: spans[i]["start"]):
        while busy and busy[0][0] <= spans[index]["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        found[index] = lane
        heapq.heappush(busy, (spans[index]["end"], lane))
    return [found[i] for i in range(len(spans))]


def _legend() -> str:
    kinds = [(kind, colour) for _, kind, colour in KINDS] + [_OTHER]
    words = "".join(f'<span><i style="background:{colour}"></i>{kind}</span>' for kind, colour in kinds)
    return f'<div class="legend">{words}</div>'


def _shares(phases: Spans) -> str:
    """What each process spent its time on, in one line each."""
    rows = []
    for name, spans in phases.items():
        seconds: Counter[str] = Counter()
        for s in spans:
            seconds[s["what"]] += s["end"] - s["start"]
        whole = sum(seconds.values()) or 1.0
        words = ", ".join(f"{escape(what)} {100 * s / whole:.0f} %" for what, s in seconds.most_common(6))
        rows.append(f"<tr><th>{escape(name)}</th><td>{words}</td></tr>")
    return f"<table>{''.join(rows)}</table>"
