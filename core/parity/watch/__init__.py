"""`lockstep.watch`: the parity engine inside a training loop that knows nothing of Lockstep."""
