"""What a profiler's trace says of a training step."""
