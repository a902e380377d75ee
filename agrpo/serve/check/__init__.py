"""What can be wrong between a configuration and running servers, asked before any model is loaded (SRV-5 to SRV-13)."""

from agrpo.serve.check.look import Row
from agrpo.serve.check.run import run_checks

__all__ = ["Row", "run_checks"]
