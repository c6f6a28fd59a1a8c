"""Where the time of a training step goes: kernels by group, gaps, copies, and their floors."""
