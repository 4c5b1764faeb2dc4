"""Both backends on the same numbers, and both against implementations that are not ours."""
