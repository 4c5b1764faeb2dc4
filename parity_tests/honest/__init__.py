"""Tests of `assert_honest`."""
