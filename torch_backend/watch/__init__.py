"""`lockstep.watch` against the user's own module: a copy of it in FP64 is the truth, one as it trains is the twin."""
