"""Tests of the examples for clusters: they match their schemas, and their commands parse."""
