"""What a run chooses by name, each one object with everything that core must know of it.

A new precision policy or optimizer is an entry here, and its mathematics in each backend.
"""
