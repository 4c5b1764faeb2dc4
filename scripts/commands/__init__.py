"""The commands of `lockstep`, one a file."""
