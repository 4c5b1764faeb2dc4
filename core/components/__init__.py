"""Components that a run chooses by name: each is one object with all of its properties that core uses.

A new precision policy, optimizer, loss head or attention kernel is an entry here, and its mathematics in each backend.
"""
