"""The parity engine: compare any two sessions through core/backend.py, and name the first stage that disagrees.

evidence/    results of a step          reference/   expected results      measures/   distances and bounds
judge/       the verdict on a step      modes/       ways to check a run   diagnose/   follow-up of an alarm
watch/       checks in a user's own training loop (docs/guide/watch.md)
honest/      a function against its plain version, in a user's test (docs/guide/assert_honest.md)
"""
