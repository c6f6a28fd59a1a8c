"""Grouped GEMM: ``op``, ``gather`` and ``swiglu_gemm`` are what is called, ``reference`` says what
they compute.

``launch`` and ``launch_swiglu`` are the kernels' host side; they take a tile from ``variants`` and
a work list from ``tiles``. The kernels: ``gluon_rows``, ``gluon_swiglu`` and ``gluon_weights``
(with ``gluon_parts``) on Hopper, ``tma`` on later GPUs, ``pointer`` on earlier ones and in Triton's
interpreter.
"""
