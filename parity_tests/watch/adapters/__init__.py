"""Tests of `lockstep.watch_trainer` and the other adapters, each on its library's real training loop."""
