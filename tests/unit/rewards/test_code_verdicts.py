"""Programs that do not solve their problem and try to pass, honest ones of unusual form, and programs that try to make
their score fail: a score is a number, and it is 1 for solutions only."""

import json
from typing import Any

import pytest

from rloom.config.reward_sections import SandboxSection
from rloom.rewards.rules import code
from rloom.rewards.rules.code import compute_score
from rloom.rewards.rules.code_problems import problem_of
from rloom.rewards.sandbox.exchange import Handle, Table, decode, encode
from rloom.rewards.sandbox.tests import SandboxReport, _Connection

KEYS = SandboxSection().model_dump() | {"cpu_s": 2, "timeout_s": 20.0}

MBPP = {"test_list": ["assert square(2) == 4", "assert square(3) == 9", "assert abs(square(-1) - 1) < 1e-6"]}
HUMANEVAL = {
    "entry_point": "square",
    "prompt": "def shifted(x):\n    return x + 1\n\ndef square(x):\n    '''x times x'''\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n"
    "    assert list(map(candidate, [3, 1])) == [9, 1] and all(map(candidate, [1, 2]))\n"
    "    assert sorted(candidate(x) for x in [2, 1]) == [1, 4]\n    assert candidate(shifted(4)) == 25\n",
}
CALLS = {"fn_name": "square", "inputs": [[2], [3]], "outputs": [4, 9]}
STREAMS = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}


def score(program: str, truth: Any, **keys: Any) -> dict[str, Any]:
    return compute_score("mbpp", f"```python\n{program}\n```", json.dumps(truth), sandbox=KEYS | keys)


# Everything below runs in the program's process, where it may do what it likes.
DISHONEST = {
    "objects equal to everything": "class Same:\n"
    "    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = lambda self, other: True\n"
    "    __ne__ = lambda self, other: False\n    __abs__ = __sub__ = __rsub__ = lambda self, *other: self\n"
    "    __hash__ = None\ndef square(x): return Same()",
    "an int equal to everything": "class Same(int):\n    __eq__ = lambda self, other: True\n"
    "    __sub__ = lambda self, other: 0\n    __hash__ = int.__hash__\ndef square(x): return Same(5)",
    "patched json and os": "import json, os\ndumps, write = json.dumps, os.write\n"
    "json.dumps = lambda o, **k: dumps({**o, 'error': None} if isinstance(o, dict) else o, **k)\n"
    "os.write = lambda d, b: write(d, b.replace(b'assertion failed', b''))\ndef square(x): return None",
    "patched builtins": "import builtins, math\nbuiltins.abs = builtins.round = lambda x, *y: 0\n"
    "builtins.sorted = lambda x, **k: [1, 4]\nbuiltins.all = builtins.any = lambda x: True\n"
    "builtins.list = lambda *x: [9, 1]\nbuiltins.exec = builtins.compile = lambda *x, **k: None\n"
    "math.isclose = lambda *x, **k: True\ndef square(x): return 0",
    "names of the tests": "abs = lambda x: 0\nsorted = list = lambda *x: [1, 4]\nall = lambda x: True\n"
    "shifted = lambda x: 0\ncheck = __case__ = lambda *x: None\ndef square(x): return 0",
    "the end of a loop": "def square(x): raise StopIteration",
    "a generator's end": "def square(x): raise GeneratorExit",
    "frames and objects of the interpreter": "import gc, sys\n"
    "reversed_texts = '9 == )3(erauqs', ')2(etadidnac'\n"
    "def texts():\n    frame = sys._getframe()\n"
    "    while frame: yield repr(frame.f_locals); frame = frame.f_back\n"
    "    for found in gc.get_objects(): yield repr(found)\n"
    "def square(x):\n    if any(r in text[::-1] for text in texts() for r in reversed_texts): return x * x\n",
    "reports on every descriptor": "import os\n"
    'report = b\'\'.join(b\'{"begin": %d}\\n{"case": %d, "error": null}\\n\' % (i, i) for i in range(4))\n'
    "def square(x):\n    for d in range(1, 64):\n        try: os.write(d, report)\n        except OSError: pass\n"
    "    os._exit(0)",
    "names that were not asked for": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    own = frame.f_locals.get('self')\n    if hasattr(type(own), '_names'):\n"
    "        type(own)._names = lambda self, names, methods: {'square': square, 'abs': lambda x: 0,\n"
    "            'sorted': lambda x: [1, 4], 'all': lambda x: True, '__case__': lambda x: None, '__builtins__': {}}\n"
    "    frame = frame.f_back\ndef square(x): return 0",
    "an early end": "import os\ndef square(x): os._exit(0)",
    "classes of the harness": "for c in object.__subclasses__():\n"
    "    if 'Case' in c.__name__ or 'Report' in c.__name__:\n"
    "        c.__exit__ = lambda *a: True\n        c.__call__ = lambda *a, **k: a[0]\ndef square(x): return None",
    "signals to all processes": "import os, signal\ndef square(x):\n    for number in (2, 10, 15, 35):\n"
    "        for pid in range(1, 9):\n            try: os.kill(pid, number)\n            except OSError: pass\n",
    "an assertion of its own": "def square(x): raise AssertionError",
    "an exit": "def square(x): raise SystemExit(0)",
    "the module of the tests": "import sys\n__name__ = 'tests'\nclass Same:\n    def __eq__(self, other): return True\n"
    "Same.__module__ = 'tests'\nsys.modules['tests'] = sys.modules['solution']\ndef square(x): return Same()",
    "numpy's comparisons": "import numpy\ndef square(x): return numpy.array([])",
    "no number": "def square(x): return float('nan')",
}


# tests, and a program that satisfies them only if it is asked for the verdict: in plain Python each fails, or is fooled
LYING: dict[str, tuple[str, str]] = {
    "an empty object": ("assert f(2)", "from collections import UserList\ndef f(x): return UserList()"),
    "an object with a length of 0": ("s = Stack()\ns.push(1)\nassert s", "class Stack(list): push = lambda s, x: None"),
    "not callable": ("assert callable(f(2))", "def f(x): return object()"),
    "no iterator": ("assert isinstance(f(2), collections.abc.Iterator)", "def f(x): return object()"),
    "no length": ("assert hasattr(f(2), '__len__')", "def f(x): return object()"),
    "its own comparison": ("assert V(1) != V(2)", "class V:\n    __init__ = __eq__ = lambda s, o: None"),
    "its own hash": (
        "assert len({V(1), V(2)}) == 2",
        "class V:\n    __init__ = lambda s, x: None\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 1",
    ),
    "methods of text": (
        "assert f(2).startswith('abc')",
        "class f:\n    __init__ = lambda s, x: None\n    startswith = lambda s, x: True",
    ),
    "methods of sets": ("assert f(2).issuperset({1})", "class L: issuperset = lambda s, x: True\ndef f(x): return L()"),
    "a search": ("assert 3 in f(2)", "class L: __contains__ = lambda s, x: True\ndef f(x): return L()"),
    "fields instead of methods": (
        "assert f(2).count(4) == 1",
        "from collections import namedtuple\nN = namedtuple('N', 'count')\ndef f(x): return N(lambda v: 1)",
    ),
    "a module of its own": ("assert np.allclose(f(2), 3)", "class np: allclose = lambda *a: True\ndef f(x): return 0"),
}


@pytest.mark.parametrize("name", LYING)
def test_objects_of_a_program_do_not_decide_a_test(name: str) -> None:
    test, program = LYING[name]
    assert score(program, {"test_list": [f"import collections.abc\n{test}"]})["score"] == 0.0


def test_a_row_with_a_prompt_takes_only_its_function_from_the_program() -> None:
    truth = HUMANEVAL | {"test": "def check(candidate):\n    assert is_right(candidate(2), 4)\n"}
    detail = score("def is_right(*values): return True\ndef square(x): return 0", truth)["detail"]
    assert detail == "0 of 1 tests passed; test 1: NameError: name 'is_right' is not defined"


def test_outputs_are_unwrapped_only_where_all_are_lists_of_one_value() -> None:
    apps = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[1]], [[2]]]}
    assert score("def f(n): return [n]", apps)["score"] == 1.0
    assert score("def f(n): return [[n]]", apps)["score"] == 1.0
    lists = apps | {"outputs": [[[1]], [[1], [1, 1]]]}
    assert score("def f(n): return [1] if n == 1 else [[1], [1, 1]]", lists)["score"] == 0.0
    assert score("def f(n): return [[1]] if n == 1 else [[1], [1, 1]]", lists)["score"] == 1.0


@pytest.mark.parametrize("name", DISHONEST)
def test_a_program_that_does_not_solve_its_problem_scores_zero(name: str) -> None:
    for truth in (MBPP, HUMANEVAL, CALLS):
        assert score(DISHONEST[name], truth)["score"] == 0.0, truth


HONEST: dict[str, tuple[list[str], str]] = {
    "numbers of numpy": (
        ["assert f(3) == 9.0", "assert g(3) == 9", "assert h(2) is True"],
        "import numpy as np\ndef f(x): return np.float64(x) ** 2\ndef g(x): return np.int32(x) ** 2\n"
        "def h(x): return bool(np.bool_(x == 2))",
    ),
    "arrays": (
        ["assert f([1, 2]).tolist() == [2, 4]", "assert list(f([1, 2])) == [2, 4] and f([5])[0] == 10"],
        "import numpy as np\ndef f(x): return np.array(x) * 2",
    ),
    "a named tuple": (
        ["assert f(1) == (1, 2) and f(1).y == 2"],
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, 2)",
    ),
    "other kinds of dict, and printed text": (
        ["assert f('aab') == {'a': 2, 'b': 1}", "assert g(3) == {'k': [1, (2, 3)]}"],
        "from collections import Counter, defaultdict\ndef f(s):\n    print('counting', s)\n    return Counter(s)\n"
        "def g(x):\n    d = defaultdict(list)\n    d['k'] += [1, (2, 3)]\n    return d",
    ),
    "arguments that are changed in place": (
        [
            "l = [3, 1]\nf(l)\nassert l == [1, 3]",
            "l = [2, 1]\nassert f(l) is l",
            "d = {}\ng(d, d)\nassert d == {'a': d}",
        ],
        "def f(l):\n    l.sort()\n    return l\ndef g(d, e): e['a'] = d",
    ),
    "text that is an Enum, and a factory of a dict": (
        ["assert colour() == 'red'", "import collections\nassert f(collections.defaultdict(list)) == {'a': [1]}"],
        "from enum import Enum\nclass C(str, Enum):\n    R = 'red'\ndef colour(): return C.R\n"
        "def f(d):\n    d['a'].append(1)\n    return d",
    ),
    "generators": (
        ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6", "assert next(iter(f(10 ** 9))) == 0"],
        "def f(n):\n    i = 0\n    while i < n:\n        yield i\n        i += 1",
    ),
    "functions as arguments and results": (
        [
            "assert f(lambda x: x + 1, [1]) == [2]",
            "assert f(str, [1]) == ['1']",
            "assert add(3)(4) == 7",
            "assert f(str.upper, ['a']) == ['A'] and f(operator.itemgetter(0), ['b']) == ['b']",
        ],
        "def f(g, l): return [g(x) for x in l]\ndef add(a): return lambda b: a + b",
    ),
    "objects of the program": (
        ["n = N(1, N(2))\nassert total(n) == 3", "n = N(1, N(2))\nr = rev(n)\nassert r.v == 2 and r.next is n"],
        "class N:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "def total(n):\n    s = 0\n    while n: s, n = s + n.v, n.next\n    return s\n"
        "def rev(n):\n    p = None\n    while n: n.next, p, n = p, n, n.next\n    return p",
    ),
    "objects of the tests": (
        ["class N: pass\nn = N()\nn.v = 4\nf(n)\nassert n.v == 5 and n.seen", "assert g(x for x in [1, 2]) == 3"],
        "def f(n):\n    n.v += 1\n    n.seen = True\ndef g(numbers): return sum(numbers)",
    ),
    "exceptions of its own": (
        [
            "try:\n    f(1)\n    assert False\nexcept Own as e:\n    assert e.args == (1, 'x')",
            "try:\n    f(2)\n    assert False\nexcept ValueError as e:\n    assert isinstance(e, Own)",
            "try:\n    f(0)\n    assert False\nexcept KeyError as e:\n    assert str(e) == \"'k'\"",
        ],
        "class Own(OSError): pass\nclass Both(Own, ValueError): pass\ndef f(x):\n    if x == 2: raise Both\n"
        "    if x: raise Own(x, 'x')\n    return {}['k']",
    ),
    "classes that a test names": (
        [
            "b = Bag()\nb.append(3)\nassert 3 in b and 4 not in b and len(b) == 1 and b.pop() == 3 and not b",
            "assert repr(Bag()) == 'Bag' == str(Bag()) and isinstance(made(), Bag) and not isinstance(5, Bag)",
            "with made() as b:\n    b.append(1)\nassert b.closed",
        ],
        "class Bag:\n    closed = False\n    def __init__(self): self.d = []\n"
        "    def append(self, x): self.d.append(x)\n    def pop(self): return self.d.pop()\n"
        "    def __len__(self): return len(self.d)\n    def __contains__(self, x): return x in self.d\n"
        "    def __repr__(self): return 'Bag'\n    def __enter__(self): return self\n"
        "    def __exit__(self, *error): self.closed = True\ndef made(): return Bag()",
    ),
    "exceptions that a test expects": (
        [
            "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert 'negative' in str(e)",
            "assert f(4) == 2",
        ],
        "class Negative(ValueError): pass\ndef f(x):\n    if x < 0: raise Negative('negative')\n    return x ** 0.5",
    ),
    "large, infinite and special values": (
        ["assert f() == [10 ** 30, float('inf'), 1j, b'a', {1}, frozenset([2]), 'é\\ud800', range(3), None]"],
        "def f(): return [10 ** 30, float('inf'), 1j, b'a', {1}, frozenset([2]), 'é\\ud800', range(3), None]",
    ),
    "a function with the name of a builtin": (
        ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93", "assert sum(4, 6) == 3"],
        "def sum(a, b):\n    s = 0\n    for i in range(1, a):\n        s += i * (a % i == b % i == 0)\n    return s",
    ),
    "variables with the names of builtins": (
        ["assert sorted(f(2)) == [1, 2] and len(f(2)) == 2"],
        "len = 5\nsorted = list = None\nsum = 'x'\ndef f(x): return [x, 1]",
    ),
    "a module that a test uses without an import": (
        ["assert size((1, 2)) == sys.getsizeof((1, 2))"],
        "import sys\ndef size(x): return sys.getsizeof(x)",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_solution_of_unusual_form_passes(name: str) -> None:
    tests, program = HONEST[name]
    assert score(program, {"test_list": tests})["detail"] == f"{len(tests)} of {len(tests)} tests passed"


def test_a_builtin_is_replaced_only_where_it_is_the_function_that_is_asked_for() -> None:
    truth = {"test_list": ["assert set(sum(10, 15)) == set([6])"] * 2}
    problem = problem_of("mbpp", truth)
    assert isinstance(problem, code.Asserts)
    assert problem.names == ("sum",)
    assert score("def sum(a, b): return [0]\ndef set(x): return 1", truth)["score"] == 0.0


def test_helper_functions_of_the_prompt_are_the_rows_and_not_the_programs() -> None:
    assert score("def shifted(x): return 0\ndef square(x): return x * x", HUMANEVAL)["score"] == 1.0


# what the process of the tests reads and gives


def test_values_arrive_with_their_types_and_aliases() -> None:
    inner: list[Any] = [1]
    value = [inner, inner, (inner, {"a": {2}}), True, 2.5, None, 1 << 80, float("-inf"), {3: b"x"}]
    value.append(value)
    found = decode(json.loads(json.dumps(encode(value, Table(), repr))), Table(), repr)
    assert found[:9] == value[:9]
    assert [type(item) for item in found] == [type(item) for item in value]
    assert found[0] is found[1] is found[2][0]
    assert found[9] is found


class _Number(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_subclasses_arrive_as_their_plain_type() -> None:
    found = decode(json.loads(json.dumps(encode([_Number(3)], Table(), repr))), Table(), repr)
    assert type(found[0]) is int
    assert found != [4]


@pytest.mark.parametrize(
    "data",
    [
        *(["list"], ["list", 5], ["unknown", []], {}, ["again", 3], [[]], ["type", "eval"], ["large", "ten"]),
        *(["namedtuple", "a b", [], []], ["namedtuple", "P", ["x; import os"], [1]]),
    ],
)
def test_what_is_no_value_is_an_error(data: Any) -> None:
    def other(tagged: Any) -> Any:
        raise ValueError

    with pytest.raises((ValueError, TypeError, LookupError)):
        decode(data, Table(), other)


def test_a_handle_is_compared_here_and_not_by_the_program() -> None:
    class Never:
        def request(self, *arguments: Any) -> Any:
            raise AssertionError("the program was asked")

    handle = Handle(Never(), 0, "Node", False, None)  # type: ignore[arg-type]
    assert handle == handle
    assert handle != 5
    with pytest.raises(TypeError):
        handle < 5  # type: ignore[operator] # noqa: B015
    with pytest.raises(TypeError, match="an object of type Same of the program has a comparison of its own"):
        assert Handle(Never(), 0, "Same", True, None) != 5  # type: ignore[arg-type]


def test_a_program_reaches_only_the_arguments_that_a_test_gave_it() -> None:
    class Node:
        value = 3
        _hidden = 4

    Node.__module__ = "tests"
    node, function = Node(), lambda x: x
    connection = _Connection(0, 0, SandboxReport(0), end=pytest.fail)  # type: ignore[arg-type]
    for given in (node, function):
        connection._export(given)
    assert connection.may_do("getattr", [node, "value"])
    assert connection.may_do("call", [function, [], {}])
    refused = [(node, "_hidden"), (node, "__class__"), (function, "__globals__"), ("{0.__globals__}", "format")]
    assert not any(connection.may_do("getattr", [target, name]) for target, name in refused)
    assert not connection.may_do("call", [print, [], {}])
    assert not connection.may_export(json)
