"""One file a command of `lockstep`."""
