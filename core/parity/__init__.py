"""The parity engine: compares any two sessions through the seam of core/backend.py and says where they part."""
