"""`lockstep.watch`: parity checks in a training loop of the user."""
