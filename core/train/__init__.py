"""The training loop, and computations around a step."""
