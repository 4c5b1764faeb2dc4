"""Plant mutants (core/mutate) into the torch trainer from outside: no part of it knows of them."""
