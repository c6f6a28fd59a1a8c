"""Directories of Hugging Face, read and written: config.json and the weights."""
