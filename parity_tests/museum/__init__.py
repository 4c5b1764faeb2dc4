"""`lockstep museum`: its data, its command on a stub, and exhibits whose packages are present."""
