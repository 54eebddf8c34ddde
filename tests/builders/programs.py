"""Programs as answers hold them, with tests: honest ones, and those that try to forge a verdict."""

from __future__ import annotations

HONEST: dict[str, tuple[str, ...]] = {
    "variables that its functions set": (
        """
count, name = 0, "a"
def add():
    global count
    count += 1
""",
        """
assert (count, name) == (0, "a")
add()
def test():
    assert count == 1
""",
    ),
    "times with a zone": (
        """
from datetime import *
def f(): return datetime(2020, 1, 1, tzinfo=timezone.utc), time(1, tzinfo=timezone.utc)
""",
        """
from datetime import datetime, time, timezone
assert f() == (datetime(2020, 1, 1, tzinfo=timezone.utc), time(1, tzinfo=timezone.utc))
""",
    ),
    "operators of an object of the tests": (
        "def f(x): return x + 2, x[1], 3 in x, 4 in x",
        """
class Forty:
    def __add__(self, other): return 40 + other
    def __getitem__(self, place): return -place
    def __contains__(self, item): return item == 3
assert f(Forty()) == (42, -1, True, False)
""",
    ),
    "sort in place": (
        "def sort(x): x.sort()",
        """
x = [3, [1], 2][::2]
sort(x)
assert x == [2, 3]
""",
    ),
    "rotate a matrix in place": (
        """
def rotate(m):
    m[:] = [list(r) for r in zip(*m[::-1])]
""",
        """
m = [[1, 2], [3, 4]]
row = m[0]
rotate(m)
assert m == [[3, 1], [4, 2]]
""",
    ),
    "inner list in place": (
        "def f(m): m[0].append(m)",
        """
m = [[1]]
f(m)
assert m[0][1] is m and len(m) == 1
""",
    ),
    "dictionary in place": (
        "def f(d): d['b'] = d.pop('a')",
        """
d = {'a': 1}
f(d)
assert d == {'b': 1}
""",
    ),
    "the argument comes back": (
        """
def f(x):
    x.append(1)
    return x
""",
        """
x = []
assert f(x) is x and x == [1]
""",
    ),
    "nan, floats, tuples": (
        r"""
def f(): return float('nan'), 2.0, (1, -0.0), 1e400, 10**40, 1j, b'a\xff', None
""",
        r"""
import math
a = f()
assert math.isnan(a[0]) and a[1] == 2 and type(a[1]) is float and type(a) is tuple
assert a[3] == float('inf') and a[4] == 10**40 and a[5:] == (1j, b'a\xff', None) and math.copysign(1, a[2][1]) < 0
""",
    ),
    "sets, ranges, collections": (
        """
from collections import *
def f(): return {1, (2, 3)}, range(3), Counter('aab'), deque([1], 2), OrderedDict(a=1), defaultdict(list, a=[1])
""",
        """
from collections import Counter, deque
assert f() == ({1, (2, 3)}, range(3), Counter('aab'), deque([1]), {'a': 1}, {'a': [1]})
assert isinstance(f()[2], Counter)
""",
    ),
    "fractions and dates": (
        """
from fractions import Fraction
from datetime import date
from decimal import Decimal
def f(): return Fraction(1, 3) * 3, date(2020, 2, 29), Decimal('0.1')
""",
        """
import datetime, decimal
assert f() == (1, datetime.date(2020, 2, 29), decimal.Decimal('0.1'))
""",
    ),
    "text with half a surrogate": (
        r"""
def f(): return '\ud800a'
""",
        r"""
assert f() == '\ud800a'
""",
    ),
    "deep": (
        """
def f():
    x = []
    for _ in range(100_000): x = [x]
    return x
""",
        """
x, n = f(), 0
while x:
    x, n = x[0], n + 1
assert n == 100_000
""",
    ),
    "own exception": (
        """
class Broke(ValueError):
    def __init__(self, m, code): super().__init__(m); self.code = code
def f(x):
    if x < 0: raise Broke('no', 7)
    return x
""",
        """
import pytest
with pytest.raises(Broke) as e: f(-1)
assert str(e.value) == 'no' and e.value.code == 7
try: f(-1)
except ValueError as error: assert isinstance(error, Broke)
else: assert False
assert f(1) == 1
""",
    ),
    "exceptions of Python": (
        """
import json
def f(x): return json.loads(x)
def g(): return {}['a']
""",
        """
import json
try: f('{')
except json.JSONDecodeError: pass
else: assert 0
try: g()
except KeyError as e: assert e.args == ('a',)
else: assert 0
""",
    ),
    "a class": (
        """
class Stack:
    def __init__(self, *a): self.items = list(a)
    def push(self, x): self.items.append(x)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __iter__(self): return iter(self.items)
    def __contains__(self, x): return x in self.items
    def __repr__(self): return f'Stack({self.items})'
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *a): return cls(*a)
""",
        """
s = Stack(1)
s.push(2)
assert len(s) == 2 and s[0] == 1 and list(s) == [1, 2] and 2 in s and 3 not in s
assert s.top == 2 and repr(s) == 'Stack([1, 2])' and isinstance(s, Stack) and type(s).__name__ == 'Stack'
assert Stack.of(4).items == [4] and hasattr(s, 'push') and not hasattr(s, 'pop') and not Stack()
s.items = [9]
assert s.top == 9 and Stack.__name__ == 'Stack'
""",
    ),
    "operators": (
        """
from dataclasses import dataclass
from functools import total_ordering
@total_ordering
@dataclass(frozen=True)
class V:
    x: int
    y: int = 0
    def __add__(s, o): return V(s.x + o.x, s.y + o.y)
    def __rmul__(s, k): return V(k * s.x, k * s.y)
    def __matmul__(s, o): return s.x * o.x + s.y * o.y
    def __lt__(s, o): return s.x < o.x
    def __neg__(s): return V(-s.x, -s.y)
    def __abs__(s): return 5.0
""",
        """
assert V(1) + V(2, 3) == V(3, 3) and 2 * V(1) == V(2) and V(1) != V(2) and V(1, 2) @ V(3, 4) == 11
assert V(1) < V(2) and V(2) >= V(1) and -V(1) == V(-1) and abs(V(3, 4)) == 5 and len({V(1), V(1), V(2)}) == 2
assert sorted([V(3), V(1)])[0].x == 1 and max(V(1), V(2)) == V(2) and {V(1): 'a'}[V(1)] == 'a'
""",
    ),
    "linked nodes": (
        """
class Node:
    def __init__(self, v, n=None): self.v, self.next = v, n
def rev(h):
    p = None
    while h: h.next, p, h = p, h, h.next
    return p
""",
        """
h = Node(1, Node(2))
h.next.next = Node(3)
r = rev(h)
assert (r.v, r.next.v, r.next.next.v) == (3, 2, 1)
assert r.next.next is h and h.next is None
""",
    ),
    "nodes of the tests": (
        "def total(n): return 0 if n is None else n.val + total(n.next)",
        """
class ListNode:
    def __init__(self, val, next=None): self.val, self.next = val, next
assert total(ListNode(1, ListNode(2))) == 3
""",
    ),
    "generators": (
        """
def count():
    n = 0
    while True:
        yield n
        n += 1
def up(n): yield from range(n)
""",
        """
from itertools import islice
assert list(islice(count(), 3)) == [0, 1, 2] and list(up(2)) == [0, 1]
g = up(1)
assert next(g) == 0 and next(g, None) is None and sum(up(4)) == 6
""",
    ),
    "callables both ways": (
        """
def twice(f): return lambda x: f(f(x))
def apply(f, *a, **k): return f(*a, **k)
def memo(f):
    c = {}
    def g(x):
        if x not in c: c[x] = f(x)
        return c[x]
    return g
""",
        """
assert twice(lambda x: x + 1)(1) == 3 and apply(max, 1, 2) == 2 and apply(sorted, [2, 1], key=lambda x: x) == [1, 2]
calls = []
@memo
def slow(x):
    calls.append(x)
    return x * 2
assert slow(2) == slow(2) == 4 and calls == [2]
assert list(map(twice(abs), [-1])) == [1]
""",
    ),
    "an exception through both": (
        """
def safe(f):
    try: return f()
    except ZeroDivisionError: return 'caught'
def run(f): return f()
""",
        """
assert safe(lambda: 1 / 0) == 'caught'
try: run(lambda: {}['k'])
except KeyError: pass
else: assert 0
""",
    ),
    "iterators of the tests": (
        "def f(i): return [x for x in i]",
        "assert f(x * 2 for x in range(3)) == [0, 2, 4]",
    ),
    "context manager": (
        """
from contextlib import contextmanager
@contextmanager
def opened(log):
    log.append('in')
    yield 5
class C:
    def __enter__(self): return self
    def __exit__(self, t, v, b): return t is ValueError
    x = 1
""",
        """
with opened([]) as x: assert x == 5
with C() as c:
    assert c.x == 1
    raise ValueError
""",
    ),
    "coroutines": (
        """
async def f(x): return x + 1
async def g():
    return await f(1)
""",
        """
import asyncio
assert asyncio.run(f(1)) == 2
async def main(): return await g()
assert asyncio.run(main()) == 2
""",
    ),
    "printed": (
        "def hello(): print('hi', 5)",
        r"""
import io
from contextlib import redirect_stdout
with redirect_stdout(io.StringIO()) as out: hello()
assert out.getvalue() == 'hi 5\n'
""",
    ),
    "read": (
        "def ask(): return int(input('n? ')) + 1",
        """
from unittest.mock import patch
with patch('builtins.input', return_value='4'): assert ask() == 5
""",
    ),
    "derived from plain classes": (
        """
from collections import namedtuple
from enum import Enum, IntEnum
P = namedtuple('P', 'x y')
class L(list):
    def last(self): return self[-1]
class C(Enum):
    RED = 1
class I(IntEnum):
    ONE = 1
class T(str): pass
def p(): return P(1, 2)
""",
        """
assert p() == (1, 2) and p().y == 2 and P(1, 2) == p() and L([1, 2]) == [1, 2] and L([1]).last() == 1
assert C.RED.value == 1 and C(1) is C.RED and C.RED == C.RED and I.ONE == 1 and T('ab').upper() == 'AB'
assert isinstance(p(), tuple) and isinstance(L(), list) and [*L([3])] == [3]
""",
    ),
    "named like a builtin": (
        "def sum(a, b): return a + b",
        "assert sum(10, 15) == 25",
    ),
    "numpy": (
        """
import numpy as np
def f(x): return np.array(x) * 2
def g(): return np.float32(0.5)
def h(a): a += 1
""",
        """
import numpy as np
assert np.array_equal(f([1, 2]), [2, 4]) and (f([1]) == np.array([2])).all() and g() == 0.5
a = np.zeros(2)
h(a)
assert a.tolist() == [1, 1] and f([[1]]).shape == (1, 1)
""",
    ),
    "modules of the answer": (
        """
import math
def f(): return math.pi
""",
        "assert math.isclose(f(), 3.14159265358979)",
    ),
    "imported from solution": (
        """
def f(): return 1
N = 2
""",
        """
from solution import f, N
import solution
assert f() == 1 == solution.N - 1
""",
    ),
    "files of its own": (
        """
def f():
    open('a', 'w').write('x')
    return open('a').read()
""",
        "assert f() == 'x'",
    ),
    "threads": (
        """
from concurrent.futures import ThreadPoolExecutor
def f(g, xs):
    with ThreadPoolExecutor(3) as p: return list(p.map(g, xs))
""",
        "assert f(lambda x: x * 2, [1, 2, 3]) == [2, 4, 6]",
    ),
    "a main block": (
        """
def f(): return 1
if __name__ == '__main__':
    print(f(int(input())))
""",
        "assert f() == 1",
    ),
    "reassigned and deleted": (
        """
class A: pass
class D:
    def __init__(self): self.d = {}
    def __setitem__(self, k, v): self.d[k] = v
    def __getitem__(self, k): return self.d[k]
    def __delitem__(self, k): del self.d[k]
""",
        """
a = A()
a.x = 1
del a.x
assert not hasattr(a, 'x')
d = D()
d['a'] = [1]
d['a'] += [2]
assert d['a'] == [1, 2]
del d['a']
try: d['a']
except KeyError: pass
else: assert 0
""",
    ),
    "a builtin function by another name": (
        """
calc = eval
""",
        """
assert calc('1+2*3') == 7
""",
    ),
    "a difference that is an object": (
        """
class Money:
    def __init__(s, v): s.v = v
    def __sub__(s, o):
        if o > s.v: raise ValueError('too little')
        return Money(s.v - o)
    def __eq__(s, o): return isinstance(o, Money) and s.v == o.v
""",
        """
assert Money(5) - 3 == Money(2)
import pytest
with pytest.raises(ValueError): Money(5) - 8
""",
    ),
    "differences with numbers and arrays": (
        """
class N:
    def __init__(s, v): s.v = v
    def __sub__(s, o): return s.v - o
    def __rsub__(s, o): return o - s.v
    def __truediv__(s, o): return s.v / o
    def __rtruediv__(s, o): return o / s.v
""",
        """
assert abs(N(4.5) - 4.5) < 1e-9
assert abs(4.5 - N(4.5)) < 1e-9
assert N(6) / 3 == 2 and 6 / N(3) == 2 and N(10**30) - 10**30 == 0
import numpy as np
assert np.abs(N(np.array([1., 2.])) - np.array([1., 2.])).max() < 1e-9
assert abs(N(0.1) - np.float32(0.1)) < 1e-6 and abs(N(0.3) - np.float32(0.3)) < 1e-6
from fractions import Fraction
assert N(Fraction(1,3)) - Fraction(1,3) == 0
from decimal import Decimal
assert N(Decimal(3)) - Decimal(3) == 0
assert abs(N(3j) - 3j) == 0
""",
    ),
}
"""By name, a program and tests that it passes."""

FORGED: dict[str, str] = {
    "equal to everything": """
class A:
    def __init__(self, *a): pass
    def __eq__(s, o): return True
def add(a, b): return A()
""",
    "int that is equal to everything": """
class A(int):
    def __eq__(s, o): return True
    __hash__ = int.__hash__
def add(a, b): return A()
""",
    "float of lies": """
class A(float):
    def __eq__(s, o): return True
    def __float__(s): return 3.0
def add(a, b): return A()
""",
    "yes by reflection": """
class A:
    def __init__(self, *a): pass
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __bool__(s): return True
    def __radd__(s, o): return s
    def __getattr__(s, n): return s
    def __call__(s, *a): return s
def add(a, b): return A()
""",
    "class for a function": """
class A:
    def __init__(self, *a): pass
    __class__ = int
    def __eq__(s, o): return True
add = A
""",
    "metaclass": """
class M(type):
    def __eq__(s, o): return True
    __hash__ = None
class add(metaclass=M):
    def __new__(c, a, b): return c
""",
    "exits at once": """
import os
os._exit(0)
""",
    "exits in the call": """
import os
def add(a, b): os._exit(0)
""",
    "raises SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "exits behind": """
import atexit, os
atexit.register(lambda: os._exit(0))
def add(a, b): return 0
""",
    "kills its parents": """
import os
for p in (os.getppid(), 1):
    try: os.kill(p, 9)
    except OSError: pass
def add(a, b): return 0
""",
    "kills all": """
import os
def add(a, b):
    os.kill(-1, 9)
    return 0
""",
    "writes into every descriptor": r"""
import os
for f in range(256):
    try: os.write(f, b'["passed", ""]\n' * 9)
    except OSError: pass
def add(a, b): return 0
""",
    "sends a frame": """
import os, json
def add(a, b):
    m = json.dumps(['value', [], 3, [], '']).encode()
    for f in range(256):
        try: os.write(f, len(m).to_bytes(8, 'little') + m)
        except OSError: pass
    os._exit(0)
""",
    "sends a frame that is too large": """
import os
def add(a, b):
    for f in range(3, 256):
        try: os.write(f, (1 << 60).to_bytes(8, 'little') + b'[' * 99999)
        except OSError: pass
    return 3
""",
    "sends nodes that are none": """
import os, json
def add(a, b):
    m = json.dumps(['value', [['tuple', [0]]], [0], [[0, [0]]], '']).encode()
    for f in range(3, 256):
        try: os.write(f, len(m).to_bytes(8, 'little') + m)
        except OSError: pass
    return 3
""",
    "looks for the tests": """
import gc, sys
def add(a, b):
    for o in gc.get_objects():
        if 'assert' in repr(o)[:9999]: return eval('3')
    f = sys._getframe()
    while f.f_back: f = f.f_back
    return f.f_globals.get('expected', 0)
""",
    "patches builtins": """
import builtins
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.AssertionError = Exception
builtins.int.__eq__ if 0 else 0
all = any = print = eval = exec = lambda *a: True
def add(a, b): return 0
""",
    "patches the guest": """
import sys
for m in list(sys.modules.values()):
    for n in list(vars(m)):
        if n in ('Guest', 'Encoder', 'Channel', 'serve'): setattr(m, n, None)
def add(a, b): return 0
""",
    "hangs": """
def add(a, b):
    while True: pass
""",
    "hangs in another process": """
import os, time
def add(a, b):
    if os.fork() == 0: time.sleep(99)
    return 0
""",
    "kills its process group": """
import os
def add(a, b):
    os.kill(0, 9)
    return 0
""",
    "stops everything": """
import os, signal
def add(a, b):
    os.kill(os.getppid(), signal.SIGSTOP) if os.getppid() > 1 else 0
    os.kill(os.getpid(), signal.SIGSTOP)
""",
    "no value": """
class A:
    def __init__(self, *a): pass
    def __getattribute__(s, n): raise SystemExit
    def __iter__(s): raise KeyboardInterrupt
def add(a, b): return A()
""",
    "skips": """
import unittest
def add(a, b): raise unittest.SkipTest('no')
""",
    "huge": "def add(a, b): return 'a' * (1 << 27)",
    "endless print": """
def add(a, b):
    while True: print('a' * 10000)
""",
    "deep recursion": """
import sys
sys.setrecursionlimit(10**9)
def add(a, b): return add(a, b) + 1
""",
}
"""By name, a program that does not add, whatever it does."""

CLOSE: dict[str, str] = {
    "no distance": """
class A:
    def __init__(self, *a): pass
    def __sub__(s, o): return 0.0
    __rsub__ = __sub__
    def __abs__(s): return 0.0
def f(): return A()
""",
    "a distance that is none": """
class A:
    def __init__(self, *a): pass
    def __sub__(s, o): return s
    __rsub__ = __sub__
    def __abs__(s): return 0.0
    __float__ = __pow__ = lambda s, *o: 0.0
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __lt__
def f(): return A()
""",
    "a small random distance": """
import random
class A:
    def __init__(self, *a): pass
    def __sub__(s, o): return 1e-9 * random.random()
    __rsub__ = __sub__
def f(): return A()
""",
    "a quotient of one": """
class A:
    def __init__(self, *a): pass
    def __truediv__(s, o): return 1.0
    __rtruediv__ = __truediv__
def f(): return A()
""",
    "in order with everything": """
class A:
    def __init__(self, *a): pass
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __lt__
def f(): return A()
""",
    "contains everything": """
class A:
    def __init__(self, *a): pass
    def __contains__(s, o): return True
def f(): return A()
""",
    "a number that is not": """
class A:
    def __init__(self, *a): pass
    def __float__(s): return 3.0
def f(): return A()
""",
}
"""By name, a program with a function f that does not return 4.5."""

CLOSE_TESTS = (
    "assert abs(f() - 4.5) < 1e-6",
    "assert abs(4.5 - f()) < 1e-6",
    "assert (f() - 4.5) ** 2 < 1e-6",
    "assert abs(f() / 4.5 - 1) < 1e-6",
    """
import math
assert math.isclose(f(), 4.5)
""",
    "assert 4 < f() < 5",
    "assert 4.5 in f()",
    """
import pytest
assert f() == pytest.approx(4.5)
""",
    """
import math
assert math.fabs(f() - 4.5) < 0.1
""",
    """
import numpy as np
assert np.allclose(f(), 4.5)
""",
    "assert f() in (4.5, 5)",
    "assert round(f(), 1) == 4.5",
    """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertAlmostEqual(f(), 4.5)
""",
)
"""Tests of whether f returns almost 4.5."""

LIMITED: dict[str, tuple[str, ...]] = {
    "three children with the memory of one each": (
        """
import os, time
def f():
    pids = []
    for _ in range(3):
        pids.append(os.fork())
        if not pids[-1]:
            x = bytearray(100 << 20)
            x[::4096] = bytes(len(x[::4096]))
            time.sleep(2)
            os._exit(0)
    return [os.waitpid(p, 0)[1] for p in pids]
""",
        "assert f() == [0, 0, 0]",
        "too much memory",
    ),
    "one with more": (
        "def f(): return len(bytearray(300 << 20))",
        "assert f() > 1",
        "MemoryError",
    ),
    "a bomb": (
        """
import os, time
def f():
    n = 0
    while n < 200:
        if not os.fork():
            time.sleep(9)
            os._exit(0)
        n += 1
    return n
""",
        "assert f() == 200",
        "BlockingIOError",
    ),
    "a network": (
        """
import socket
def f(port): socket.create_connection(('127.0.0.1', port), timeout=1)
""",
        """
f(PORT)
assert True
""",
        "Error: [Errno",
    ),
    "a full disk": (
        """
def f():
    for n in range(99): open(f'{n}', 'wb').write(bytes(8 << 20))
""",
        """
f()
assert True
""",
        "OSError: [Errno 28]",
    ),
    "another's files": (
        """
import os
def f(path): return os.path.exists(path), os.path.exists(os.path.dirname(path))
""",
        "assert f(PATH) == (True, True)",
        "AssertionError",
    ),
    "the system": (
        """
import os, sys
def f():
    for p in ('/x', '/usr/x', '/dev/x', '/proc/sys/kernel/hostname', sys.prefix + '/x'):
        try: open(p, 'w').close()
        except OSError: continue
        return p
""",
        "assert f() is not None",
        "AssertionError",
    ),
    "the processes of others": (
        """
import os
def f(pid):
    os.kill(pid, 0)
    return 1
""",
        "assert f(PID) == 1",
        "ProcessLookupError",
    ),
    "the user's packages": (
        """
import sys
def f(): return [p for p in sys.path if 'TESTS' in p]
""",
        "assert f()",
        "AssertionError",
    ),
}
"""By name, a program, tests that it would pass without limits, and what the reason says."""
