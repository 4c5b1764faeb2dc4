"""Follow up a check that disagreed: run the step again, find the cause, write a script that reproduces it."""
