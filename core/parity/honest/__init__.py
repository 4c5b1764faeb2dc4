"""`lockstep.assert_honest`: compare a user's function, forward and backward, with a plain version of it."""
