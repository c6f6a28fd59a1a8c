"""Profiles of a training step: time of kernels by group, gaps, copies, and floors."""
