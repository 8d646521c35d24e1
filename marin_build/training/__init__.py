"""The trainer: loss, schedule, optimizer, mesh, state, checkpoints, step and loop."""
