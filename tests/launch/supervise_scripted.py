"""A supervisor of scripted processes: `supervise_scripted.py RUN_DIR SERVER TRAINER0 TRAINER1 ROLLOUT [KEY=VALUE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from agrpo.config import check, compose, detect
from agrpo.errors import AgrpoError
from agrpo.launch.plan import Launch, Ports, Processes, resolved
from agrpo.launch.supervisor import supervise

SCRIPT = str(Path(__file__).with_name("scripted_process.py"))


def configuration(run_dir: str, settings: list[str]) -> object:
    tree = compose(["+recipe=quickstart", *settings])
    tree["run"] |= {"output_dir": run_dir, "num_processes": 2}
    tree["model"]["path"] = "owner/some-model"
    tree["data"]["path"] = str(Path(__file__).with_name("two_prompts.jsonl"))
    tree["eval"] = {}
    config, _ = check(tree, detect())
    return resolved(config)


def main(run_dir: str, server: str, trainer0: str, trainer1: str, rollout: str, *settings: str) -> int:
    def processes(config: object, folder: Path, ports: Ports) -> Processes:
        def launch(name: str, script: str) -> Launch:
            return Launch(name, [sys.executable, SCRIPT, name, str(folder), script, str(ports.server)], {})

        trainers = [launch("trainer0", trainer0), launch("trainer1", trainer1)]
        return Processes(launch("server", server), trainers, launch("rollout", rollout))

    try:
        supervise(configuration(run_dir, list(settings)), [], [], processes, lambda *_: None)
    except AgrpoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return getattr(interrupt, "exit_code", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
