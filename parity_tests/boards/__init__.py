"""The scoreboards of planted faults, and their tests."""
