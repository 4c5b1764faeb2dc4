"""Tests of evidence on disk: folders of tensors, how they are written and how they are read."""
