"""Files that stay whole: atomic writes, lines with checksums, arrays, locks, paths."""
