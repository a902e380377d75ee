"""`agrpo serve-check --probe`: the model of this configuration against the servers, before and after one weight sync."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from agrpo.config import Config
from agrpo.errors import ServerError
from agrpo.serve.check import Row


def probe(config: Config, urls: Sequence[str], run_dir: Path) -> list[Row]:
    """Rows `log-probs`, `weight sync` and `log-probs after sync`; the servers then hold the weights of `model.path`.

    `config` is resolved. Loads the model on the trainer's first device; torch must not be loaded yet.
    """
    trainer = (config.run.devices or {}).get("trainer", [])
    if trainer or config.run.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.devices.visible_ids(trainer[:1])
    import torch

    from agrpo.model.load import load_model
    from agrpo.model.shard import open_mesh, shard
    from agrpo.model.tokenizer import load_tokenizer
    from agrpo.model.weights import full_tensors
    from agrpo.serve.flags import trainer_dtype
    from agrpo.sync.control import ServerControl
    from agrpo.sync.proof import Proof
    from agrpo.train.facts import probe_ids, served_model
    from agrpo.train.proof import prove

    device = torch.device("cuda" if trainer else "cpu")
    model, tokenizer = load_model(config.model, device), load_tokenizer(config.model)
    shard(model, config.model, open_mesh(config.model, device))
    server = ServerControl(urls, config.server.timeout)

    def proof(limit: float | None) -> Proof:
        name, ids = served_model(server)["id"], probe_ids(tokenizer)
        dtype = trainer_dtype(config.model)
        return Proof(server, model=name, prompt_ids=ids, parity_limit=limit, trainer_dtype=dtype)

    rows = []
    if server.is_paused():
        # A paused server answers nothing; it holds what a run that died left there.
        rows.append(Row(urls[0], "log-probs", "skip", "the server is paused; compared after the sync"))
    else:
        rows.append(_compared(config, urls[0], lambda: prove(proof(None), model, 0, device)))
    session = config.sync.open(server, run_dir, device, 0, 1)
    try:
        times = session.send(full_tensors(model, trainable=False), 0, lambda: None)
        rows.append(
            Row(urls[0], "weight sync", "ok", f"{times.total_s:.2f} s, paused {times.total_s - times.pause_s:.2f} s")
        )
        gap = prove(proof(config.server.parity_limit), model, 0, device)
        rows.append(Row(urls[0], "log-probs after sync", "ok", f"differ by {gap:.2g} in the mean"))
    except ServerError as error:
        name = "log-probs after sync" if len(rows) > 1 else "weight sync"
        rows.append(Row(urls[0], name, "fail", str(error)))
    finally:
        session.close()
    paused = server.is_paused()
    rows.append(Row(urls[0], "resumed", "fail" if paused else "ok", "the server is still paused" if paused else "yes"))
    return rows


def _compared(config: Config, url: str, measure: Callable[[], float]) -> Row:
    """How far the server's log-probs are from the model's as they stand; other weights are no fault before a sync."""
    try:
        gap = measure()
    except ServerError as error:
        return Row(url, "log-probs", "fail", str(error))
    limit = config.server.parity_limit
    if limit is not None and gap > limit:
        found = f"differ by {gap:.2g} in the mean, limit {limit:g}: the server holds other weights than model.path"
        return Row(url, "log-probs", "warn", found)
    return Row(url, "log-probs", "ok", f"differ by {gap:.2g} in the mean")
