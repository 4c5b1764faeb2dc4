"""What `lockstep bench peers` runs beside Lockstep: the same step, written as others write it."""
