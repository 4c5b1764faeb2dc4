"""Compute what a step should have given: the chain of stages, and the checks that the reference itself passes."""
