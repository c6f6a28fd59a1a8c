"""Partial graphs: the scopes of a model."""
