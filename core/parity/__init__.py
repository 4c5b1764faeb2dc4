"""The parity engine: compares any two sessions through the seam of core/backend.py and names where they part.

evidence/    what a step showed        reference/   what it should have shown     measures/   distances and bounds
judge/       the judgement of a step   modes/       the ways in                   diagnose/   what follows an alarm
watch/       the same inside a training loop of the user's own (docs/guide/watch.md)
honest/      one function beside its plain writing, in a user's test (docs/guide/assert_honest.md)
"""
