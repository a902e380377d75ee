"""The commands that take the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agrpo.cli.app import app, leave_with

EXPORT_HELP = """Write a Hugging Face folder from a run or one of its checkpoints. RUN is a run's folder, or checkpoints/step-NNNNNN in it.

Of a run's folder the finished model is taken, or the newest checkpoint where that is of a later step.

\b
Examples:
  agrpo export runs/quickstart/2026-01-31_12-00-00 --output my-model
  agrpo export RUN/checkpoints/step-000040 --adapter    the LoRA adapter alone, in PEFT's format
  agrpo export RUN --push owner/name                    also upload it, with the host's login or HF_TOKEN
"""


@app.command(help=EXPORT_HELP)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    output: Annotated[Path | None, typer.Option(help="Folder to write; default RUN/export/STEP-KIND.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="The whole model, a LoRA adapter merged in (default).")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone.")] = False,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to this repository.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    from agrpo.launch import export as exporting

    if merged and adapter:
        raise typer.BadParameter("give --merged or --adapter, not both")
    kind = "adapter" if adapter else "merged" if merged else None
    leave_with(lambda: print(exporting.export(run, output, kind, push, private)))


VIEW_HELP = """List the rollouts that a run recorded, or show one. RUN is a run's folder, or a folder of dumped rollouts.

\b
Switch recording on in the run:
  agrpo train ... rollout.dump_to_file=true rollout.fileroot=FOLDER    text, tokens, log-probs, versions
  agrpo train ... logger.log_completions=true                          text and rewards only

\b
Examples:
  agrpo view runs/quickstart/2026-01-31_12-00-00                    the first 50 rollouts
  agrpo view RUN --max-reward 0 --step 12                           what step 12 learned not to do
  agrpo view RUN --show 42/3                                        the fourth rollout of group 42
"""


@app.command(help=VIEW_HELP)
def view(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    show: Annotated[str | None, typer.Option(metavar="GROUP[/ROLLOUT[/ROW]]", help="Show these in full.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group.")] = None,
    step: Annotated[int | None, typer.Option(help="Only what this optimizer step trained.")] = None,
    version: Annotated[int | None, typer.Option(help="Only groups whose newest weights are of this version.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards of at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rewards of at most this.")] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="Rollouts of evaluations instead.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --show: list every trained token.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rollouts to list or show.")] = 50,
) -> None:
    from agrpo.report import view as viewing

    scope = "eval-rollout" if evaluation else "rollout"
    chosen = viewing.Filter(group, step, version, min_reward, max_reward, scope)
    leave_with(lambda: viewing.view(run, chosen, show, limit, tokens))


EXPLAIN_HELP = """Say in sentences what limits a run: the figure, its cause, and the setting to change.

RUN is a run's folder; without it, the newest below runs/. agrpo train says the same in short at the end of each run.

\b
Examples:
  agrpo explain                                         the newest run, also while it goes on
  agrpo explain runs/quickstart/2026-01-31_12-00-00
  agrpo explain --live                                  again whenever a verdict changes, until the run ends
"""


@app.command(help=EXPLAIN_HELP)
def explain(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", show_default=False)] = None,
    live: Annotated[bool, typer.Option("--live", help="Follow a run, and print whenever a verdict changes.")] = False,
) -> None:
    from agrpo.report import explain as explaining

    leave_with(lambda: explaining.explain(run, live))


REPORT_HELP = """Write one HTML file about a run, or compare several. It needs no network and runs no script.

It holds the verdicts, the curves over steps, a timeline of all processes, sample rollouts with the log-prob gap of each
token, and the configuration. A RUN that holds several runs, such as a sweep's folder, stands for all of them.

\b
Examples:
  agrpo report runs/quickstart/2026-01-31_12-00-00      writes report.html into that folder
  agrpo report RUN OTHER_RUN --output both.html
  agrpo report runs/quickstart/2026-01-31_12-00-00      also a sweep: the runs in it are compared
"""


@app.command(help=REPORT_HELP)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = None,
) -> None:
    from agrpo.report import page

    leave_with(lambda: print(page.report(runs, output)))
