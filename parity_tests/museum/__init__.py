"""Tests of `lockstep museum`: its data, the command on a stub, and the exhibits whose packages are installed."""
