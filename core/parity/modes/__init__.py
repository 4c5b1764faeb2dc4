"""The ways in: side by side, beside a run, later from a run's records, by bisection, free running."""
