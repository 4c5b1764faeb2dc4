"""Ways to check a run: side by side, during training, later from its records, by bisection, free running."""
