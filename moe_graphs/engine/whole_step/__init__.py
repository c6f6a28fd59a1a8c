"""The parts of ``FullIteration``: how a whole step is rehearsed, recorded, guarded and replayed."""
