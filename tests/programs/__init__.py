"""Programs that try to make graphed training differ from eager training.

Random ones: ``generator`` (a seed becomes a ``specification``), made of ``bodies``,
``bodies_python``, ``blocks`` (``model``), ``stepping`` and ``events``; ``running`` runs one eagerly
and graphed (``world``, ``sessions``) and says how they compare, ``minimise`` makes a failure
smaller, ``run`` is the command.

Hand-written ones: ``adversary_*`` are tables of ``cases``; ``scripts`` has what they share.
"""
