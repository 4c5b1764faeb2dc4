"""Plant mutants (core/mutate) into the torch trainer from outside: the trainer has no code for them."""
