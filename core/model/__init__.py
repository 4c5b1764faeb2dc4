"""The model as data: names, shapes, groups, initial weights, and the costs of a step."""
