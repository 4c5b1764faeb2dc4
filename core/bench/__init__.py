"""The bench of whole steps: what is measured, how results are kept, and the page that is made of them."""
