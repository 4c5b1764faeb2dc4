"""Engines that compute the parts of a preparation: processes on this machine, or Ray on one or many machines."""
