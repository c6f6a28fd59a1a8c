"""Parts of a training step: optimizer steps, scaling, averages, loaders, overflow."""
