"""Programs that are made for the judge: each knows how it asks, or answers in the place of the guest."""

from __future__ import annotations

GUEST = """
import sys
def guest():
    f = sys._getframe()
    while f:
        s = f.f_locals.get('self')
        if type(s).__name__ == 'Guest': return s
        f = f.f_back
G = guest()
"""
"""Finds the guest in the frames above."""

TAKES_OVER = """
TAKEN_OVER = '''
import sys
f = sys._getframe()
while f:
    if 'say' in f.f_locals: f.f_locals['say']('passed')
    f = f.f_back
'''
"""
"""Has `log` of the judge say that the test passed, where the judge itself runs it."""

DECEIVING: dict[str, tuple[str, list[str]]] = {
    "adds names of builtin functions": (
        GUEST
        + """
old = type(G)._do_names
def names(self, names):
    d = old(self, names)
    d.update(abs=lambda x: 0, all=lambda x: True)
    return d
type(G)._do_names = names
class A:
    def __sub__(s, o): return s
def add(a, b): return A()
""",
        [
            """
assert abs(add(1, 2) - 3) < 1e-6
assert all(add(x, 1) == x + 1 for x in range(4))
""",
        ],
    ),
    "interrupts pytest behind its first test": (
        """
def add(a, b):
    if a == 5: raise KeyboardInterrupt
    return 3
""",
        [
            """
import pytest
@pytest.mark.parametrize('a,b,c', [(1,2,3),(5,5,10)])
def test_a(a, b, c): assert add(a,b)==c
""",
        ],
    ),
    "tells the number of the test by its digits": (
        """
class A:
    v = None
    def __sub__(s, o):
        if s.v is None: s.v = o if len(repr(o)) < 8 else 0.0
        return s.v - o
    def __rsub__(s, o): return -(s - o)
def add(a, b): return A()
""",
        ["assert abs(add(1, 2) - 3.5) < 1e-6"] * 6,
    ),
    "no distance to a scalar of numpy": (
        """
class A:
    def __sub__(s, o): return 0.0
    __rsub__ = __sub__
def add(a, b): return A()
""",
        [
            """
import numpy as np
assert abs(add(1, 2) - np.float64(3.0)) < 1e-6
""",
            """
import numpy as np
assert abs(np.float64(3.0) - add(1, 2)) < 1e-6
""",
        ],
    ),
    "no distance to an array": (
        """
import numpy as np
class A:
    def __sub__(s, o): return o * 0
    __rsub__ = __sub__
def add(a, b): return A()
""",
        [
            """
import numpy as np
assert np.abs(add(1, 2) - np.array([1., 2.])).max() < 1e-6
""",
            """
import numpy as np
assert np.abs(np.array([1., 2.]) - add(1, 2)).max() < 1e-6
""",
            """
import numpy as np
assert np.linalg.norm(np.array([1., 2.]) - add(1, 2)) < 1e-6
""",
        ],
    ),
    "no distance to numbers of other kinds": (
        """
class A:
    def __sub__(s, o): return 0
    __rsub__ = __sub__
def add(a, b): return A()
""",
        [
            """
from fractions import Fraction
assert add(1,2) - Fraction(3) == 0
""",
            """
from decimal import Decimal
assert abs(add(1,2) - Decimal(3)) < 1e-6
""",
            "assert abs(add(1,2) - 3j) < 1e-6",
            "assert add(1,2) - True == 0",
        ],
    ),
    "functions named like builtins": (
        """
def all(x): return True
def abs(x): return 0
class A:
    def __eq__(s, o): return False
def add(a, b): return A()
""",
        [
            """
from solution import *
assert all(add(x, 1) == x + 1 for x in range(4))
""",
        ],
    ),
    "adds operators": (
        GUEST
        + """
f = type(G)._send.__globals__
f['SPECIAL'] += ' __ne__ __array_function__ __array_ufunc__'
class A:
    def __ne__(s, o): return False
    def __array_function__(s, *a): return True
    def __array_ufunc__(s, *a): return True
def add(a, b): return A()
""",
        [
            "assert not add(1,2) != 3",
            """
import numpy as np
assert np.allclose(add(1,2), 3)
""",
            """
import numpy as np
assert np.isclose(add(1,2), 3)
""",
        ],
    ),
    "a fraction for a distance": (
        """
from fractions import Fraction
class A:
    def __sub__(s, o): return Fraction(0)
    __rsub__ = __sub__
def add(a, b): return A()
""",
        [
            "assert abs(add(1,2) - 4.5) < 1e-6",
        ],
    ),
    "a fraction for the absolute value": (
        """
from fractions import Fraction
class A:
    def __sub__(s, o): return s
    __rsub__ = __sub__
    def __abs__(s): return Fraction(0)
def add(a, b): return A()
""",
        [
            "assert abs(add(1,2) - 4.5) < 1e-6",
        ],
    ),
    "an array for a distance": (
        """
import numpy as np
class A:
    def __sub__(s, o): return np.zeros(())
    __rsub__ = __sub__
def add(a, b): return A()
""",
        [
            "assert abs(add(1,2) - 4.5) < 1e-6",
        ],
    ),
    "a list for a distance": (
        """
class A:
    def __sub__(s, o): return [0.0]
    __rsub__ = __sub__
def add(a, b): return A()
""",
        [
            """
import numpy as np
assert np.abs(add(1,2) - 4.5) < 1e-6
""",
        ],
    ),
    "has a function of the tests call exec": (
        TAKES_OVER
        + """
def add(a, b, f):
    f(exec, TAKEN_OVER)
    return 0
""",
        [
            "assert add(1, 2, lambda g, x: g(x)) == 3",
        ],
    ),
    "sends the name of exec": (
        GUEST
        + TAKES_OVER
        + """
v = sys.modules[type(G).__module__] if type(G).__module__ in sys.modules else None
def add(a, b, f):
    import builtins
    G._export = None
    g = type(G)._send.__globals__
    g['REACHING'] = frozenset()
    del G._export
    f(exec, TAKEN_OVER)
    return 0
""",
        [
            "assert add(1, 2, lambda g, x: g(x)) == 3",
        ],
    ),
}
"""By name, a program, and tests of which it passes none."""
