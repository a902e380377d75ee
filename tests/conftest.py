"""The order of files, and how the processes of runs start."""

import subprocess

import pytest

from tests import warm

# What compares the two ways to start, before any test has changed its worker; then whole runs, longest first, so that no worker
# is left alone with one of them at the end.
FIRST = (
    "test_warm.py",
    "test_faults.py", "test_run.py", "test_launch_supervisor.py", "test_model_memory.py", "test_launch_doctor.py", "test_kill.py",
    "test_restart.py", "test_nodes.py", "test_resume.py", "test_run_lora.py", "test_run_evaluation.py", "test_security.py",
    "test_launch_export.py", "test_other_names.py", "test_train_uploads.py", "test_config_faults.py", "test_model_ranks.py",
    "test_sync_ranks.py", "test_sync_packed.py", "test_metrics_run.py", "test_recipes_agent_openai.py", "test_cli.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """By file and in the order of each file, so that what a module shares is made once."""
    place = {name: index for index, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_configure():
    warm.install()


@pytest.fixture
def cold(monkeypatch):
    """Every process starts as a user's does: a new interpreter that imports everything."""
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
