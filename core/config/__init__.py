"""The run's configuration: settings, the rules between them, run files."""
