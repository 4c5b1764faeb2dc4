"""`lockstep.watch`: somebody's own loop, and what is planted in it."""
