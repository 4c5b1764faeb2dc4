"""Silent bugs that shipped, run from the released packages: `lockstep museum`."""
