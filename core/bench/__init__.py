"""The benches: measurements, files of results, and pages made from them."""
