"""One model, built with the parts of each library that trains it: see `peers.py` beside this."""
