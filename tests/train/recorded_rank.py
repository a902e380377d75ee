"""One trainer rank over a recorded stream of samples: `python -m tests.train.recorded_rank MODEL STREAM` prints its losses.

Every step trains three groups of the stream, whatever the number of ranks, so that runs with other numbers can be
compared.
"""

import gc
import json
import os
import sys
from pathlib import Path

from agrpo import wire
from agrpo.loss.score_centering import ScoreCentering
from agrpo.metrics.window import Window
from agrpo.model.load import load_model
from agrpo.model.optim import Updater
from agrpo.model.shard import open_mesh, shard
from agrpo.packer.cost import Cost
from agrpo.packer.tree import Tree
from agrpo.sections import Model, Optimizer
from agrpo.train.loop import Trainer
from agrpo.train.parity import ParityProbe
from agrpo.train.ranks import Ranks, divide
from agrpo.train.shares import Sharing

BUDGET, GROUPS_PER_STEP = 512, 3


def main(model_path: str, stream: str) -> None:
    ranks = Ranks(use_cpu=True, timeout_s=60)
    section = Model(path=model_path, precision="no")
    model = load_model(section, ranks.device)
    shard(model, section, open_mesh(section, ranks.device))
    updater = Updater(model, Optimizer(learning_rate=1e-3), None)
    parity = ParityProbe(ranks.device, is_truncated=False, warn=None, stop=None)
    trainer = Trainer(ranks, model, updater, ScoreCentering(), None, None, None, parity, 1.0, 1, 1)
    planner = Tree().planner(ranks.world_size, BUDGET, Cost.of_config(model.config), 1)
    records = []
    groups = wire.frames(Path(stream).read_bytes())
    for first in range(0, len(groups), GROUPS_PER_STEP):
        works = None
        if ranks.is_first:
            planner.rebuild(s for group in groups[first : first + GROUPS_PER_STEP] for s in group.samples)
            works = divide(planner.flush(), Sharing())
        trainer.step(ranks.share(works))
        window = Window()
        trainer.figures.record(window, 1)
        norm = trainer.window.record(0)["grad_norm"]
        records.append({**window.record(len(records) + 1), "grad_norm": norm})
    if ranks.is_first:
        print(json.dumps(records))
    ranks.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
    gc.freeze()  # the end looks through everything otherwise, which takes longer than a test's own work
