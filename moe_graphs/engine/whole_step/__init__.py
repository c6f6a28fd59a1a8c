"""The parts of `FullIteration`: how a whole step is tried, recorded, guarded and replayed."""
