"""What follows a check that disagreed: the step run again, its cause, a script that repeats it."""
