"""`agrpo report`: one HTML file about one run or several, which needs no network and runs no script."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

from agrpo.errors import AgrpoError
from agrpo.metrics import split
from agrpo.metrics.findings import Finding, findings
from agrpo.metrics.summary import evaluation_text, evaluations
from agrpo.report.charts import charts, colour_of
from agrpo.report.run_files import RunFiles, read_runs
from agrpo.report.samples import samples
from agrpo.report.timeline import timeline

ROLLOUTS, ROLLOUTS_OF_MANY = 6, 2  # shown of each run
MOST_COLUMNS = 6  # of a comparison, for keys whose values differ; others are named below it
# Nothing of a page may be loaded or run, whatever its texts hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1c2024;background:#fff;max-width:960px;margin:24px auto;padding:0 16px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 8px;border-bottom:1px solid #d9dde1;padding-bottom:3px}
h3{font-size:14px;margin:14px 0 4px}small,.dim{color:#666e75}
.charts{display:grid;grid-template-columns:1fr 1fr;gap:10px 18px}figure{margin:0}figcaption{font-weight:600}
svg{width:100%;height:auto;display:block}svg text{font:10px system-ui,sans-serif;fill:#666e75}.grid{stroke:#e6e9ec}
.dot:hover{opacity:1}.legend{font-size:12px;color:#444b52}.legend span{margin-right:12px;display:inline-block}
.legend i{display:inline-block;width:10px;height:10px;margin-right:4px;border-radius:2px}
table{border-collapse:collapse;font-size:13px;margin:6px 0;width:100%}
th,td{text-align:left;padding:3px 10px 3px 0;border-bottom:1px solid #eceff1;vertical-align:top}
.finding{border-left:4px solid #9aa3ab;padding:4px 10px;margin:6px 0;background:#f7f8f9}
.warning{border-color:#d1495b}.note{border-color:#d98c00}.fine{border-color:#2a9d5c}
code,pre{font:12px/1.4 ui-monospace,monospace}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0 6px;
background:#f7f8f9;padding:6px}code{background:#eceff1;padding:1px 4px}.token{border-bottom:1px dotted #b6bdc4}
details{margin:6px 0}summary{cursor:pointer}@media(max-width:700px){.charts{grid-template-columns:1fr}}
"""


def report(folders: list[Path], output: Path | None) -> Path:
    """Write the page about these runs and return where: `output`, else report.html in the first folder."""
    runs = read_runs(folders)
    target = output or folders[0] / "report.html"
    text = page(runs)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AgrpoError(f"--output {target}: {error.strerror}; name a file in a folder that exists") from None
    return target


def page(runs: list[RunFiles]) -> str:
    """The whole document."""
    left_out, runs = [run for run in runs if run.trouble], [run for run in runs if not run.trouble]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    made = time.strftime("%Y-%m-%d %H:%M")
    parts = [f"<h1>{escape(title)}</h1><p class='dim'>agrpo report, {made}</p>"]
    parts += [f"<p>{escape(run.name)} is left out: {escape(run.trouble)}.</p>" for run in left_out]
    if len(runs) == 1:
        parts += [_facts(runs[0]), _verdicts(runs[0])]
    else:
        parts.append(_comparison(runs))
    drawn = charts(runs)
    parts.append(f"<h2>Curves over steps</h2><div class='charts'>{drawn or 'No step has been logged.'}</div>")
    for run in runs:
        parts.append(_one(run, len(runs) > 1))
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _one(run: RunFiles, is_one_of_many: bool) -> str:
    """What is shown per run: with several, its verdicts too, and all of it folded."""
    config = yaml.safe_dump(run.settings, sort_keys=False)
    command = " ".join(["agrpo train", *run.overrides])
    drawn = timeline(run.spans())
    lanes = f"<h2>Timeline</h2>{drawn}" if drawn else ""
    rollouts = samples(run.folder, ROLLOUTS_OF_MANY if is_one_of_many else ROLLOUTS)
    body = (
        f"{lanes}<h2>Rollouts</h2>{rollouts}"
        f"<h2>Configuration</h2><p><code>{escape(command)}</code></p>"
        f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>"
    )
    if not is_one_of_many:
        return body
    return f"<details><summary><b>{escape(run.name)}</b></summary>{_facts(run)}{_verdicts(run)}{body}</details>"


def _facts(run: RunFiles) -> str:
    steps, history = run.steps, split.History(run.records, run.settings)
    seconds = history.over_steps("perf/step_s")
    facts = {
        "folder": str(run.folder), "ended": run.end, "steps": steps[-1]["step"] if steps else 0,
        "time in steps": f"{seconds:.0f} s", "model": history.setting("model.path"),
        "tokens forwarded": f"{max(history.values('num_tokens'), default=0):.0f}", **_evaluated(run),
    }  # fmt: skip
    rows = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    cause = f"<pre>{escape(run.cause)}</pre>" if run.cause and not run.is_active else ""
    return f"<table>{rows}</table>{cause}"


def _evaluated(run: RunFiles) -> dict[str, str]:
    return {f"evaluation {name}": evaluation_text(points) for name, points in evaluations(run.records).items()}


def _verdicts(run: RunFiles) -> str:
    found = findings(run.records, run.settings)
    lines = split.sentences(split.History(run.records, run.settings))
    planned = "".join(f"<p>{_code(line) if line.startswith(_QUOTE) else escape(line)}</p>" for line in lines)
    body = "".join(map(_finding, found)) or "<p>No step has been logged.</p>"
    return f"<h2>Verdicts</h2>{body}<h3>Devices for generation and training</h3>{planned}"


_QUOTE = "'run.devices"  # how the plan's command line begins


def _finding(finding: Finding) -> str:
    override = f" {_code(finding.override)}" if finding.override else ""
    words = f"<b>{escape(finding.rule)}</b> {escape(finding.text)}{override}"
    return f'<div class="finding {finding.level}">{words}</div>'


def _code(words: str) -> str:
    return f"<code>{escape(words)}</code>"


def _comparison(runs: list[RunFiles]) -> str:
    """One row per run: what differs in the configuration, and what came of it."""
    keys = differences([run.settings for run in runs])
    differing, others = keys[:MOST_COLUMNS], keys[MOST_COLUMNS:]
    more = f"<p>{len(others)} more keys differ: {escape(', '.join(others))}.</p>" if others else ""
    heads = ["run", *differing, "ended", "steps", "reward", "best", "evaluation", "step s", "tokens/s", "waits", "verdicts"]
    rows = []
    for index, run in enumerate(runs):
        found = findings(run.records, run.settings)
        history = split.History(run.records, run.settings)
        step_s, wait_s = history.now("perf/step_s"), history.now("perf/rollout_wait_s")
        evaluated = "; ".join(f"{k.removeprefix('evaluation ')} {v}" for k, v in _evaluated(run).items())
        cells = [
            *(_plain(_at(run.settings, key)) for key in differing), run.end, str(history.num_steps),
            _figure(history.now("reward")), _figure(history.best("reward")), evaluated, _figure(step_s),
            _figure(history.now("perf/wall_clock_forwarded_tokens_per_s")),
            f"{100 * wait_s / step_s:.0f} %" if step_s and wait_s is not None else "",
            ", ".join(f.rule for f in found if f.level != "fine") or "fine",
        ]  # fmt: skip
        name = f'<i style="background:{colour_of(index)}"></i>{escape(run.name)}'
        rows.append(f'<tr><th class="legend">{name}</th>' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    heading = "".join(f"<th>{escape(h)}</th>" for h in heads)
    return f"<h2>Compared</h2><table><tr>{heading}</tr>{''.join(rows)}</table>{more}"


# They differ between any two runs and explain nothing.
_ALWAYS_DIFFERENT = (
    "run.output_dir",
    "rollout.trial_name",
    "rollout.experiment_name",
    "rollout.fileroot",
    "logger.run_name",
)


def differences(trees: list[Mapping[str, Any]]) -> list[str]:
    """Dotted keys whose values are not the same in all trees."""
    flat = [_flat(tree) for tree in trees]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    return [k for k in keys if k not in _ALWAYS_DIFFERENT and len({str(one.get(k)) for one in flat}) > 1]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    return {
        k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _at(tree: Mapping[str, Any], key: str) -> Any:
    return _flat(tree).get(key)


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
