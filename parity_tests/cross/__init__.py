"""Compare both backends with each other, and both with independent implementations."""
