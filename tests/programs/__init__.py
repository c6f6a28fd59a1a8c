"""Programs that try to make graphed training differ from eager training.

Random programs: ``generator`` makes a ``specification`` from a seed. Its parts are ``bodies``,
``bodies_python``, ``blocks`` (put together by ``model``), ``stepping`` and ``events``. ``running``
runs a program eagerly and graphed (with ``world`` and ``sessions``) and compares the two runs.
``minimise`` makes a failing program smaller, and ``run`` is the command.

Mutated programs: ``mutable_programs`` makes programs around Python state of every kind
(``mutable_states``, rendered and installed by ``mutable_sources``). ``mutating`` trains a program
until it replays, takes an object that its step can reach (``reachable_objects``), changes it
(``mutations``), and compares with an eager twin that is changed in the same way.
``known_silent`` has what is silent today, and ``run_mutations`` is the command.

Hand-written programs: the files ``adversary_*`` are tables of ``cases``; ``scripts`` has what they
share.
"""
