"""What a run's folder says, during and after the run: `agrpo view`, `agrpo explain`, `agrpo report`."""
