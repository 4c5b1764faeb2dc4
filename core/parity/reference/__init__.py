"""The expected results of a step: the chain of stages, and the checks that the reference itself passes."""
