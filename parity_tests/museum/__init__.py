"""`lockstep museum`: its data, its command on a stub, and the exhibits whose packages are in the present environment."""
