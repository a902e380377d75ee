"""`python -m agrpo.train RUN_DIR`, once per rank: open every part, train, leave the model and a summary behind."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from agrpo.lifecycle import Life, run_process, without_collector


def main(run_dir: Path, life: Life) -> None:
    with without_collector():
        from agrpo.config import load
        from agrpo.train.run import TrainRun

    config = load(run_dir)
    is_first = int(os.environ.get("RANK", 0)) == 0
    level = config.logger.level.upper() if is_first else "WARNING"
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = TrainRun(config, run_dir, life)
    try:
        run.open()
        run.train()
        run.finish()
    finally:
        run.close()


if __name__ == "__main__":
    sys.exit(run_process(f"trainer{os.environ.get('RANK', 0)}", Path(sys.argv[1]), main))
