"""The commands that take a configuration as overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agrpo.cli.app import app, leave_with
from agrpo.cli.overrides import ConfigDir, Overrides, OverridesCommand

if TYPE_CHECKING:
    from agrpo.config.runner import Job

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


@app.command(
    cls=OverridesCommand,
    help=TRAIN_HELP,
    epilog="Exit codes: 0 success, 1 unexpected error, 2 wrong usage, 3 configuration refused, "
    "4 server or host check failed, 5 contract error in user code, 6 stall or time-out, "
    "129, 130, 138, 140, 143 ended by SIGHUP, SIGINT (Ctrl-C), SIGUSR1, SIGUSR2, SIGTERM.",
)
def train(
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show the plan; start nothing.")] = False,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="One job per combination of a,b values.")] = False,
    config_dir: ConfigDir = None,
    cfg: Annotated[
        str | None, typer.Option(metavar="job|hydra|all", help="Print the configuration; start nothing.")
    ] = None,
    resolve: Annotated[bool, typer.Option("--resolve", help="With --cfg: resolve interpolations.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the start, warnings and the end.")] = False,
) -> None:
    from agrpo.config import runner

    if cfg not in (None, "job", "hydra", "all"):
        raise typer.BadParameter(f"--cfg must be job, hydra or all, got {cfg}")
    request = runner.Request(list(overrides or []), dry_run, multirun, config_dir, cfg, resolve, quiet)
    leave_with(lambda: runner.run(request, start_job))


SERVE_HELP = """Start the server of a configuration alone, in the foreground. OVERRIDES are those of agrpo train.

\b
Examples:
  agrpo serve +recipe=deepmath server=vllm              the server that agrpo train would start, at port 8000
  agrpo serve +recipe=deepmath server=vllm --print      its command as one line, to run elsewhere
  agrpo serve +recipe=deepmath server=external server.base_url=http://node7:8000 --print
"""


@app.command(cls=OverridesCommand, help=SERVE_HELP)
def serve(
    overrides: Overrides = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command as one line; start nothing.")] = False,
    config_dir: ConfigDir = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import serve as serving

    request, found = runner.Request(list(overrides or []), config_dir=config_dir), []
    call = serving.lines if print_only else serving.foreground
    leave_with(lambda: runner.run(request, lambda job: found.append(call(job))))
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


@app.command("serve-check", cls=OverridesCommand, help=SERVE_CHECK_HELP)
def serve_check(
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also load the model, compare log-probs, and send the weights once.")
    ] = False,
    config_dir: ConfigDir = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import check

    request = runner.Request(list(overrides or []), config_dir=config_dir)
    leave_with(lambda: runner.run(request, lambda job: check.serve_check(job, as_json, probe)))


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


@app.command(cls=OverridesCommand, help=DOCTOR_HELP)
def doctor(
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_server: Annotated[bool, typer.Option("--no-server", help="Start no server: leave its checks and the step out.")] = False,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For each part without a server.")] = 120,
    step_limit: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For the step, beyond server.timeout.")
    ] = 600,
    config_dir: ConfigDir = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import doctor as examining

    request = runner.Request(list(overrides or []), config_dir=config_dir)
    options = examining.Options(as_json, not no_server, limit, step_limit)
    leave_with(lambda: examining.examine(request, options))


EVAL_HELP = """Play the evaluations of a configuration for MODEL, a folder or a Hub id, with a server started for it.

OVERRIDES are those of agrpo train; the group eval says what is asked. The mean reward comes with its 95 % interval over
prompts (normal approximation), pass@k is the unbiased estimate. Results go to evaluation.json in run.output_dir. Ends with
exit code 4 where an evaluation scored nothing.

\b
Examples:
  agrpo eval runs/quickstart/2026-01-31_12-00-00/model +recipe=quickstart
  agrpo eval MODEL +recipe=quickstart eval.heldout.num_rollouts=8 'eval.heldout.pass_at=[1,4,8]' --json
"""


@app.command("eval", cls=OverridesCommand, help=EVAL_HELP)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config_dir: ConfigDir = None,
) -> None:
    from agrpo.config import runner
    from agrpo.launch import evaluate as evaluating

    quoted = "'" + model.replace("\\", "\\\\").replace("'", "\\'") + "'"  # a path may hold what the override grammar reads
    request = runner.Request([*(overrides or []), f"model.path={quoted}"], config_dir=config_dir)
    leave_with(lambda: runner.run(request, lambda job: evaluating.evaluate(job, as_json)))


def start_job(job: Job) -> float | None:
    """Check one composed job, then plan or run it; the objective's value goes back to a sweeper (CLI-9)."""
    from agrpo import launch

    return launch.start(job)
