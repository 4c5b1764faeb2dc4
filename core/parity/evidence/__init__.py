"""What a step showed: gathered from a session, in memory or on disk."""
