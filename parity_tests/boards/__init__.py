"""The results tables of planted faults, and their tests."""
