"""Where the parts of a preparation are computed: processes of this machine, or Ray on one or many."""
