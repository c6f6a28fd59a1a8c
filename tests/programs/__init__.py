"""Programs that try to make graphed training differ from eager training.

Random programs: ``generator`` makes a ``specification`` from a seed. Its parts are ``bodies``,
``bodies_python``, ``blocks`` (put together by ``model``), ``stepping`` and ``events``. ``running``
runs a program eagerly and graphed (with ``world`` and ``sessions``) and compares the two runs.
``minimise`` makes a failing program smaller, and ``run`` is the command.

Hand-written programs: the files ``adversary_*`` are tables of ``cases``; ``scripts`` has what they
share.
"""
