"""What a step should have shown: the chain of stages, and the checks that the reference itself passes."""
