"""`lockstep runs`: every run below a folder as one row, read from the ends of its files."""
