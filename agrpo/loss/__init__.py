"""Per-token objectives: pure functions from token terms to a loss per trained token."""
