"""Plant mutants (core/mutate) into the torch trainer from outside: no part of the trainer refers to them."""
