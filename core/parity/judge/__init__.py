"""The judgement of a step: evidence against the reference, link by link."""
