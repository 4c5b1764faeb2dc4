"""The run directory, its history and branches, checkpoints while it trains, and its launch."""
