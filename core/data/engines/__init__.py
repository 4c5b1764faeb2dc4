"""Engines that compute the parts of a preparation: processes of this machine, or Ray on one machine or many."""
