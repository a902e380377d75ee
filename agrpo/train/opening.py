"""What a rank trains with and what rank 0 feeds it from, put together from the configuration."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from agrpo.config import Config
from agrpo.ledger import AdmissionCredit, Ledger
from agrpo.model.optim import Updater
from agrpo.packer.cost import Cost
from agrpo.serve.flags import trainer_dtype
from agrpo.sync.control import ServerControl
from agrpo.sync.proof import Proof
from agrpo.train.feeder import Feeder
from agrpo.train.loop import Trainer
from agrpo.train.outage import Outage
from agrpo.train.parity import ParityProbe
from agrpo.train.proximal import NotNeeded, Recomputed
from agrpo.train.ranks import Ranks
from agrpo.train.sender import open_sender
from agrpo.train.state import Progress
from agrpo.train.trace import NoTrace, Trace

_log = logging.getLogger(__name__)


def open_trainer(
    config: Config,
    server: ServerControl,
    *,
    model_name: str | None,  # under which the server serves it; rank 0 alone needs it
    probe_ids: list[int],  # prompt of the proof of arrival
    model: torch.nn.Module,
    updater: Updater,
    ranks: Ranks,
    run_dir: Path,
    run_id: str,
    version: int,
    outage: Outage,
) -> Trainer:
    """The steps of one rank, and its part in sending weights; sends nothing yet."""
    proof = Proof(
        server,
        model=model_name,
        prompt_ids=probe_ids,
        parity_limit=config.server.parity_limit,
        trainer_dtype=trainer_dtype(config.model),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    parity = ParityProbe(
        ranks.device,
        is_truncated=config.sampler.is_truncated,
        warn=config.run.parity_warn,
        stop=config.run.parity_stop,
    )
    return Trainer(
        ranks=ranks,
        model=model,
        updater=updater,
        loss=config.loss,
        sender=open_sender(config, server, model, run_dir, run_id, ranks),
        proof=proof,
        outage=outage,
        parity=parity,
        proximal=Recomputed(config.sampler.temperature)
        if getattr(config.loss, "wants_proximal", False)
        else NotNeeded(),
        trace=Trace(run_dir, ranks.rank) if config.rollout.dump_to_file else NoTrace(),
        temperature=config.sampler.temperature,
        version=version,
        every_steps=config.sync.every_steps,
    )


def open_feeder(
    config: Config, trainer: Trainer, ledger: Ledger, progress: Progress, max_model_len: int, num_ranks: int
) -> Feeder:
    """Rank 0's feed; the trainer holds the version that was sent. Listens to nobody yet."""
    budget = config.packer.token_budget or max_model_len
    if budget < max_model_len:
        _log.warning(
            "packer.token_budget=%d is below the server's context of %d tokens: longer samples are dropped",
            budget, max_model_len,
        )  # fmt: skip
    accumulation = config.run.gradient_accumulation_steps
    planner = config.packer.planner(num_ranks, budget, Cost.of_config(trainer.model.config), accumulation)
    planner.next_index = progress.step + 1
    first_version, first_step, every = trainer.version, progress.step, config.sync.every_steps
    saved = progress.ledger or {}
    credit = AdmissionCredit(
        config.rollout.max_staleness,
        config.rollout.allowance_window_steps,
        budget * num_ranks * accumulation,
        saved.get("step_tokens", ()),
    )
    return Feeder(
        planner=planner,
        ledger=ledger,
        credit=credit,
        settings=config.rollout,
        version_at=lambda step: first_version + (step - 1) // every - first_step // every,
        version=first_version,
        step=first_step,
        advantage=config.advantage,
        asks_loop=config.rollout.loop is not None,
        loop_state=progress.loop_state,
        concurrency_cap=saved.get("concurrency_cap"),
        adapters=trainer.sender.prefix,
    )
