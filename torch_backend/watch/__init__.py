"""`lockstep.watch` for a user's own module: a copy in FP64 is the truth, a copy in the training dtypes is the twin."""
