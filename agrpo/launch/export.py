"""`agrpo export`: from a run or one of its checkpoints to a Hugging Face folder, and from there to a hub."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from agrpo.config import Config, load
from agrpo.config.checkpoint_folder import complete, is_complete, step_of
from agrpo.errors import ConfigError
from agrpo.lifecycle import exported_step

MERGED, ADAPTER = "merged", "adapter"


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported: a checkpoint, or the folders that a finished run left; `step` is its name."""

    run_dir: Path
    checkpoint: Path | None  # None: the run's own export

    @property
    def name(self) -> str:
        return "end" if self.checkpoint is None else self.checkpoint.name


def source_of(path: Path) -> Source:
    """A run's folder means the model that it exported, or its newest checkpoint where that is of a later step. ConfigError
    for anything else."""
    path = path.expanduser().absolute()
    if (path / "config.yaml").exists():
        found = complete(path / "checkpoints")
        newest = found[-1] if found else None
        if (path / "model" / "config.json").exists():
            # A run that was continued and did not finish has an older model beside its checkpoints.
            exported = exported_step(path)
            is_older = newest is not None and exported is not None and exported < step_of(newest)
            return Source(path, newest if is_older else None)
        if newest is None:
            raise ConfigError(f"{path} has neither a folder model nor a checkpoint; continue it with run.resume=auto")
        return Source(path, newest)
    if is_complete(path):
        run_dir = path.parents[1]
        if not (run_dir / "config.yaml").exists():
            raise ConfigError(f"{path} does not lie in its run: {run_dir}/config.yaml says how to read it, and is missing")
        return Source(run_dir, path)
    raise ConfigError(f"{path} is neither a run's folder nor one of its folders checkpoints/step-NNNNNN")


def export(path: Path, output: Path | None, kind: str | None, repo: str | None, private: bool = False) -> Path:
    """Write the folder, upload it where `repo` is named; the folder. `kind` None: the whole model, adapter merged in."""
    source = source_of(path)
    config = load(source.run_dir)
    if kind == ADAPTER and not config.model.lora.enabled:
        raise ConfigError("--adapter: this run trained the whole model (model.lora.enabled=false); use --merged")
    kind = kind or MERGED
    output = (output or source.run_dir / "export" / f"{source.name}-{kind}").expanduser().absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} exists already; choose another folder, or remove it")
    beside = output.with_name(f".{output.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        _write(source, config, kind, beside)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            output.rmdir()
        beside.rename(output)
    except OSError as error:
        if error.errno is None:  # of a library: no file of the system's, but a model that it did not find
            raise ConfigError(f"{source.run_dir}: {' '.join(str(error).split())}") from error
        raise ConfigError(f"--output: {output} could not be written: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    if repo is not None:
        from agrpo.model.hub import upload

        upload(output, repo, private=private or None, message=f"agrpo {source.run_dir.name}, {source.name}")
    return output


def _write(source: Source, config: Config, kind: str, path: Path) -> None:
    if kind == ADAPTER:
        folder = (source.checkpoint or source.run_dir) / "adapter"
        if not folder.exists():
            raise ConfigError(f"{folder} is missing; export from a checkpoint: {source.run_dir}/checkpoints/step-NNNNNN")
        shutil.copytree(folder, path)
    elif source.checkpoint is None:
        shutil.copytree(source.run_dir / "model", path)
    else:
        _write_merged(source.checkpoint, config, path)


def _write_merged(checkpoint: Path, config: Config, path: Path) -> None:
    from agrpo.model import checkpoint as checkpoints
    from agrpo.model.load import load_model
    from agrpo.model.tokenizer import load_tokenizer

    # Nothing is forwarded here, so a back end that needs a GPU is no hindrance.
    model = load_model(dataclasses.replace(config.model, attention_backend="auto"), "cpu")
    checkpoints.restore_weights(checkpoint, model)
    checkpoints.export_merged(model, load_tokenizer(config.model), path, checkpoints.export_dtype(config.model))
