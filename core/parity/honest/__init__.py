"""`lockstep.assert_honest`: one function of a user's own, forward and backward, against its plain writing."""
