"""Models from and to Hugging Face's directories: their config.json and their weights."""
