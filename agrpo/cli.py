"""The command line: parse, call one function, print an error in one line. Nothing heavy is imported early."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agrpo import __version__
from agrpo.errors import AgrpoError, ConfigError

if TYPE_CHECKING:
    from agrpo.config.runner import Job

app = typer.Typer(
    name="agrpo",
    help="Asynchronous GRPO for language models: generation and training overlap, from one command.",
    epilog="Start with: agrpo train +recipe=quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN_HELP = """Train a model. OVERRIDES are key=value pairs, group choices such as loss=grpo, and +recipe=NAME.

\b
Examples:
  agrpo train +recipe=quickstart                        learn on a CPU, in minutes
  agrpo train +recipe=deepmath --dry-run                show processes, commands, memory; start nothing
  agrpo train model.path=Qwen/Qwen3-0.6B data=jsonl data.path=train.jsonl \\
      'scorer.functions=[my_rewards.exact]'             your model, data and reward
  agrpo train +recipe=quickstart run.output_dir=DIR run.resume=auto     continue a run
  agrpo train -m +recipe=quickstart loss=score_centering,grpo           one job per value

\b
Options and their meaning:
  agrpo train --cfg job                                 every key with its default
  agrpo train +recipe=quickstart --cfg job              the same, under a recipe
  agrpo train loss=?                                    the options of a group; groups: data env sampler scorer
                                                        advantage packer loss sync eval server model optimizer logger
  agrpo train +recipe=?                                 the recipes
"""


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"agrpo {__version__}")
        raise typer.Exit


@app.command(
    help=TRAIN_HELP,
    epilog="Exit codes: 0 success, 1 unexpected error, 2 wrong usage, 3 configuration refused, "
    "4 server or host check failed, 5 contract error in user code, 6 stall or time-out, "
    "129, 130, 143 ended by SIGHUP, SIGINT (Ctrl-C), SIGTERM.",
)
def train(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show the plan; start nothing.")] = False,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="One job per combination of a,b values.")] = False,
    config_dir: Annotated[
        str | None, typer.Option(help="Folder with more YAML: DIR/loss/mine.yaml is loss=mine.")
    ] = None,
    cfg: Annotated[
        str | None, typer.Option(metavar="job|hydra|all", help="Print the configuration; start nothing.")
    ] = None,
    resolve: Annotated[bool, typer.Option("--resolve", help="With --cfg: resolve interpolations.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the start, warnings and the end.")] = False,
    recipe: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    from agrpo.config import runner

    if recipe is not None:
        raise typer.BadParameter(f"a recipe is chosen with +recipe={recipe}, without dashes")
    if cfg not in (None, "job", "hydra", "all"):
        raise typer.BadParameter(f"--cfg must be job, hydra or all, got {cfg}")
    request = runner.Request(list(overrides or []), dry_run, multirun, config_dir, cfg, resolve, quiet)
    _leave_with(lambda: runner.run(request, start_job))


SERVE_HELP = """Start the server of a configuration alone, in the foreground. OVERRIDES are those of agrpo train.

\b
Examples:
  agrpo serve +recipe=deepmath server=vllm              the server that agrpo train would start, at port 8000
  agrpo serve +recipe=deepmath server=vllm --print      its command as one line, to run elsewhere
  agrpo serve +recipe=deepmath server=external server.base_url=http://node7:8000 --print
"""


@app.command(help=SERVE_HELP)
def serve(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES", show_default=False)] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command as one line; start nothing.")] = False,
    config_dir: Annotated[str | None, typer.Option(help="Folder with more YAML, as for train.")] = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import serve as serving

    request, found = runner.Request(list(overrides or []), config_dir=config_dir), []
    call = serving.lines if print_only else serving.foreground
    _leave_with(lambda: runner.run(request, lambda job: found.append(call(job))))
    if print_only:
        print("\n".join(found[0]))
    else:
        found[0]()


SERVE_CHECK_HELP = """Check the servers of a configuration before any model is loaded. OVERRIDES are those of agrpo train.

Each line says what was found and, where it is wrong, the flag or variable to start the server with. Ends with exit code
0, or 4 if a check failed. agrpo train runs the same checks.

\b
Examples:
  agrpo serve-check +recipe=deepmath server=external server.base_url=http://node7:8000
  agrpo serve-check +recipe=deepmath server=vllm --probe      a server started by agrpo serve, with the model
"""


@app.command("serve-check", help=SERVE_CHECK_HELP)
def serve_check(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also load the model, compare log-probs, and send the weights once.")
    ] = False,
    config_dir: Annotated[str | None, typer.Option(help="Folder with more YAML, as for train.")] = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import check

    request = runner.Request(list(overrides or []), config_dir=config_dir)
    _leave_with(lambda: runner.run(request, lambda job: check.serve_check(job, as_json, probe)))


DOCTOR_HELP = """Look at everything that can go wrong before a long run. OVERRIDES are those of agrpo train.

Versions, devices, network, configuration, memory and disk; the first prompts as the model reads them and whether the chat
template keeps them; every reward function on real rows in the run's own worker processes; tools and environments; the
server with all checks of agrpo serve-check; and one tiny step through every process of the run. Each failure comes with
its fix and hides no other. Ends with exit code 0, or 4 if something failed.

\b
Examples:
  agrpo doctor +recipe=quickstart
  agrpo doctor +recipe=deepmath --no-server             only what needs no server
  agrpo doctor +recipe=deepmath --json > doctor.json
"""


@app.command(help=DOCTOR_HELP)
def doctor(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_server: Annotated[bool, typer.Option("--no-server", help="Start no server: leave its checks and the step out.")] = False,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For each part without a server.")] = 120,
    step_limit: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For the step, beyond server.timeout.")
    ] = 600,
    config_dir: Annotated[str | None, typer.Option(help="Folder with more YAML, as for train.")] = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import doctor as examining

    request = runner.Request(list(overrides or []), config_dir=config_dir)
    options = examining.Options(as_json, not no_server, limit, step_limit)
    _leave_with(lambda: examining.examine(request, options))


EVAL_HELP = """Play the evaluations of a configuration for MODEL, a folder or a Hub id, with a server started for it.

OVERRIDES are those of agrpo train; the group eval says what is asked. The mean reward comes with its 95 % interval over
prompts (normal approximation), pass@k is the unbiased estimate. Results go to evaluation.json in run.output_dir. Ends with
exit code 4 where an evaluation scored nothing.

\b
Examples:
  agrpo eval runs/quickstart/2026-01-31_12-00-00/model +recipe=quickstart
  agrpo eval MODEL +recipe=quickstart eval.heldout.num_rollouts=8 'eval.heldout.pass_at=[1,4,8]' --json
"""


@app.command("eval", help=EVAL_HELP)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config_dir: Annotated[str | None, typer.Option(help="Folder with more YAML, as for train.")] = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import evaluate as evaluating

    quoted = "'" + model.replace("\\", "\\\\").replace("'", "\\'") + "'"  # a path may hold what the override grammar reads
    request = runner.Request([*(overrides or []), f"model.path={quoted}"], config_dir=config_dir)
    _leave_with(lambda: runner.run(request, lambda job: evaluating.evaluate(job, as_json)))


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
    _leave_with(lambda: print(exporting.export(run, output, kind, push, private)))


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
    _leave_with(lambda: viewing.view(run, chosen, show, limit, tokens))


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

    _leave_with(lambda: explaining.explain(run, live))


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

    _leave_with(lambda: print(page.report(runs, output)))


def start_job(job: Job) -> float | None:
    """Check one composed job, then plan or run it; the objective's value goes back to a sweeper (CLI-9)."""
    from agrpo import launch

    return launch.start(job)


def _leave_with(run: object) -> None:
    """Call `run` and turn how it ends into lines on stderr and an exit code (CLI-11)."""
    from agrpo.metrics.output import say

    try:
        run()
    except AgrpoError as error:
        lines = error.problems if isinstance(error, ConfigError) else [str(error)]
        for line in lines:
            say(line)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(getattr(interrupt, "exit_code", 130)) from None


def main() -> None:
    try:
        app()
    finally:
        gc.freeze()  # as in agrpo.lifecycle: the end looks through everything otherwise


if __name__ == "__main__":
    main()
