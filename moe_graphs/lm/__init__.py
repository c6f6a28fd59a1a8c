"""The language model that ``moe-graphs train`` trains."""
