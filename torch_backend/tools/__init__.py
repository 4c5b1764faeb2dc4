"""Looking at a step and timing it: bench, profile, plan, sketches, generation."""
