"""Kinds of Python state that a program's forward can read: templates of source text.

In a template ``$`` stands for the number of the piece, since no two pieces may share a name.
``{y}`` is the tensor and ``{v}`` the value that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_DICT = ("vars", "__dict__", "vars unpacked", "values of vars")
NO_COPY = ("copy", "copy of a container")
NO_GET = ("get", "match mapping")
IN_BACKWARD = ("hook of a gradient", "backward of a function")
TIMES, PLUS, CALL = "{y} * {v}", "{y} + {v}", "{v}({y})"


@dataclass(frozen=True)
class State:
    """A kind of state, and the plainest way to read it.

    Attributes:
        read: the expression that reads the value.
        init: statements of ``__init__``.
        define: statements of the module.
        local: statements of the function that makes the class.
        parameter: a parameter of the forward, with its default.
        step_local, step_parameter: the same of the step; such a state is read in the step alone.
        module: the text of a module ``settings$`` beside the program's own, which is a package.
        use: the expression that makes the next tensor.
        unfit: spellings and readers that this state does not have.
    """

    read: str
    init: str = ""
    define: str = ""
    local: str = ""
    parameter: str = ""
    step_local: str = ""
    step_parameter: str = ""
    module: str = ""
    use: str = TIMES
    unfit: tuple[str, ...] = ()


_CONFIG = "class Config$:\n    def __init__(self):\n        self.gain$, self.other$ = 1.5, 0.5"
_TWO_SCALES = "def double$(y):\n    return y * 2.0\ndef half$(y):\n    return y * 0.5"
_MODE = "class Mode$(enum.Enum):\n    A = 1\n    B = 2"
_DATACLASS = (
    "@dataclasses.dataclass\nclass Config$:\n    gain$: float = 1.5\n    other$: float = 0.5"
)
_TWO_LAYERS = "self.a$, self.b$ = nn.Linear(4, 4), nn.Linear(4, 4)"
_PART = "class Part$(nn.Module):\n    def forward(self, y):\n        return y * "
_RUN_ALL = (
    "def run$(layers, y):\n    for layer in layers:\n        y = layer(y).tanh()\n    return y"
)
_COUNT = "def count$(counts):\n    "
_WEIGHTED = "sum(n * v for n, v in enumerate({}, 1))"

STATES: dict[str, State] = {
    # ---- attributes of objects
    "attribute": State("self.gain$", "self.gain$ = 1.5"),
    "attribute of an object": State("self.cfg$.gain$", "self.cfg$ = Config$()", _CONFIG),
    "attribute of a namespace": State(
        "self.cfg$.gain$", "self.cfg$ = types.SimpleNamespace(gain$=1.5, other$=0.5)"
    ),
    "dataclass": State("self.cfg$.gain$", "self.cfg$ = Config$()", _DATACLASS),
    "frozen dataclass": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$()",
        _DATACLASS.replace("dataclass\n", "dataclass(frozen=True)\n"),
    ),
    "dataclass as a whole": State(
        "(1.5 if self.cfg$ == DEFAULT$ else 0.5)",
        "self.cfg$ = Config$()",
        _DATACLASS + "\nDEFAULT$ = Config$()",
    ),
    "dataclass as a key": State(
        "TABLE$.get(self.cfg$, 0.5)",
        "self.cfg$ = Config$()",
        _DATACLASS.replace("dataclass\n", "dataclass(unsafe_hash=True)\n")
        + "\nTABLE$ = {Config$(): 1.5, Config$(2.5): 3.5}",
    ),
    "slot": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$()",
        _CONFIG.replace(":\n    def", ":\n    __slots__ = ('gain$', 'other$')\n    def", 1),
        unfit=NO_DICT,
    ),
    "named tuple": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$(1.5, 0.5)",
        "Config$ = collections.namedtuple('Config$', ('gain$', 'other$'))",
        unfit=NO_DICT,
    ),
    "object with getattr": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$()",
        "class Config$:\n    def __init__(self):\n        self.data$ = {'gain$': 1.5}\n"
        "    def __getattr__(self, name):\n        return self.__dict__['data$'][name]",
        unfit=NO_DICT + NO_COPY,
    ),
    "object with getitem": State(
        "self.cfg$['gain$']",
        "self.cfg$ = Config$()",
        "class Config$:\n    def __init__(self):\n        self.data$ = {'gain$': 1.5}\n"
        "    def __getitem__(self, name):\n        return self.data$[name]",
        unfit=NO_DICT + NO_GET,
    ),
    "callable object": State(
        "self.fn$",
        "self.fn$ = Config$()",
        _CONFIG + "\n    def __call__(self, y):\n        return y * self.gain$",
        use=CALL,
    ),
    "object of one of two classes": State(
        "self.cfg$.gain()",
        "self.cfg$ = One$()",
        "class One$:\n    def gain(self):\n        return 1.5\n"
        "class Two$:\n    def gain(self):\n        return 0.5",
    ),
    "attribute named step": State("self.step", "self.step = 1.5"),
    "object that is copied whole": State(
        "copy.copy(self.cfg$).gain()",
        "self.cfg$ = Config$()",
        "class Config$:\n    def __init__(self):\n        self.rate$ = 1.5\n"
        "    def gain(self):\n        return sum(vars(self).values())",
    ),
    "text of a dataclass": State("len(repr(self.cfg$))", "self.cfg$ = Config$()", _DATACLASS),
    "fields of a dataclass": State(
        "sum(dataclasses.astuple(self.cfg$))", "self.cfg$ = Config$()", _DATACLASS
    ),
    "cached property": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$()",
        "class Config$:\n    rate$ = 1.5\n    @functools.cached_property\n"
        "    def gain$(self):\n        return self.rate$",
        unfit=(*NO_DICT, "copy"),
    ),
    "descriptor": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$()",
        "class Descriptor$:\n    rate$ = 1.5\n    def __get__(self, owner, kind):\n"
        "        return self.rate$\nclass Config$:\n    gain$ = Descriptor$()",
        unfit=NO_DICT,
    ),
    # ---- references to objects that are known by another path
    "reference to a layer": State(
        "self.use$", f"{_TWO_LAYERS}\nself.use$ = self.a$", use="{v}({y}).tanh()", unfit=NO_DICT
    ),
    "reference to a dict": State(
        "len(self.cfgs$) * self.now$['gain$']",
        "self.cfgs$ = {'a': {'gain$': 1.5}, 'b': {'gain$': 0.5}}\nself.now$ = self.cfgs$['a']",
    ),
    "reference to a method": State(
        "self.fn$",
        "self.a$, self.b$ = Task$(), Task$()\nself.fn$ = self.a$.head",
        "class Task$(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Linear(4, 4)\n    def head(self, y):\n        return self.l(y)",
        use=CALL,
    ),
    "list of layers": State(
        "self.order$",
        f"{_TWO_LAYERS}\nself.order$ = [self.a$, self.b$]",
        _RUN_ALL,
        use="run$({v}, {y})",
    ),
    "identity of two objects": State(
        "(1.5 if self.a$ is self.b$ else 0.5)", "self.a$ = [1, 2]\nself.b$ = self.a$"
    ),
    "identity with a sentinel": State(
        "(1.5 if self.a$ is EMPTY$ else 0.5)", "self.a$ = EMPTY$", "EMPTY$ = object()"
    ),
    "function of torch by reference": State(
        "self.act$",
        "self.acts$ = {'first$': torch.tanh, 'second$': torch.sigmoid}\n"
        "self.act$ = self.acts$['first$']",
        use="{v}({y}) * len(self.acts$)",
    ),
    "bound method of one of two objects": State(
        "self.get$()",
        "self.a$, self.b$ = Config$(1.5), Config$(0.5)\nself.get$ = self.a$.get",
        "class Config$:\n    def __init__(self, gain):\n        self.gain$ = gain\n"
        "    def get(self):\n        return self.gain$",
    ),
    "active layers of a module list": State(
        "self.active$",
        "self.layers$ = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))\n"
        "self.active$ = [self.layers$[0], self.layers$[1]]",
        _RUN_ALL,
        use="run$({v}, {y})",
    ),
    # ---- dictionaries
    "dict": State("self.gains$['first$']", "self.gains$ = {'first$': 1.5, 'second$': 0.5}"),
    "dict with a default": State(
        "self.gains$.get('first$', 2.5)", "self.gains$ = {'first$': 1.5, 'second$': 0.5}"
    ),
    "key in a dict": State(
        "(1.5 if 'first$' in self.gains$ else 0.5)", "self.gains$ = {'first$': 1, 'second$': 1}"
    ),
    "order of a dict": State(
        _WEIGHTED.format("self.gains$.values()"),
        "self.gains$ = {'first$': 1.5, 'second$': 0.5}",
    ),
    "size of a dict": State("len(self.gains$)", "self.gains$ = {'first$': 1.5, 'second$': 0.5}"),
    "ordered dict": State(
        _WEIGHTED.format("self.gains$.values()"),
        "self.gains$ = collections.OrderedDict(first$=1.5, second$=0.5)",
    ),
    "counter": State("self.gains$['first$']", "self.gains$ = collections.Counter(first$=2)"),
    "default dict": State(
        "self.gains$.get('first$', 0.5)",
        "self.gains$ = collections.defaultdict(float, first$=1.5)",
    ),
    "user dict": State("self.gains$['first$']", "self.gains$ = collections.UserDict(first$=1.5)"),
    "chain map": State(
        "self.gains$['first$']",
        "self.gains$ = collections.ChainMap({'first$': 1.5}, {'first$': 0.5})",
    ),
    "mapping proxy": State(
        "self.gains$['first$']",
        "self.data$ = {'first$': 1.5}\nself.gains$ = types.MappingProxyType(self.data$)",
        unfit=NO_COPY,
    ),
    "dict keyed by enum": State(
        "self.gains$.get(Mode$.A, 2.5)", "self.gains$ = {Mode$.A: 1.5}", _MODE
    ),
    "dict keyed by tuples": State(
        "(0.5 if (1, 0) in self.gains$ else 1.5)", "self.gains$ = {(0, 0): True}"
    ),
    "dict keyed by objects": State(
        "self.gains$.get(self.a$, 2.5)",
        "self.a$, self.b$ = Config$(), Config$()\nself.gains$ = {self.a$: 1.5}",
        _CONFIG,
    ),
    "nested dict": State(
        "self.gains$['outer$']['first$']", "self.gains$ = {'outer$': {'first$': 1.5}}"
    ),
    "names in a dict": State(
        "sum(map(len, self.gains$))", "self.gains$ = {'first$': 1, 'second$': 1}"
    ),
    "weak dict": State(
        "self.gains$.get(self.a$, 2.5)",
        "self.a$ = Config$()\nself.gains$ = weakref.WeakKeyDictionary({self.a$: 1.5})",
        _CONFIG,
    ),
    "dict of sets": State(
        "len(self.gains$['first$'])", "self.gains$ = {'first$': {1, 2}}", unfit=NO_GET
    ),
    # ---- sets
    "set": State(
        "(1.5 if 'first$' in self.names$ else 0.5)", "self.names$ = {'first$', 'second$'}"
    ),
    "set of tuples": State("(0.5 if (1, 0) in self.names$ else 1.5)", "self.names$ = {(0, 0)}"),
    "set of enums": State(
        "(1.5 if Mode$.A in self.names$ else 0.5)", "self.names$ = {Mode$.A}", _MODE
    ),
    "frozen set": State("(1.5 if 1 in self.names$ else 0.5)", "self.names$ = frozenset({1, 2})"),
    # ---- sequences
    "list": State("self.gains$[0]", "self.gains$ = [1.5, 0.5]", unfit=NO_GET),
    "long list": State("self.gains$[2500]", "self.gains$ = [1.5] * 3000", unfit=NO_GET),
    "nested list": State("self.gains$[0][0]", "self.gains$ = [[1.5], [0.5]]", unfit=NO_GET),
    "tuple": State("self.gains$[0]", "self.gains$ = (1.5, 0.5)", unfit=NO_GET),
    "deque": State("self.gains$[0]", "self.gains$ = collections.deque([1.5, 0.5])", unfit=NO_GET),
    "slice of a list": State("sum(self.gains$[1:])", "self.gains$ = [1.5, 0.5, 2.5]"),
    # ---- state in C
    "array": State("self.gains$[0]", "self.gains$ = array.array('d', [1.5, 0.5])", unfit=NO_GET),
    "bytearray": State("self.gains$[0]", "self.gains$ = bytearray(b'ab')", unfit=NO_GET),
    "memoryview": State(
        "self.gains$[0]", "self.gains$ = memoryview(bytearray(b'ab'))", unfit=NO_COPY + NO_GET
    ),
    "numpy array": State("float(self.gains$[0])", "self.gains$ = np.array([1.5, 0.5])"),
    "large numpy array": State("float(self.gains$[0])", "self.gains$ = np.ones(10_000)"),
    "numpy array of objects": State(
        "self.gains$[0]", "self.gains$ = np.array([1.5, 0.5], dtype=object)", unfit=NO_GET
    ),
    "masked array": State("float(self.gains$[0])", "self.gains$ = np.ma.ones(4)"),
    "subclass of numpy array": State(
        "float(self.gains$[0])",
        "self.gains$ = np.ones(4).view(Signal$)",
        "class Signal$(np.ndarray):\n    pass",
    ),
    "ctypes": State("self.gain$.value", "self.gain$ = ctypes.c_double(1.5)", unfit=NO_DICT),
    "ctypes structure": State(
        "self.cfg$.gain",
        "self.cfg$ = Config$(1.5)",
        "class Config$(ctypes.Structure):\n    _fields_ = [('gain', ctypes.c_double)]",
        unfit=NO_DICT,
    ),
    "itertools count": State("next(copy.copy(self.count$))", "self.count$ = itertools.count(1)"),
    "event": State("(1.5 if self.event$.is_set() else 0.5)", "self.event$ = threading.Event()"),
    "queue": State("1 + self.queue$.qsize()", "self.queue$ = queue.SimpleQueue()"),
    "thread local": State(
        "self.local$.gain$",
        "self.local$ = threading.local()\nself.local$.gain$ = 1.5",
        unfit=(*NO_COPY, "thread"),
    ),
    "context variable": State(
        "self.var$.get()", "self.var$ = contextvars.ContextVar('var$', default=1.5)"
    ),
    "text stream": State("len(self.text$.getvalue())", "self.text$ = io.StringIO('ab')"),
    "shared value": State(
        "self.gain$.value", "self.gain$ = sharedctypes.RawValue('d', 1.5)", unfit=NO_DICT + NO_COPY
    ),
    "mapped memory": State("1 + self.memory$[0]", "self.memory$ = mmap.mmap(-1, 16)"),
    "virtual subclass": State(
        "(1.5 if isinstance(self.cfg$, Base$) else 0.5)",
        "self.cfg$ = Config$()",
        f"{_CONFIG}\nclass Base$(abc.ABC):\n    pass",
    ),
    "number with an exponent": State("float(self.gain$)", "self.gain$ = decimal.Decimal('1.5')"),
    "weak reference": State(
        "self.ref$().gain$",
        "self.a$, self.b$ = Config$(), Config$()\nself.b$.gain$ = 0.5\n"
        "self.ref$ = weakref.ref(self.a$)",
        _CONFIG,
    ),
    # ---- functions
    "function": State("self.fn$", "self.fn$ = double$", _TWO_SCALES, use=CALL),
    "function in a dict": State(
        "self.fns$['first$']",
        "self.fns$ = {'first$': double$, 'second$': half$}",
        _TWO_SCALES,
        use=CALL,
    ),
    "partial": State(
        "self.fn$",
        "self.fn$ = functools.partial(scale$, gain=1.5)",
        "def scale$(y, gain):\n    return y * gain",
        use=CALL,
    ),
    "closure": State(
        "SCALE$",
        "",
        "def make$():\n    gain = 1.5\n    def scale(y):\n        return y * gain\n"
        "    return scale\n"
        "SCALE$ = make$()",
        use=CALL,
    ),
    "closure over a list": State(
        "SCALE$",
        "",
        "def make$():\n    box = [1.5]\n    def scale(y):\n        return y * box[0]\n"
        "    return scale\n"
        "SCALE$ = make$()",
        use=CALL,
    ),
    "default argument": State(
        "scale$", "", "def scale$(y, gain=1.5):\n    return y * gain", use=CALL
    ),
    "keyword default": State(
        "scale$", "", "def scale$(y, *, gain=1.5):\n    return y * gain", use=CALL
    ),
    "attribute of a function": State(
        "scale$.gain$", "", "def scale$():\n    pass\nscale$.gain$ = 1.5"
    ),
    "attribute of a dict": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$(key=0.5)\nself.cfg$.gain$ = 1.5",
        "class Config$(dict):\n    pass",
    ),
    "class attribute of a list": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$([0.5])",
        "class Config$(list):\n    gain$ = 1.5",
        unfit=NO_DICT,
    ),
    "attribute of a partial": State(
        "self.cfg$.gain$", "self.cfg$ = functools.partial(int)\nself.cfg$.gain$ = 1.5"
    ),
    "class of a module made by hand": State(
        "settings$.Rate$.gain$",
        "",
        "settings$ = types.ModuleType('by_hand$')\n"
        "exec('class Rate$:\\n    gain$ = 1.5', vars(settings$))",
        unfit=NO_DICT,
    ),
    "wrapped function": State(
        "scale$",
        "",
        "def scaled$(function):\n    box = [1.5]\n    @functools.wraps(function)\n"
        "    def wrapper(y):\n        return function(y) * box[0]\n    return wrapper\n"
        "@scaled$\ndef scale$(y):\n    return y * 0.5",
        use=CALL,
    ),
    "cached function": State(
        "cached$()",
        "",
        "GAIN$ = 1.5\n@functools.lru_cache\ndef cached$():\n    return GAIN$\ncached$()\n"
        "GAIN$ = 0.5",
    ),
    "dispatched function": State(
        "scale$(1)",
        "",
        "@functools.singledispatch\ndef scale$(kind):\n    return 1.5\n"
        "@scale$.register\ndef scale_text$(kind: str):\n    return 0.5",
    ),
    "patched method": State(
        "self.part$",
        "self.part$ = Part$()\nself.part$.forward = types.MethodType(make$(), self.part$)",
        f"{_PART}0.5\ndef make$():\n    box = [1.5]\n    def patched(self, y, gain=2.5):\n"
        "        return y * box[0] * gain\n    return patched",
        use=CALL,
        unfit=NO_DICT,
    ),
    "closure of the forward": State("gain$", local="gain$ = 1.5"),
    "default of the forward": State("gain$", parameter="gain$=1.5"),
    # ---- globals
    "closure of the step": State("gain$", step_local="gain$ = 1.5"),
    "default of the step": State("gain$", step_parameter="gain$=1.5"),
    "global": State("GAIN$", "", "GAIN$ = 1.5"),
    "global object": State("CONFIG$.gain$", "", f"{_CONFIG}\nCONFIG$ = Config$()"),
    "global dict": State("GAINS$['first$']", "", "GAINS$ = {'first$': 1.5, 'second$': 0.5}"),
    "module made by hand": State(
        "settings$.gain$",
        "",
        "settings$ = types.ModuleType('settings$')\nsettings$.gain$ = 1.5",
        unfit=NO_COPY,
    ),
    "module imported in a function": State(
        "imported$()",
        "",
        "def imported$():\n    from . import settings$\n    return settings$.gain$",
        module="gain$ = 1.5",
    ),
    "function of an imported module": State(
        "imported$()",
        "",
        "def imported$():\n    from .settings$ import get\n    return get()",
        module="gain$ = 1.5\ndef get():\n    return gain$",
    ),
    "name in builtins": State("GAIN_OF_ALL$", "", "builtins.GAIN_OF_ALL$ = 1.5"),
    "environment": State(
        "float(os.environ['MUTABLE_GAIN$'])", "", "os.environ['MUTABLE_GAIN$'] = '1.5'"
    ),
    "environment by another name": State(
        "float(ENVIRONMENT$['MUTABLE_GAIN$'])",
        "",
        "os.environ['MUTABLE_GAIN$'] = '1.5'\nENVIRONMENT$ = os.environ",
    ),
    # ---- classes
    "class attribute": State("Config$.gain$", "", "class Config$:\n    gain$ = 1.5"),
    "class attribute by an instance": State(
        "self.cfg$.gain$", "self.cfg$ = Config$()", "class Config$:\n    gain$ = 1.5", unfit=NO_DICT
    ),
    "class attribute of a base": State(
        "Config$.gain$",
        "",
        "class Base$:\n    gain$ = 1.5\nclass Config$(Base$):\n    pass",
        unfit=NO_DICT,
    ),
    "class registry": State(
        "Registry$.get('first$')",
        "",
        f"{_TWO_SCALES}\nclass Registry$:\n    table = {{'first$': double$, 'second$': half$}}\n"
        "    @classmethod\n    def get(cls, name):\n        return cls.table[name]",
        use=CALL,
    ),
    "method": State(
        "self.cfg$.get()",
        "self.cfg$ = Config$()",
        "class Config$:\n    def get(self):\n        return 1.5\n    def other(self):\n"
        "        return 0.5",
    ),
    "closure of a property": State(
        "self.cfg$.gain$",
        "self.cfg$ = Config$()",
        "def make$():\n    box = [1.5]\n    class Config:\n"
        "        gain$ = property(lambda self: box[0])\n"
        "    return Config\nConfig$ = make$()",
        unfit=NO_DICT,
    ),
    "closure of a static method": State(
        "self.cfg$.get()",
        "self.cfg$ = Config$()",
        "def make$():\n    box = [1.5]\n    class Config:\n"
        "        get = staticmethod(lambda: box[0])\n"
        "    return Config\nConfig$ = make$()",
    ),
    "metaclass attribute": State(
        "Config$.gain$",
        "",
        "class Meta$(type):\n    gain$ = 1.5\nclass Config$(metaclass=Meta$):\n    pass",
        unfit=NO_DICT,
    ),
    "metaclass property": State(
        "Config$.gain$",
        "",
        "class Meta$(type):\n    rate$ = 1.5\n    @property\n    def gain$(cls):\n"
        "        return cls.rate$\n"
        "class Config$(metaclass=Meta$):\n    pass",
        unfit=NO_DICT,
    ),
    "enum member": State("(1.5 if self.mode$ is Mode$.A else 0.5)", "self.mode$ = Mode$.A", _MODE),
    "value of an enum member": State(
        "Mode$.A.value['gain']", "", "class Mode$(enum.Enum):\n    A = {'gain': 1.5}"
    ),
    "attribute of an enum member": State(
        "Mode$.A.gain$", "", f"{_MODE}\nMode$.A.gain$ = 1.5", unfit=NO_DICT
    ),
    # ---- state that the forward itself changes; a warm-up with such a factor would never end
    "counter attribute": State(
        "count$(self)",
        "self.count$ = 0",
        f"{_COUNT}counts.count$ += 1\n    return counts.count$",
        use=PLUS,
        unfit=IN_BACKWARD,
    ),
    "counter in a long list": State(
        "count$(self.counts$)",
        "self.counts$ = [0] * 3000",
        f"{_COUNT}counts[7] += 1\n    return counts[7]",
        use=PLUS,
        unfit=IN_BACKWARD,
    ),
    "counter in a shared value": State(
        "count$(self.value$)",
        "self.value$ = sharedctypes.RawValue('i', 0)",
        f"{_COUNT}counts.value += 1\n    return counts.value",
        use=PLUS,
        unfit=IN_BACKWARD,
    ),
    "counter of a class": State(
        "count$(Config$)",
        "",
        f"class Config$:\n    count$ = 0\n{_COUNT}counts.count$ += 1\n    return counts.count$",
        use=PLUS,
        unfit=IN_BACKWARD,
    ),
    # ---- modules of torch
    "module list": State(
        "self.layers$",
        "self.layers$ = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])",
        _RUN_ALL,
        use="run$({v}, {y})",
        unfit=NO_DICT,
    ),
    "module dict": State(
        "self.layers$['first$']",
        "self.layers$ = nn.ModuleDict({'first$': nn.Linear(4, 4), 'second$': nn.Linear(4, 4)})",
        use="{v}({y}).tanh()",
        unfit=NO_GET,
    ),
    "sequential": State(
        "self.layers$",
        "self.layers$ = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))",
        use=CALL,
        unfit=NO_DICT,
    ),
    "parameter list": State(
        "self.scales$[0]",
        "self.scales$ = nn.ParameterList([torch.full((4,), 1.5), torch.full((4,), 0.5)])",
        unfit=NO_GET,
    ),
    "attribute of a part": State(
        "self.part$",
        "self.part$ = Part$()\nself.part$.gain$ = 1.5",
        f"{_PART}self.gain$",
        use=CALL,
        unfit=NO_DICT,
    ),
    "training flag": State(
        "self.part$",
        "self.part$ = Part$()",
        f"{_PART}(1.5 if self.training else 0.5)",
        use=CALL,
        unfit=NO_DICT,
    ),
    "hook with a closure": State(
        "self.part$",
        "box = [1.5]\nself.part$ = nn.Tanh()\n"
        "self.part$.register_forward_hook(lambda module, args, y: y * box[0])",
        use=CALL,
        unfit=NO_DICT,
    ),
    "buffer": State(
        "self.scale$", "self.register_buffer('scale$', torch.full((4,), 1.5))", unfit=NO_DICT
    ),
    "order of buffers": State(
        _WEIGHTED.format("self.part$.buffers()"),
        "self.part$ = nn.Module()\nself.part$.register_buffer('a$', torch.full((4,), 1.5))\n"
        "self.part$.register_buffer('b$', torch.full((4,), 0.5))",
    ),
    "names of buffers": State(
        "sum(len(name) for name, _ in self.part$.named_buffers())",
        "self.part$ = nn.Module()\nself.part$.register_buffer('first$', torch.ones(4))",
    ),
    "names of a module dict": State(
        "(1.5 if 'first$' in self.layers$ else 0.5)",
        "self.layers$ = nn.ModuleDict({'first$': nn.Tanh(), 'second$': nn.Sigmoid()})",
    ),
    "buffer or none": State(
        "(0.5 if self.scale$ is None else self.scale$)",
        "self.register_buffer('scale$', torch.full((4,), 1.5))",
    ),
    "dtype": State("self.dtype$", "self.dtype$ = torch.float16", use="{y}.to({v}).float()"),
    # ---- tensors
    "tensor": State("self.scale$", "self.scale$ = torch.full((4,), 1.5)"),
    "list of tensors": State(
        "self.scales$[0]",
        "self.scales$ = [torch.full((4,), 1.5), torch.full((4,), 0.5)]",
        unfit=NO_GET,
    ),
    "global tensor": State("SCALE$", "", "SCALE$ = torch.full((4,), 1.5)", unfit=("step",)),
    "attribute of a tensor": State(
        "self.scale$.gain$", "self.scale$ = torch.full((4,), 1.5)\nself.scale$.gain$ = 1.5"
    ),
    "tensor or none": State(
        "(0.5 if self.scale$ is None else self.scale$)", "self.scale$ = torch.full((4,), 1.5)"
    ),
}
