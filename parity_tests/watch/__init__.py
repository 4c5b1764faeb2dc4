"""Tests of `lockstep.watch`: training loops written without Lockstep, and faults planted in them."""
