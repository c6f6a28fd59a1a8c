"""Grouped GEMM: ``op`` and ``gather`` are what is called, ``reference`` says what they compute.

``launch`` is the kernels' host side; it takes a tile from ``variants`` and a work list from
``tiles``. The kernels: ``gluon_rows`` and ``gluon_weights`` (with ``gluon_parts``) on Hopper,
``tma`` on later GPUs, ``pointer`` on earlier ones and in Triton's interpreter.
"""
