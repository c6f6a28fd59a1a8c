"""Graphs of any callables, ahead of time."""
