"""`lockstep.watch_trainer` and its like, each on the real library's loop."""
