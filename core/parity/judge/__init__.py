"""Judge a step: compare the evidence with the reference, link by link."""
