"""Functions in C that the user's code may call in what is captured; all others make calls eager.

A function is here if its answer depends on nothing but its arguments and the object that it
belongs to, and guards compare those. Functions of torch, and those of the libraries that are taken
for granted (``introspection.py``), are known without being here. For each entry
``tests/engine/test_known_functions.py`` makes a call, changes its arguments, and looks whether
guards see it.

Not here on purpose: what asks for the identity of an object (``id``, ``hash``), for the time, for
the process, for files, for the interpreter, or for what other threads do; objects whose state is in
C and moves (files, ``mmap``, locks, queues); ``pickle``; and functions of extensions of the user's
own, of which nobody knows what they keep.
"""

from __future__ import annotations

# Module -> names of functions.
FUNCTIONS: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "builtins": (
            "__build_class__ __import__ abs all any ascii bin callable chr delattr dir divmod "
            "format getattr hasattr hex isinstance issubclass iter len locals max min next oct ord "
            "pow print repr round setattr sorted sum vars"
        ),
        "math": (
            "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist "
            "erf erfc exp exp2 expm1 fabs factorial floor fma fmod frexp fsum gamma gcd hypot "
            "isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf "
            "nextafter perm pow prod radians remainder sin sinh sqrt sumprod tan tanh trunc ulp"
        ),
        "_operator": (
            "abs add and_ concat contains countOf delitem eq floordiv ge getitem gt iadd iand "
            "iconcat ifloordiv ilshift imatmul imod imul index indexOf inv invert ior ipow irshift "
            "is_ is_not isub itruediv ixor le length_hint lshift lt matmul mod mul ne neg not_ or_ "
            "pos pow rshift setitem sub truediv truth xor"
        ),
        "_functools": "cmp_to_key reduce",
        "itertools": "tee",
        "_bisect": "bisect_left bisect_right insort_left insort_right",
        "_heapq": "heapify heappop heappush heappushpop heapreplace",
        "_struct": "calcsize iter_unpack pack pack_into unpack unpack_from",
        "zlib": "adler32 crc32",
        "posix": "fspath",
        "_hashlib": "openssl_md5 openssl_sha1 openssl_sha256 openssl_sha512",
        "sys": "exc_info intern",
    }.items()
}
_CLASSES = """
builtins.str builtins.bytes builtins.bytearray builtins.int builtins.float builtins.complex
builtins.tuple builtins.list builtins.dict builtins.set builtins.frozenset builtins.range
builtins.slice builtins.memoryview builtins.object builtins.type builtins.property
builtins.mappingproxy builtins.generator builtins.dict_keys builtins.dict_values
builtins.dict_items builtins.BaseException collections.deque collections.OrderedDict
collections.defaultdict array.array re.Pattern re.Match decimal.Decimal datetime.timedelta
datetime.time datetime.tzinfo datetime.timezone _struct.Struct _contextvars.ContextVar
_random.Random itertools.chain _hashlib.HASH
"""
# Class -> names of its methods that are not known; all others are. Guards follow what objects of
# these classes hold, or compare their values, or the block has made them itself.
CLASSES: dict[str, frozenset[str]] = {
    **dict.fromkeys(_CLASSES.split(), frozenset()),
    "datetime.datetime": frozenset({"now", "today", "utcnow"}),
    "datetime.date": frozenset({"today"}),
    # They write what people read; see what the promise says of side effects without state.
    "_io.TextIOWrapper": frozenset({"read", "readline", "readlines", "seek", "tell", "truncate"}),
}
# Functions of torch whose answers change with nothing that guards compare.
NOT_OF_TORCH = frozenset({"Tensor.data_ptr", "Generator.initial_seed", "get_num_threads"})
