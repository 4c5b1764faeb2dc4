"""The model as data: names, shapes, groups, initial weights, what a step costs."""
