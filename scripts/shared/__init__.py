"""What several commands share: arguments, backends by name, tables, worker processes."""
