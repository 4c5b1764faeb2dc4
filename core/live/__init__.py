"""`lockstep report --watch`: the report of a run that is being written, served to this machine alone."""
