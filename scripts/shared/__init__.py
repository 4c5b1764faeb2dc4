"""Shared by several commands: arguments, backends by name, tables, worker processes."""
