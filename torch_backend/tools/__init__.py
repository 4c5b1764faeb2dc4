"""Tools around a step: benchmark, profiler, plan, sketches, generation."""
