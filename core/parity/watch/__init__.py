"""`lockstep.watch`: the parity engine inside a training loop of the user's own."""
