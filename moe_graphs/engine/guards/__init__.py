"""Guards: a graph's assumptions about the Python around it, compared at every call."""
