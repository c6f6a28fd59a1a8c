"""AdamW's update of all parameters in two launches: ``reference`` says what it computes.

``moe_graphs.optim`` is what is called. ``state_codes`` are the averages in 8 bits.
"""
