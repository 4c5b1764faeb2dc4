"""The evidence of a step: gathered from a session, in memory or on disk."""
