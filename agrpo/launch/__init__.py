"""The supervisor: one composed job becomes processes, watched from start to end, with one way out and one exit code."""

from agrpo.launch.job import start

__all__ = ["start"]
